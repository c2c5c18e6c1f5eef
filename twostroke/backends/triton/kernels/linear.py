"""Products with bfloat16 weights.

A result is one chain of sums along K in ascending order, in float32, for each segment of K; segments are cut by the
weight's shape alone. On an H200 the bits of such a chain are the same whichever operand comes first, whatever the tile
and the matrix instruction (`tests/triton/test_bits.py`). With few tokens the weights are the first operand, out^T =
W X^T, and each segment is a program of its own, whose sums are added by whoever reads them. With many tokens a program
adds them itself, in the same order, and tiles come by the bulk copy engine.

Buffers of tokens are padded to whole tiles: a row of a tile never touches another.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import activate, dot, narrow
from twostroke.backends.triton.kernels.tiles import input_tile, weight_tile


@triton.jit
def chain(x, w, first, last, K: tl.constexpr, BLOCK_K: tl.constexpr, F: tl.constexpr, T: tl.constexpr):
    """The products of columns [first, last): float32 [F, T]. `x` [T] and `w` [F] point to rows."""
    acc = tl.zeros((F, T), tl.float32)
    columns = tl.arange(0, BLOCK_K)
    for start in range(first, last, BLOCK_K):
        k = start + columns
        if K % BLOCK_K == 0:
            weights = tl.load(w[:, None] + k[None, :])
        else:
            weights = tl.load(w[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
        acc = dot(weights, input_tile(x, k, K, BLOCK_K), acc)
    return acc


@kernel
def linear_kernel(
    x_ptr, w_ptr, out_ptr, segment_stride, out_stride,
    FEATURES: tl.constexpr, K: tl.constexpr, SEGMENT: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [segments, tokens, features] float32 = x [tokens, K] w [FEATURES, K]^T.

    Grid: tiles of tokens, tiles of features, segments.
    """
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    features = tl.program_id(1) * F + tl.arange(0, F)
    s = tl.program_id(2)
    x = x_ptr + tokens.to(tl.int64) * K
    if FEATURES % F == 0:
        w = w_ptr + features.to(tl.int64) * K
    else:
        w = w_ptr + tl.minimum(features, FEATURES - 1).to(tl.int64) * K
    first, last = s * SEGMENT, tl.minimum((s + 1) * SEGMENT, K)
    total = chain(x, w, first, last, K, BLOCK_K, F, T)
    places = out_ptr + s * segment_stride + tokens[:, None].to(tl.int64) * out_stride + features[None, :]
    if FEATURES % F == 0:
        tl.store(places, tl.trans(total))
    else:
        tl.store(places, tl.trans(total), mask=features[None, :] < FEATURES)


@triton.jit
def tile_of(program, tokens, T: tl.constexpr, TILES: tl.constexpr, BAND: tl.constexpr):
    """A program's tile of tokens and of features, in bands of BAND tiles of tokens, so that tiles stay in the cache."""
    tall = tl.cdiv(tokens, T)
    band = program // (BAND * TILES)
    height = min(tall - band * BAND, BAND)
    inside = program % (BAND * TILES)
    return band * BAND + inside % height, inside // height


@kernel
def many_kernel(
    x, w, out_ptr, tokens, out_stride,
    FEATURES: tl.constexpr, K: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, ADD: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """out [tokens, features] float32; x and w are descriptors of tiles [T, BLOCK_K] and [F, BLOCK_K].

    With ADD the result is added to `out`.
    """
    t, f = tile_of(tl.program_id(0), tokens, T, (FEATURES + F - 1) // F, BAND)
    if SEGMENTS == 1:
        total = tl.zeros((T, F), tl.float32)
        for k in range(0, K, BLOCK_K):
            total = dot(x.load([t * T, k]), w.load([f * F, k]).T, total)
    else:
        total, acc = tl.zeros((T, F), tl.float32), tl.zeros((T, F), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = dot(x.load([t * T, k]), w.load([f * F, k]).T, acc)
            if (k + BLOCK_K) % SEGMENT == 0 or k + BLOCK_K >= K:  # the end of a segment
                total += acc
                acc = tl.zeros((T, F), tl.float32)
    rows, features = t * T + tl.arange(0, T), f * F + tl.arange(0, F)
    places = out_ptr + rows[:, None].to(tl.int64) * out_stride + features[None, :]
    if FEATURES % F == 0:
        if ADD:
            total = tl.load(places) + total
        tl.store(places, total)
    else:
        if ADD:
            total = tl.load(places, mask=features[None, :] < FEATURES, other=0.0) + total
        tl.store(places, total, mask=features[None, :] < FEATURES)


@kernel
def many_gated_kernel(
    x, gate, up, bias_ptr, out_ptr, tokens,
    FEATURES: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """`gated_kernel` for many tokens; x, gate and up are descriptors of tiles."""
    t, f = tile_of(tl.program_id(0), tokens, T, (FEATURES + F - 1) // F, BAND)
    gates, ups = tl.zeros((T, F), tl.float32), tl.zeros((T, F), tl.float32)
    for k in range(0, K, BLOCK_K):
        inputs = x.load([t * T, k])
        gates = dot(inputs, gate.load([f * F, k]).T, gates)
        ups = dot(inputs, up.load([f * F, k]).T, ups)
    rows, features = t * T + tl.arange(0, T), f * F + tl.arange(0, F)
    places = out_ptr + rows[:, None].to(tl.int64) * FEATURES + features[None, :]
    if BIAS:
        at = bias_ptr + tl.minimum(features, FEATURES - 1)
        gates, ups = gates + tl.load(at)[None, :], ups + tl.load(at + FEATURES)[None, :]
    made = narrow(activate(gates, ups, ACTIVATION))
    if FEATURES % F == 0:
        tl.store(places, made)
    else:
        tl.store(places, made, mask=features[None, :] < FEATURES)


@kernel
def gated_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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
        inputs = input_tile(x, k, K, BLOCK_K)
        gate = dot(weight_tile(w_ptr, rows, k, K, BLOCK_K), inputs, gate)
        up = dot(weight_tile(w_ptr, rows + FEATURES, k, K, BLOCK_K), inputs, up)
    if BIAS:  # [2, FEATURES]
        gate, up = gate + tl.load(bias_ptr + rows)[:, None], up + tl.load(bias_ptr + rows + FEATURES)[:, None]
    made = narrow(activate(gate, up, ACTIVATION))
    places = out_ptr + tokens[:, None].to(tl.int64) * FEATURES + features[None, :]
    if FEATURES % F == 0:
        tl.store(places, tl.trans(made))
    else:
        tl.store(places, tl.trans(made), mask=features[None, :] < FEATURES)
