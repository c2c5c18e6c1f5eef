"""Products with bfloat16 weights: out^T = W X^T.

The weights are the first operand, so any number of tokens takes the same kind of matrix instruction, and a token's
result is one chain of sums along K, in ascending order. K is cut into segments by the weight's shape. With few tokens
each segment is a program of its own, and whoever reads the result adds them; with many, a program adds them itself, in
the same order. Buffers of tokens are padded to whole tiles: a row of a tile never touches another.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.numbers import activate, dot, narrow


@triton.jit
def chain(x, w, begin, end, K: tl.constexpr, BLOCK_K: tl.constexpr, F: tl.constexpr, T: tl.constexpr):
    """The products of columns [begin, end): float32 [F, T]. `x` [T] and `w` [F] point to rows."""
    acc = tl.zeros((F, T), tl.float32)
    columns = tl.arange(0, BLOCK_K)
    for start in range(begin, end, BLOCK_K):
        k = start + columns
        if K % BLOCK_K == 0:
            weights = tl.load(w[:, None] + k[None, :])
            inputs = tl.load(x[None, :] + k[:, None])
        else:
            weights = tl.load(w[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
            inputs = tl.load(x[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
        acc = dot(weights, inputs, acc)
    return acc


@triton.jit
def linear_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    segment_stride,
    out_stride,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    FOLD: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [segments or 1, tokens, features] float32 = x [tokens, K] w [FEATURES, K]^T.

    Grid: tiles of tokens, tiles of features, and segments unless they are folded.
    """
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    features = tl.program_id(1) * F + tl.arange(0, F)
    x = x_ptr + tokens.to(tl.int64) * K
    if FEATURES % F == 0:
        w = w_ptr + features.to(tl.int64) * K
    else:
        w = w_ptr + tl.minimum(features, FEATURES - 1).to(tl.int64) * K
    if FOLD:
        total = chain(x, w, 0, min(SEGMENT, K), K, BLOCK_K, F, T)
        for s in tl.static_range(1, SEGMENTS):
            total += chain(x, w, s * SEGMENT, min((s + 1) * SEGMENT, K), K, BLOCK_K, F, T)
        place = out_ptr
    else:
        s = tl.program_id(2)
        total = chain(x, w, s * SEGMENT, min((s + 1) * SEGMENT, K), K, BLOCK_K, F, T)
        place = out_ptr + s * segment_stride
    places = place + tokens[:, None].to(tl.int64) * out_stride + features[None, :]
    if FEATURES % F == 0:
        tl.store(places, tl.trans(total))
    else:
        tl.store(places, tl.trans(total), mask=features[None, :] < FEATURES)


@triton.jit
def gated_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    FEATURES: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    F: tl.constexpr,
    T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [tokens, features] bfloat16 = activation(x gate^T) * (x up^T); w [2, FEATURES, K] holds gate and up."""
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    features = tl.program_id(1) * F + tl.arange(0, F)
    x = x_ptr + tokens.to(tl.int64) * K
    if FEATURES % F == 0:
        rows = features.to(tl.int64)
    else:
        rows = tl.minimum(features, FEATURES - 1).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    gate, up = tl.zeros((F, T), tl.float32), tl.zeros((F, T), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns
        if K % BLOCK_K == 0:
            inputs = tl.load(x[None, :] + k[:, None])
            gates = tl.load(w_ptr + rows[:, None] * K + k[None, :])
            ups = tl.load(w_ptr + (rows[:, None] + FEATURES) * K + k[None, :])
        else:
            inputs = tl.load(x[None, :] + k[:, None], mask=k[:, None] < K, other=0.0)
            gates = tl.load(w_ptr + rows[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
            ups = tl.load(w_ptr + (rows[:, None] + FEATURES) * K + k[None, :], mask=k[None, :] < K, other=0.0)
        gate = dot(gates, inputs, gate)
        up = dot(ups, inputs, up)
    made = narrow(activate(gate, GELU) * up)
    places = out_ptr + tokens[:, None].to(tl.int64) * FEATURES + features[None, :]
    if FEATURES % F == 0:
        tl.store(places, tl.trans(made))
    else:
        tl.store(places, tl.trans(made), mask=features[None, :] < FEATURES)
