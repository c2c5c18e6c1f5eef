"""The products of `experts.py` with weights in GGUF's formats, unpacked in registers as `packed.py` does.

Tiles of all experts lie one after another. For any number of pairs a weight is decoded, rounded to bfloat16 once and
multiplied, columns in ascending order.
"""

import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import activate, dot, narrow
from twostroke.backends.triton.kernels.packed import COLUMNS, GROUP, ROWS, decode
from twostroke.backends.triton.kernels.tiles import input_tile


@kernel
def packed_experts_gated_kernel(
    h_ptr, planes, scales, minima, d, dmin, order_ptr, blocks_ptr, out_ptr,
    CHOSEN: tl.constexpr, FEATURES: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, GELU: tl.constexpr,
    T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As `experts_gated_kernel`. An expert's tiles are those of gate, then those of up. Grid: blocks, tiles of rows."""
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count  # the others repeat the first pair, and are not stored
        pair = start + tl.where(valid, lanes, 0)
        x = h_ptr + (tl.load(order_ptr + pair) // CHOSEN).to(tl.int64) * K
        R, c = tl.arange(0, ROWS), tl.arange(0, GROUP)
        tall: tl.constexpr = (FEATURES + 63) // 64
        half: tl.constexpr = (TILES + 1) // 2
        first = expert.to(tl.int64) * (2 * tall) + tl.program_id(1)
        second = first + tall
        gate, up = tl.zeros((ROWS, T), tl.float32), tl.zeros((ROWS, T), tl.float32)
        for tile in range(TILES):
            for i in tl.static_range(8):
                k = tile * COLUMNS + i * GROUP + c
                inputs = input_tile(x, k, K, 128)
                place = first * TILES + tile
                gates = decode(planes, scales, minima, d, dmin, place, tile, first * half, R, c, i, FORM)
                gate = dot(narrow(gates), inputs, gate)
                place = second * TILES + tile
                ups = decode(planes, scales, minima, d, dmin, place, tile, second * half, R, c, i, FORM)
                up = dot(narrow(ups), inputs, up)
        features = tl.program_id(1) * ROWS + R
        places = out_ptr + pair[:, None].to(tl.int64) * FEATURES + features[None, :]
        made = narrow(activate(gate, GELU) * up)
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])


@kernel
def packed_experts_down_kernel(
    x_ptr, planes, scales, minima, d, dmin, order_ptr, blocks_ptr, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """As `experts_down_kernel`. Grid: blocks, tiles of rows."""
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count
        pair = start + tl.where(valid, lanes, 0)
        x = x_ptr + pair.to(tl.int64) * K
        R, c = tl.arange(0, ROWS), tl.arange(0, GROUP)
        tall: tl.constexpr = (FEATURES + 63) // 64
        half: tl.constexpr = (TILES + 1) // 2
        own = expert.to(tl.int64) * tall + tl.program_id(1)
        made = tl.zeros((ROWS, T), tl.float32)
        for tile in range(TILES):
            place = own * TILES + tile
            for i in tl.static_range(8):
                weights = decode(planes, scales, minima, d, dmin, place, tile, own * half, R, c, i, FORM)
                k = tile * COLUMNS + i * GROUP + c
                made = dot(narrow(weights), input_tile(x, k, K, 128), made)
        features = tl.program_id(1) * ROWS + R
        places = out_ptr + tl.load(order_ptr + pair)[:, None].to(tl.int64) * FEATURES + features[None, :]
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])
