"""Products with weights in GGUF's 4-, 5-, 6- and 8-bit formats, in their own bits (`backends/triton/packed.py`).

A tile is 64 rows and 128 columns, in eight groups of 16 columns. Its bytes are planes of [64, 16]: the low nibbles of
group j and of group j + 4 are in plane j, and the higher bits of several groups are in the planes behind. So a program
loads whole planes, and unpacks in registers without moving anything.

One rule for any number of tokens: a weight is decoded in float32, which is exact up to the last subtraction, rounded
to bfloat16 once, and multiplied, columns in ascending order. With many tokens, weights are unpacked to memory first and
go through `linear.py`: the same values in the same order.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import activate, dot, narrow
from twostroke.backends.triton.kernels.tiles import input_tile

ROWS: tl.constexpr = tl.constexpr(64)
COLUMNS: tl.constexpr = tl.constexpr(128)
GROUP: tl.constexpr = tl.constexpr(16)
PLANE: tl.constexpr = tl.constexpr(64 * 16)


@triton.jit
def decode(planes, scales, minima, d, dmin, place, tile, blocks, R, c, N: tl.constexpr, FORM: tl.constexpr):
    """Group N of a tile: float32 [rows, 16]. See `Form.code` for FORM.

    Args:
        planes, scales, minima, d, dmin: the packed matrix.
        place: index of the tile; tile: index of the tile along K; blocks: scales' blocks along K for a row of tiles.
        R: rows in the tile [rows]; c: columns in the group [16].
    """
    BITS: tl.constexpr = FORM % 16
    KIND: tl.constexpr = FORM // 16 % 16
    ZERO: tl.constexpr = FORM // 256 % 64
    MINIMA: tl.constexpr = FORM // 16384
    PLANES: tl.constexpr = BITS if BITS < 8 else 8
    bytes = planes + place * (PLANES * PLANE) + R[:, None] * GROUP + c[None, :]
    if BITS == 8:
        codes = tl.load(bytes + N * PLANE).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        low = tl.load(bytes + (N % 4) * PLANE)
        if N < 4:
            whole = (low & 15).to(tl.int32)
        else:
            whole = (low >> 4).to(tl.int32)
        if BITS == 5:
            whole += ((tl.load(bytes + 4 * PLANE).to(tl.int32) >> N) & 1) << 4
        if BITS == 6:
            whole += ((tl.load(bytes + (4 + N // 4) * PLANE).to(tl.int32) >> (2 * (N % 4))) & 3) << 4
        codes = (whole - ZERO).to(tl.float32)
    if KIND == 0:  # a float16 scale for 32 columns
        at = (place * 4 + N // 2) * ROWS + R
        scale = tl.load(d + at).to(tl.float32)
        if MINIMA:
            least = -tl.load(dmin + at).to(tl.float32)
    else:  # integer scales, times a float16 for 256 columns
        block = blocks + tile // 2
        main = tl.load(d + block * ROWS + R).to(tl.float32)
        if KIND == 1:
            at = (place * 4 + N // 2) * ROWS + R
            scale = main * tl.load(scales + at).to(tl.float32)
            least = tl.load(dmin + block * ROWS + R).to(tl.float32) * tl.load(minima + at).to(tl.float32)
        else:
            scale = main * tl.load(scales + (place * 8 + N) * ROWS + R).to(tl.int8, bitcast=True).to(tl.float32)
    values = scale[:, None] * codes
    if MINIMA:
        values = values - least[:, None]
    return values


@triton.jit
def packed_chain(
    x, planes, scales, minima, d, dmin, row_tile, first, last,
    K: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The products of tiles [first, last) along K of one tile of rows: float32 [64, T]."""
    acc = tl.zeros((ROWS, T), tl.float32)
    R, c = tl.arange(0, ROWS), tl.arange(0, GROUP)
    blocks = row_tile * ((TILES + 1) // 2)
    for tile in range(first, last):
        place = (row_tile * TILES + tile).to(tl.int64)
        for i in tl.static_range(8):
            weights = narrow(decode(planes, scales, minima, d, dmin, place, tile, blocks, R, c, i, FORM))
            k = tile * COLUMNS + i * GROUP + c
            acc = dot(weights, input_tile(x, k, K, 128), acc)
    return acc


@kernel
def packed_linear_kernel(
    x_ptr, planes, scales, minima, d, dmin, out_ptr, segment_stride, out_stride,
    FEATURES: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, SEGMENT: tl.constexpr, T: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """out [segments, tokens, features] float32. Grid: tiles of tokens, tiles of 64 features, segments."""
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    row_tile, s = tl.program_id(1), tl.program_id(2)
    features = row_tile * ROWS + tl.arange(0, ROWS)
    first = s * (SEGMENT // 128)
    last = min(first + SEGMENT // 128, TILES)
    x = x_ptr + tokens.to(tl.int64) * K
    acc = packed_chain(x, planes, scales, minima, d, dmin, row_tile, first, last, K, TILES, T, FORM)
    places = out_ptr + s * segment_stride + tokens[:, None].to(tl.int64) * out_stride + features[None, :]
    tl.store(places, tl.trans(acc), mask=features[None, :] < FEATURES)


@kernel
def packed_gated_kernel(
    x_ptr, planes, scales, minima, d, dmin, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, GELU: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """out [tokens, FEATURES] bfloat16 = activation(x gate^T) * (x up^T); the tiles of up follow those of gate."""
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    row_tile = tl.program_id(1)
    features = row_tile * ROWS + tl.arange(0, ROWS)
    x = x_ptr + tokens.to(tl.int64) * K
    R, c = tl.arange(0, ROWS), tl.arange(0, GROUP)
    second = row_tile + (FEATURES + 63) // 64
    half: tl.constexpr = (TILES + 1) // 2
    gate, up = tl.zeros((ROWS, T), tl.float32), tl.zeros((ROWS, T), tl.float32)
    for tile in range(TILES):
        first_place = (row_tile * TILES + tile).to(tl.int64)
        second_place = (second * TILES + tile).to(tl.int64)
        for i in tl.static_range(8):
            k = tile * COLUMNS + i * GROUP + c
            inputs = input_tile(x, k, K, 128)
            gates = decode(planes, scales, minima, d, dmin, first_place, tile, row_tile * half, R, c, i, FORM)
            ups = decode(planes, scales, minima, d, dmin, second_place, tile, second * half, R, c, i, FORM)
            gate = dot(narrow(gates), inputs, gate)
            up = dot(narrow(ups), inputs, up)
    places = out_ptr + tokens[:, None].to(tl.int64) * FEATURES + features[None, :]
    made = narrow(activate(gate, GELU) * up)
    tl.store(places, tl.trans(made), mask=features[None, :] < FEATURES)


@kernel
def unpack_kernel(
    planes, scales, minima, d, dmin, rows_ptr, out_ptr, factor,
    FEATURES: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr, GATHER: tl.constexpr,
    NARROW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix, decoded: out [rows, K], bfloat16, or float32 times `factor`.

    With GATHER a program decodes the row that `rows_ptr` names (an embedding), else a tile of R = 64 rows.
    """
    tile = tl.program_id(1)
    c = tl.arange(0, GROUP)
    if GATHER:
        out_rows = tl.program_id(0) + tl.arange(0, R)
        rows = tl.load(rows_ptr + out_rows)
        row_tile = tl.sum(rows, 0) // ROWS
        inside = rows % ROWS
    else:
        row_tile = tl.program_id(0)
        inside = tl.arange(0, R)
        out_rows = row_tile * ROWS + inside
    place = (row_tile * TILES + tile).to(tl.int64)
    blocks = row_tile * ((TILES + 1) // 2)
    for i in tl.static_range(8):
        values = decode(planes, scales, minima, d, dmin, place, tile, blocks, inside, c, i, FORM)
        k = tile * COLUMNS + i * GROUP + c
        places = out_ptr + out_rows[:, None].to(tl.int64) * K + k[None, :]
        mask = k[None, :] < K
        if not GATHER:
            mask = mask & (out_rows[:, None] < FEATURES)
        if NARROW:
            tl.store(places, narrow(values), mask=mask)
        else:
            tl.store(places, values * factor, mask=mask)
