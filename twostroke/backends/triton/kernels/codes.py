"""K and V as integers with a scale for each entry and head: the arithmetic of `models.kv_formats` in Triton.

A record in a page has the codes of K, their scale, the codes of V and their scale. Codes of 8 bits are exact in
bfloat16, so the matrix unit multiplies them as it multiplies numbers: scales go to scores and to weights.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.numbers import narrow

SCALE = tl.constexpr(4)  # bytes


@triton.jit
def rotated(x, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """[ROWS, D] float32 times a Hadamard matrix, not normalized; D is 2**STAGES.

    Each stage adds and subtracts neighbours, and puts sums before differences: so the next stage's neighbours are
    twice as far apart, and after the last all columns are where they were. The order of sums is `kv_formats.rotated`'s.
    """
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, (ROWS, D // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, D))
    return x


@triton.jit
def load_codes(side, address, column, mask, D: tl.constexpr, BITS: tl.constexpr):
    """Codes as bfloat16. `side`: of the first record; `address` and `column` are broadcast to the tile's shape."""
    if BITS == 8:
        code = tl.load(side + address + column, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    else:  # a byte has a column of the first half and, above it, one of the second
        byte = tl.load(side + address + column % (D // 2), mask=mask, other=0).to(tl.int32)
        code = ((((byte >> (column // (D // 2) * 4)) & 15) ^ 8) - 8).to(tl.float32)
    return narrow(code)


@triton.jit
def load_scales(side, address, mask, D: tl.constexpr, BITS: tl.constexpr):
    """The scale behind the codes of each record, float32."""
    place = (side + address + D * BITS // 8).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def store_codes(
    places, x, is_v, mask, HEADS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr, V_BITS: tl.constexpr
):
    """Write heads [HEADS, D], of bfloat16's numbers in float32, to records at `places` [HEADS], as K or as V."""
    x = rotated(x, HEADS, D, STAGES)
    top = tl.max(tl.abs(x), 1)
    top = tl.where(tl.sum((x == x).to(tl.int32), 1) < D, float("nan"), top)  # what is NaN stays so
    most = tl.where(is_v, (1 << (V_BITS - 1)) - 1.0, 127.0)
    gain = tl.where(top == 0, 0.0, tl.div_rn(most, top))
    # Rounded to the nearest even integer by the sum's own rounding: 1.5 * 2^23.
    code = ((x * gain[:, None] + 12582912.0) - 12582912.0).to(tl.int32)
    scale = tl.div_rn(top, most)
    column = tl.arange(0, D)
    wide = mask & ((V_BITS == 8) | (is_v == 0))
    tl.store(places[:, None] + column[None, :], (code & 255).to(tl.uint8), mask=wide[:, None])
    behind = tl.where(is_v, D * V_BITS // 8, D)
    if V_BITS == 4:
        low, high = tl.split(tl.permute(tl.reshape(code, (HEADS, 2, D // 2)), (0, 2, 1)))
        half = tl.arange(0, D // 2)
        both = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
        tl.store(places[:, None] + half[None, :], both, mask=(mask & is_v)[:, None])
    tl.store((places + behind).to(tl.pointer_type(tl.float32), bitcast=True), scale, mask=mask)
