"""Compiles kernels for a Hopper GPU, which needs none, and prints what they became as JSON.

A process of its own: in the tests' process Triton interprets.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.triton.decoder import attention_options
from twostroke.backends.triton.kernels import attention, linear_attention, packed, pointwise, recurrent
from twostroke.backends.triton.packed import PACKED_FORMATS

PACKED_TYPES = {
    "x_ptr": "*bf16",
    "rows": "i32",
    "low": "*u8",
    "high": "*u8",
    "words": "*i32",
    "mains": "*i32",
    "out_ptr": "*fp32",
    "segment_stride": "i32",
    "out_stride": "i32",
}
CODED_TYPES = {
    "kv_ptr": "*u8",
    "q_ptr": "*bf16",
    "out_ptr": "*bf16",
    **dict.fromkeys(("work_ptr", "cells_ptr", "positions_ptr"), "*i32"),
    **dict.fromkeys(("sinks_ptr", "bias_ptr", "sums_ptr", "tops_ptr", "totals_ptr", "parts_ptr"), "*fp32"),
    **dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "growth_ptr"), "*fp32"),
    **dict.fromkeys(("page_stride", "layer", "window", "bias_stride", "part_stride"), "i32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}
STATE_TYPES = {
    **dict.fromkeys(("frames_ptr", "at_ptr", "cells_ptr", "row_cells_ptr", "items_ptr", "sequences_ptr"), "*i32"),
    **dict.fromkeys(("states_ptr", "parts_ptr", "weight_ptr", "sums_ptr", "write_ptr", "row_sums_ptr"), "*fp32"),
    **dict.fromkeys(("inputs_ptr", "pages_ptr", "rows_ptr", "made_ptr"), "*bf16"),
    **dict.fromkeys(("page_stride", "place", "start", "words", "N", "rows_stride", "rows_place"), "i32"),
    "q_scale": "fp32",
}
STATE = {"HK": 16, "HV": 32, "K": 128, "V": 128, "SIZE": 16384, "PAGE": 16}
CHUNK = {"TILED": True, "DELTA": True, "CHUNK": 64, "BLOCK": 16, "BLOCK_K": 128, "BLOCK_V": 32, "FIELDS": 6}
CONVOLUTION = {"WIDTH": 4, "BIAS": False, "NORMS": True, "ROWS": 16, "BLOCK": 128}
HEADS = {"HQ": 32, "HKV": 8, "D": 128, "PAGE": 16, "WIDTH": 128 + 64 + 8, "V_BITS": 4, "STAGES": 7}
TILES = {"ROWS": 128, "KEYS": 64, "BLOCK_D": 128, "WINDOW": False, "SPLIT": False, "SINKS": False, "BIASED": True}
STORE = {"PARTS": 1, "BIAS": False, "NORMS": False, "GROWS": False, "HEADS": 8, "HALF": 64}


def compiled(kernel: Any, types: dict[str, str], values: dict[str, int], **options: int) -> dict[str, int]:
    names: list[str] = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assembly = made.asm
    return {
        "products": assembly["ptx"].count("wgmma.mma_async"),
        "moves": assembly["ttgir"].count("ttg.convert_layout"),
        "loads that wait": assembly["ptx"].count("ld.global"),
    }


def packed_weights(form: int) -> dict[str, int]:
    sizes = {"FEATURES": 4096, "K": 4096, "UNITS": 128 if form // 16 % 16 == 2 else 64, "SEGMENT": 1024, "T": 16}
    values = sizes | {"FORM": form}
    return compiled(packed.packed_linear_kernel, PACKED_TYPES, values, num_warps=4, num_stages=3)


def coded_entries() -> dict[str, dict[str, int]]:
    options = attention_options(TILES["ROWS"], TILES["BLOCK_D"])
    return {
        "attention": compiled(attention.attention_kernel, CODED_TYPES, HEADS | TILES, **options),
        "store": compiled(pointwise.rope_store_kernel, CODED_TYPES, HEADS | STORE, num_warps=2),
    }


def states() -> dict[str, dict[str, int]]:
    chunks = compiled(
        linear_attention.linear_attention_kernel, STATE_TYPES | {"out_ptr": "*fp32"}, STATE | CHUNK, num_warps=4
    )
    types = STATE_TYPES | {"out_ptr": "*bf16"}
    return {"chunks": chunks, "convolution": compiled(recurrent.convolve_kernel, types, STATE | CONVOLUTION)}


if __name__ == "__main__":
    weights = {name: packed_weights(form.code) for name, form in PACKED_FORMATS.items()}
    print(json.dumps({"packed weights": weights, "coded entries": coded_entries(), "states": states()}))
