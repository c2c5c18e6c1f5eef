"""Kernels of per-layer embeddings: the numbers of a token for each layer, and the gate through which a layer sees them.

Gemma Team 2025 (Gemma 3n), 2026 (Gemma 4).
"""

import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel, unfused_kernel
from twostroke.backends.triton.kernels.numbers import activate, narrow, rms
from twostroke.backends.triton.kernels.tiles import sum_of_parts


@unfused_kernel
def token_inputs_kernel(
    parts_ptr, part_stride, norm_ptr, out_ptr, factor, eps,
    LAYERS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (norm(factor * the parts' sum) + out) / sqrt(2), float32 [N, LAYERS, SIZE]. Grid: rows, LAYERS."""
    place = (tl.program_id(0).to(tl.int64) * LAYERS + tl.program_id(1)) * SIZE
    i = tl.arange(0, BLOCK)
    projected = sum_of_parts(parts_ptr, part_stride, place + i, i < SIZE, PARTS) * factor
    scale = rms(tl.sum(projected * projected, 0), SIZE, eps)
    weight = tl.load(norm_ptr + i, mask=i < SIZE, other=0.0)
    found = tl.load(out_ptr + place + i, mask=i < SIZE, other=0.0)
    tl.store(out_ptr + place + i, (projected * scale * weight + found) * 0.7071067811865476, mask=i < SIZE)


@kernel
def input_gate_kernel(
    parts_ptr, part_stride, inputs_ptr, out_ptr, layer,
    LAYERS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """activation(the parts' sum) * a layer's numbers of the token, bfloat16 [N, SIZE]. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    gate = sum_of_parts(parts_ptr, part_stride, row * SIZE + i, i < SIZE, PARTS)
    inputs = tl.load(inputs_ptr + (row * LAYERS + layer) * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(out_ptr + row * SIZE + i, narrow(activate(gate, inputs, ACTIVATION)), mask=i < SIZE)
