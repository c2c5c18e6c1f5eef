"""The products of `experts.py` with weights in GGUF's formats, unpacked in registers as `packed.py` does.

Tiles of all experts lie one after another. For any number of pairs a weight is decoded, rounded to bfloat16 once and
multiplied, columns in ascending order.
"""

import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import activate, narrow
from twostroke.backends.triton.kernels.packed import ROWS, packed_chain, packed_pair


@kernel
def packed_experts_gated_kernel(
    h_ptr, low, high, words, mains, bias_ptr, order_ptr, blocks_ptr, out_ptr,
    CHOSEN: tl.constexpr, FEATURES: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, T: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """`experts_gated_kernel` for packed weights. An expert's tiles are gate's, then up's. Grid: blocks, row tiles."""
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count
        pair = start + tl.where(valid, lanes, 0)
        x = h_ptr + (tl.load(order_ptr + pair) // CHOSEN).to(tl.int64) * K
        tall: tl.constexpr = (FEATURES + 63) // 64
        gate_tile = expert * (2 * tall) + tl.program_id(1)
        gate, up = packed_pair(x, valid, low, high, words, mains, gate_tile, gate_tile + tall, K, UNITS, T, FORM)
        features = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        if BIAS:  # [experts, 2, FEATURES]
            bias = bias_ptr + expert * (2 * FEATURES) + tl.minimum(features, FEATURES - 1)
            gate, up = gate + tl.load(bias)[:, None], up + tl.load(bias + FEATURES)[:, None]
        made = narrow(activate(gate, up, ACTIVATION))
        places = out_ptr + pair[:, None].to(tl.int64) * FEATURES + features[None, :]
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])


@kernel
def packed_experts_down_kernel(
    x_ptr, low, high, words, mains, bias_ptr, order_ptr, blocks_ptr, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, UNITS: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """`experts_down_kernel` for packed weights. Grid: blocks, tiles of rows."""
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count
        pair = start + tl.where(valid, lanes, 0)
        x = x_ptr + pair.to(tl.int64) * K
        tall: tl.constexpr = (FEATURES + 63) // 64
        own = expert * tall + tl.program_id(1)
        made = packed_chain(x, valid, low, high, words, mains, own, 0, (K + 255) // 256, K, UNITS, T, FORM)
        features = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        if BIAS:  # [experts, FEATURES]
            made += tl.load(bias_ptr + expert * FEATURES + tl.minimum(features, FEATURES - 1))[:, None]
        places = out_ptr + tl.load(order_ptr + pair)[:, None].to(tl.int64) * FEATURES + features[None, :]
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])
