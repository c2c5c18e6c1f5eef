"""Products with weights in GGUF's 4-, 5-, 6- and 8-bit formats, in their own bits (`backends/triton/packed.py`).

A unit is 64 rows and two groups of columns. Its bytes are a plane of [64, group]: the low nibbles of both groups, or a
plane for each group of 8-bit weights. Higher bits lie in planes that several units share. A program loads whole planes
and 32-bit words of scales through a pipeline, and unpacks in registers: between a plane and the tensor cores there is
nothing but arithmetic, so nothing moves between threads. Instructions bind, so their number is what counts.

One rule for any number of tokens: a weight is decoded in float32, which is exact up to the last subtraction, rounded
to bfloat16 once, and multiplied, columns in ascending order. With many tokens, weights are unpacked to memory first and
go through `linear.py`: the same values in the same order.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel, kernel_for_any
from twostroke.backends.triton.kernels.numbers import INTERPRET, activate, dot, narrow

ROWS: tl.constexpr = tl.constexpr(64)
BLOCK: tl.constexpr = tl.constexpr(256)  # columns that share planes of higher bits, and main scales
MAGIC: tl.constexpr = tl.constexpr(0x4B000000)  # 2**23 in float32: its last bits count ones, so this adds an integer


@triton.constexpr_function
def unpacking(BITS, SIDE, SHIFT):
    """PTX that makes two float16, 1024 + code, of two bytes of a plane, and of two bytes with higher bits.

    1024 is a float16 whose last bits count ones: so codes need no conversion. The second code of 4 bits stays where it
    is, 16 times itself.
    """
    spread = "cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; mov.b32 m, 0x64006400;"
    if BITS == 8:
        cut = "xor.b32 t, t, 0x00800080; or.b32 $0, t, m;"
    elif BITS == 4:
        cut = f"lop3.b32 $0, t, {'0x00F000F0' if SIDE else '0x000F000F'}, m, 0xEA;"  # 0xEA: a & b | c
    else:
        spread += " cvt.u32.u16 u, $2; prmt.b32 u, u, 0, 0x4140;"
        low = ("shr.b32 t, t, 4; " if SIDE else "") + "lop3.b32 t, t, 0x000F000F, m, 0xEA;"
        move = f"shl.b32 u, u, {4 - SHIFT};" if SHIFT < 4 else f"shr.b32 u, u, {SHIFT - 4};"
        cut = f"{low} {move} lop3.b32 $0, u, {'0x00100010' if BITS == 5 else '0x00300030'}, t, 0xEA;"
    return "{ .reg .b32 t, u, m; " + spread + " " + cut + " }"


@triton.jit
def half(word, SIDE: tl.constexpr):
    """A float16 in an int32, as float32."""
    return (word >> (16 * SIDE)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def byte(word, N: tl.constexpr, SIGNED: tl.constexpr):
    """Byte N of an int32, as float32."""
    code = (word >> (8 * N)) & 255
    if SIGNED:
        return ((code ^ 128) | MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + 128.0)
    return (code | MAGIC).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def codes(plane, more, SIDE: tl.constexpr, SHIFT: tl.constexpr, FORM: tl.constexpr, ONE: tl.constexpr):
    """The codes of a group, less the form's zero, as float32; 16 times that on the second side of 4 bits.

    ONE: of so few rows that bytes come one by one.
    """
    BITS: tl.constexpr = FORM % 16
    ZERO: tl.constexpr = 128 if BITS == 8 else FORM // 256 % 64 * (16 if BITS == 4 and SIDE else 1)
    if INTERPRET or ONE:
        if BITS == 8:
            found = plane.to(tl.int32) ^ 128
        elif BITS == 4 and SIDE:
            found = plane.to(tl.int32) & 240
        else:
            found = (plane.to(tl.int32) >> (4 * SIDE)) & 15
        if BITS == 5:
            found = found | ((more.to(tl.int32) >> SHIFT) & 1) << 4
        if BITS == 6:
            found = found | ((more.to(tl.int32) >> SHIFT) & 3) << 4
        return (found | MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    text: tl.constexpr = unpacking(BITS, SIDE, SHIFT)
    made = tl.inline_asm_elementwise(text, "=r,h,h", [plane, more], dtype=tl.float16, is_pure=True, pack=2)
    return (made - (1024.0 + ZERO)).to(tl.float32)


@triton.jit
def decode(
    low, high, words, mains, row_tile, block, R, c,
    J: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Unit J of a block: its first and its second group, float32 [rows, group]. See `Form.code` for FORM.

    Args:
        low, high, words, mains: the packed matrix.
        row_tile, block: where in it, in tiles of 64 rows and blocks of 256 columns.
        R: rows in the tile [rows]; c: columns in the group.
        UNITS: of a row of tiles. Units beyond them are 0.
        ONE: R is one row.
    """
    BITS: tl.constexpr = FORM % 16
    KIND: tl.constexpr = FORM // 16 % 16
    MINIMA: tl.constexpr = FORM // 16384
    GROUP: tl.constexpr = 16 if KIND == 2 else 32
    EACH: tl.constexpr = 128 // GROUP  # units of a block
    PLANE: tl.constexpr = 64 * GROUP
    PLANES: tl.constexpr = 2 if BITS == 8 else 1
    WORDS: tl.constexpr = 2 if KIND == 0 and MINIMA else 1
    BLOCKS: tl.constexpr = (UNITS + EACH - 1) // EACH
    unit = block * EACH + J
    place = row_tile.to(tl.int64) * UNITS + unit
    owner = row_tile.to(tl.int64) * BLOCKS + block
    inside = R[:, None] * GROUP + c[None, :]
    bytes = low + place * (PLANES * PLANE) + inside
    # A word has the scales of 64 columns: of a unit, or of two.
    SHARED: tl.constexpr = 64 // (2 * GROUP)
    at = words + (row_tile.to(tl.int64) * (UNITS // SHARED) + unit // SHARED) * (WORDS * ROWS) + R
    if UNITS % EACH != 0:
        mask = (R < ROWS) & (unit < UNITS)
        word, plane = tl.load(at, mask=mask, other=0), tl.load(bytes, mask=mask[:, None], other=0)
        other = plane
        if BITS == 8:
            other = tl.load(bytes + PLANE, mask=mask[:, None], other=0)
        if WORDS == 2:
            minima = tl.load(at + ROWS, mask=mask, other=0)
    else:
        word, plane = tl.load(at), tl.load(bytes)
        other = plane
        if BITS == 8:
            other = tl.load(bytes + PLANE)
        if WORDS == 2:
            minima = tl.load(at + ROWS)
    more = plane
    if BITS == 5:
        more = tl.load(high + owner * PLANE + inside)
    if BITS == 6:
        more = tl.load(high + (owner * (EACH // 2) + J // 2) * PLANE + inside)
    FIELD: tl.constexpr = BITS - 4 if BITS == 5 or BITS == 6 else 0  # bits of a code in a plane of higher bits
    FIRST: tl.constexpr = (2 * J * FIELD) % 8
    first, second = codes(plane, more, 0, FIRST, FORM, ONE), codes(other, more, 1, FIRST + FIELD, FORM, ONE)
    SHARE: tl.constexpr = 0.0625 if BITS == 4 else 1.0  # of the second code
    if KIND == 0:  # a float16 scale for each group
        first, second = half(word, 0)[:, None] * first, (half(word, 1) * SHARE)[:, None] * second
        if MINIMA:
            first, second = first + half(minima, 0)[:, None], second + half(minima, 1)[:, None]
    else:  # integer scales, times a float16 for the block
        main = tl.load(mains + owner * ROWS + R)
        d = half(main, 0)
        if KIND == 1:
            dmin = half(main, 1)
            first = (d * byte(word, 0, False))[:, None] * first - (dmin * byte(word, 2, False))[:, None]
            second = (d * SHARE * byte(word, 1, False))[:, None] * second - (dmin * byte(word, 3, False))[:, None]
        else:
            first *= (d * byte(word, J % 2 * 2, True))[:, None]
            second *= (d * byte(word, J % 2 * 2 + 1, True))[:, None]
    return first, second


@triton.jit
def unit(
    low, high, words, mains, row_tile, block, J: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Unit J of a block as it is multiplied: bfloat16 [64, columns]."""
    GROUP: tl.constexpr = 16 if FORM // 16 % 16 == 2 else 32
    R, c = tl.arange(0, ROWS), tl.arange(0, GROUP)
    one, two = decode(low, high, words, mains, row_tile, block, R, c, J, UNITS, FORM, False)
    return tl.join(narrow(one), narrow(two)).permute(0, 2, 1).reshape(ROWS, 2 * GROUP)


@triton.jit
def inputs(x, valid, k, K: tl.constexpr):
    """Columns k of the rows that `x` [T] points to: [columns, T]. Rows that are not valid are 0, without a load."""
    if K % 256 == 0:
        return tl.load(x[None, :] + k[:, None], mask=valid[None, :], other=0.0)
    return tl.load(x[None, :] + k[:, None], mask=valid[None, :] & (k < K)[:, None], other=0.0)


@triton.jit
def packed_chain(
    x, valid, low, high, words, mains, row_tile, first, last,
    K: tl.constexpr, UNITS: tl.constexpr, T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The products of blocks [first, last) along K of one tile of rows: float32 [64, T]. valid [T]: rows of x."""
    WIDE: tl.constexpr = 32 if FORM // 16 % 16 == 2 else 64
    acc = tl.zeros((ROWS, T), tl.float32)
    for block in range(first, last):
        for j in tl.static_range(256 // WIDE):
            weights = unit(low, high, words, mains, row_tile, block, j, UNITS, FORM)
            k = tl.arange(0, WIDE) + (block * BLOCK + j * WIDE)
            acc = dot(weights, inputs(x, valid, k, K), acc)
    return acc


@kernel_for_any("rows")
def packed_linear_kernel(
    x_ptr, rows, low, high, words, mains, out_ptr, segment_stride, out_stride,
    FEATURES: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, SEGMENT: tl.constexpr, T: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """out [segments, tokens, features] float32, of the first `rows` tokens.

    Grid: tiles of tokens, tiles of 64 features, segments.
    """
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    row_tile, s = tl.program_id(1), tl.program_id(2)
    features = row_tile * ROWS + tl.arange(0, ROWS)
    first = s * (SEGMENT // 256)
    last = min(first + SEGMENT // 256, (K + 255) // 256)
    x = x_ptr + tokens.to(tl.int64) * K
    acc = packed_chain(x, tokens < rows, low, high, words, mains, row_tile, first, last, K, UNITS, T, FORM)
    places = out_ptr + s * segment_stride + tokens[:, None].to(tl.int64) * out_stride + features[None, :]
    tl.store(places, tl.trans(acc), mask=features[None, :] < FEATURES)


@triton.jit
def packed_pair(
    x, valid, low, high, words, mains, gate_tile, up_tile,
    K: tl.constexpr, UNITS: tl.constexpr, T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """gate x and up x of a tile of rows of both matrices: float32 [64, T]."""
    WIDE: tl.constexpr = 32 if FORM // 16 % 16 == 2 else 64
    gate, up = tl.zeros((ROWS, T), tl.float32), tl.zeros((ROWS, T), tl.float32)
    for block in range((K + 255) // 256):
        for j in tl.static_range(256 // WIDE):
            columns = inputs(x, valid, tl.arange(0, WIDE) + (block * BLOCK + j * WIDE), K)
            gate = dot(unit(low, high, words, mains, gate_tile, block, j, UNITS, FORM), columns, gate)
            up = dot(unit(low, high, words, mains, up_tile, block, j, UNITS, FORM), columns, up)
    return gate, up


@kernel_for_any("rows")
def packed_gated_kernel(
    x_ptr, rows, low, high, words, mains, bias_ptr, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, T: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """out [tokens, FEATURES] bfloat16 = activation(x gate^T) * (x up^T); the tiles of up follow those of gate."""
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    row_tile = tl.program_id(1)
    features = row_tile * ROWS + tl.arange(0, ROWS)
    x = x_ptr + tokens.to(tl.int64) * K
    up_tile = row_tile + (FEATURES + 63) // 64
    gate, up = packed_pair(x, tokens < rows, low, high, words, mains, row_tile, up_tile, K, UNITS, T, FORM)
    if BIAS:  # [2, FEATURES]
        at = bias_ptr + tl.minimum(features, FEATURES - 1)
        gate, up = gate + tl.load(at)[:, None], up + tl.load(at + FEATURES)[:, None]
    made = narrow(activate(gate, up, ACTIVATION))
    places = out_ptr + tokens[:, None].to(tl.int64) * FEATURES + features[None, :]
    tl.store(places, tl.trans(made), mask=features[None, :] < FEATURES)


@kernel
def unpack_kernel(
    low, high, words, mains, rows_ptr, out_ptr, factor,
    FEATURES: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, R: tl.constexpr, GATHER: tl.constexpr,
    NARROW: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Rows of the matrix, decoded: out [rows, K], bfloat16, or float32 times `factor`. Grid: rows or tiles, blocks.

    With GATHER a program decodes the row that `rows_ptr` names (an embedding), else a tile of R = 64 rows.
    """
    GROUP: tl.constexpr = 16 if FORM // 16 % 16 == 2 else 32
    block = tl.program_id(1)
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
    for j in tl.static_range(128 // GROUP):
        groups = decode(low, high, words, mains, row_tile, block, inside, c, j, UNITS, FORM, GATHER)
        for side in tl.static_range(2):
            k = block * BLOCK + (2 * j + side) * GROUP + c
            places = out_ptr + out_rows[:, None].to(tl.int64) * K + k[None, :]
            mask = k[None, :] < K
            if not GATHER:
                mask = mask & (out_rows[:, None] < FEATURES)
            if NARROW:
                tl.store(places, narrow(groups[side]), mask=mask)
            else:
                tl.store(places, groups[side] * factor, mask=mask)
