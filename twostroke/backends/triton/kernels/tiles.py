"""Tiles of the operands of a product, from memory."""

import triton
import triton.language as tl


@triton.jit
def weight_tile(w, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows of a bfloat16 matrix at `w`, columns k: [F, BLOCK_K]."""
    places = w + rows[:, None] * K + k[None, :]
    if K % BLOCK_K == 0:
        return tl.load(places)
    return tl.load(places, mask=k[None, :] < K, other=0.0)


@triton.jit
def input_tile(x, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k of the rows that `x` [T] points to: [columns, T]. BLOCK_K: columns that a whole step takes."""
    if K % BLOCK_K == 0:
        return tl.load(x[None, :] + k[:, None])
    return tl.load(x[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)


@triton.jit
def sum_of_parts(parts, part_stride, places, mask, PARTS: tl.constexpr):
    """The outputs of a product whose parts, `part_stride` apart, are added in their order."""
    total = tl.load(parts + places, mask=mask, other=0.0)
    for s in tl.static_range(1, PARTS):
        total += tl.load(parts + s * part_stride + places, mask=mask, other=0.0)
    return total
