"""Compiles kernels for a Hopper GPU, which needs none, and prints what they became as JSON.

A process of its own: in the tests' process Triton interprets.
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.triton.attention import attention_options
from twostroke.backends.triton.kernels import (
    attention,
    experts,
    linear_attention,
    packed,
    pointwise,
    recurrent,
    token_inputs,
)
from twostroke.backends.triton.kernels.launch import Kernel
from twostroke.backends.triton.packed import PACKED_FORMATS
from twostroke.backends.triton.pass_plan import keys_of, tall_of

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
    **dict.fromkeys(("q_squares_ptr", "k_squares_ptr"), "*fp32"),
    **dict.fromkeys(("page_stride", "layer", "window", "bias_stride", "part_stride"), "i32"),
    **dict.fromkeys(("scale", "eps", "cap_scale"), "fp32"),
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
OFF = dict.fromkeys(("WINDOW", "SPLIT", "SINKS", "CAPPED"), False)
TILES = {"ROWS": 128, "KEYS": 64, "BLOCK_D": 128, "BIASED": True} | OFF
PLAIN = dict.fromkeys(("BIAS", "NORMS", "WHOLE", "VALUE_NORM", "SAME", "GROWS"), False)
STORE = {"PARTS": 1, "HEADS": 8, "HALF": 64} | PLAIN
PARTS = {"PARTS": 2, "BIAS": True, "HEADS": 8, "BLOCK": 128}
ROWS = {"HIDDEN": 2560, "PARTS": 2, "BLOCK": 4096, "POST": True, "COPIED": True, "GROWN": True} | dict.fromkeys(
    ("BIAS", "NORM", "DROPOUT", "SCALED"), False
)
MIXTURE_TYPES = {
    **dict.fromkeys(("logits_ptr", "bias_ptr", "factors_ptr", "weights_ptr", "parts_ptr", "gate_ptr"), "*fp32"),
    **dict.fromkeys(("norm_ptr", "out_norm_ptr", "out_ptr"), "*fp32"),
    "ids_ptr": "*i32",
    "h_ptr": "*bf16",
    "part_stride": "i32",
    "eps": "fp32",
}
MIXTURE = {
    "EXPERTS": 128,
    "CHOSEN": 8,
    "NORMALIZED": True,
    "SIGMOID": False,
    "BIASED": False,
    "FACTORS": True,
    "BLOCK": 128,
}
SHARED = {"HIDDEN": 2816, "PARTS": 2, "GATED": False, "NORMED": True, "BLOCK": 4096}
INPUTS = {"LAYERS": 30, "SIZE": 256, "PARTS": 2, "BLOCK": 256}


def compiled(kernel: Kernel, types: dict[str, str], values: dict[str, int], **options: int) -> dict[str, int]:
    names: list[str] = kernel.function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")}
    chosen = {(names.index(name),): value for name, value in values.items() if name in names}
    source = ASTSource(kernel.function, signature, chosen, aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options=options | {"enable_fp_fusion": kernel.fuses}
    )
    assembly = made.asm
    return {
        "products": assembly["ptx"].count("wgmma.mma_async"),
        "moves": assembly["ttgir"].count("ttg.convert_layout"),
        "loads that wait": assembly["ptx"].count("ld.global"),
        "fused": assembly["ptx"].count("fma.rn.f32"),
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


def families() -> dict[str, dict[str, int]]:
    """What OLMo 2, Gemma 2 and Gemma 4 have and others lack; heads of 512."""
    types = CODED_TYPES | {"kv_ptr": "*bf16"}
    plain = HEADS | {"WIDTH": 128, "V_BITS": 0, "STAGES": 0}
    wide = TILES | {"ROWS": tall_of(512), "KEYS": keys_of(512), "BLOCK_D": 512, "CAPPED": True, "BIASED": False}
    heads = plain | {"HQ": 16, "HKV": 1, "D": 512, "WIDTH": 512}
    normed = plain | STORE | {"NORMS": True}
    rows = {"weight_ptr": "*fp32", "dropout_ptr": "*fp32", "stream": "fp32", "factor": "fp32", "post_ptr": "*fp32"}
    inputs = types | {"norm_ptr": "*fp32", "out_ptr": "*fp32", "factor": "fp32"}
    return {
        "wide heads, capped": compiled(
            attention.attention_kernel, types, heads | wide, **attention_options(wide["ROWS"], 512)
        ),
        "whole norms": compiled(pointwise.rope_store_kernel, types, normed | {"WHOLE": 64}, num_warps=2),
        "values as keys": compiled(
            pointwise.rope_store_kernel, types, normed | {"SAME": True, "VALUE_NORM": True}, num_warps=2
        ),
        "no entries": compiled(pointwise.rope_store_kernel, types, normed | {"HKV": 0}, num_warps=2),
        "squares": compiled(pointwise.head_squares_kernel, types, plain | PARTS, num_warps=2),
        "scaled stream": compiled(pointwise.norm_kernel, types | rows | {"x_ptr": "*fp32"}, ROWS, num_warps=16),
        "factors": compiled(experts.choose_kernel, MIXTURE_TYPES, MIXTURE, num_warps=1),
        "sums with norms": compiled(experts.shared_expert_kernel, MIXTURE_TYPES, SHARED, num_warps=16),
        "cap": compiled(pointwise.cap_kernel, {"x_ptr": "*fp32", "count": "i32", "cap": "fp32"}, {"BLOCK": 1024}),
        "inputs": compiled(token_inputs.token_inputs_kernel, inputs, INPUTS, num_warps=1),
        "gate": compiled(token_inputs.input_gate_kernel, types | {"inputs_ptr": "*fp32"}, INPUTS | {"ACTIVATION": 1}),
    }


if __name__ == "__main__":
    weights = {name: packed_weights(form.code) for name, form in PACKED_FORMATS.items()}
    print(
        json.dumps(
            {"packed weights": weights, "coded entries": coded_entries(), "states": states(), "families": families()}
        )
    )
