"""Compiles the kernels of packed weights for a Hopper GPU, which needs none, and prints what they became as JSON.

A process of its own: in the tests' process Triton interprets.
"""

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.backends.triton.kernels import packed
from twostroke.backends.triton.packed import PACKED_FORMATS

KERNEL: Any = packed.packed_linear_kernel
TYPES = {
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


def compiled(form: int) -> dict[str, int]:
    sizes = {"FEATURES": 4096, "K": 4096, "UNITS": 128 if form // 16 % 16 == 2 else 64, "SEGMENT": 1024, "T": 16}
    values = sizes | {"FORM": form}
    names: list[str] = KERNEL.arg_names
    signature = {name: TYPES.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if TYPES.get(name, "").startswith("*")}
    source = ASTSource(KERNEL, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    assembly = made.asm
    return {
        "products": assembly["ptx"].count("wgmma.mma_async"),
        "moves": assembly["ttgir"].count("ttg.convert_layout"),
        "loads that wait": assembly["ptx"].count("ld.global"),
    }


if __name__ == "__main__":
    print(json.dumps({name: compiled(form.code) for name, form in PACKED_FORMATS.items()}))
