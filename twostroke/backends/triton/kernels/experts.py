"""A mixture of experts: each token goes through the few gated MLPs that a router chooses for it.

A *pair* is a token and one of its experts, numbered token * CHOSEN + slot; a token's slots are in the order of the
experts' ids. Pairs are put in the order of their experts, and blocks of at most T pairs of one expert are multiplied
together, so an expert's weights are read once for a block. How pairs fall into blocks changes no bit: a pair's products
are one chain along K, as in `linear.py`, and a token's pairs are added in the order of their slots.
"""

import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel, kernel_for_any, unfused_kernel
from twostroke.backends.triton.kernels.numbers import activate, dot, narrow, rms, sigmoid
from twostroke.backends.triton.kernels.tiles import input_tile, sum_of_parts, weight_tile

EMPTY: tl.constexpr = tl.constexpr(2**31 - 1)  # no expert


@kernel_for_any("rows")
def router_kernel(
    h_ptr, w_ptr, bias_ptr, out_ptr, rows,
    EXPERTS: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr, E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [rows, EXPERTS] = h w^T + the bias if BIAS, of bfloat16 h [rows, K] and w [EXPERTS, K], in float32.

    Grid: tiles of T and of E.
    The tiles have one size for any number of rows, because it fixes the order of the sums.
    """
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    experts = tl.program_id(1) * E + tl.arange(0, E)
    columns = tl.arange(0, BLOCK_K)
    x = h_ptr + tl.minimum(tokens, rows - 1).to(tl.int64)[:, None, None] * K
    w = w_ptr + tl.minimum(experts, EXPERTS - 1)[None, :, None] * K
    sums = tl.zeros((T, E, BLOCK_K), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = (start + columns)[None, None, :]
        if K % BLOCK_K == 0:
            sums += tl.load(x + k).to(tl.float32) * tl.load(w + k)
        else:
            sums += tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * tl.load(w + k, mask=k < K, other=0.0)
    mask = (tokens < rows)[:, None] & (experts < EXPERTS)[None, :]
    logits = tl.sum(sums, 2)
    if BIAS:
        logits += tl.load(bias_ptr + experts, mask=experts < EXPERTS, other=0.0)[None, :]
    tl.store(out_ptr + tokens[:, None] * EXPERTS + experts[None, :], logits, mask=mask)


@kernel
def choose_kernel(
    logits_ptr, bias_ptr, factors_ptr, ids_ptr, weights_ptr,
    EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The most probable experts of a row, ties to the lower id, by ascending id: ids and weights [rows, CHOSEN].

    With SIGMOID probabilities are those of each expert alone. If BIASED, a number is added to each for the choice.
    With FACTORS weights are multiplied by that of their expert at the end.
    A row with NaN gets some experts too, and weights of NaN. Grid: rows.
    """
    row = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    exists = experts < EXPERTS
    x = tl.load(logits_ptr + row * EXPERTS + experts, mask=exists, other=float("-inf"))
    if SIGMOID:
        chances = sigmoid(x)
    else:
        chances = tl.exp(x - tl.max(x, 0))
        chances = chances / tl.sum(chances, 0)
    keys = chances
    if BIASED:
        keys += tl.load(bias_ptr + experts, mask=exists, other=0.0)
    # Above what is taken, which is above what does not exist.
    keys = tl.where(exists, tl.where(keys == keys, keys, -1e36), -3e36)
    for _ in range(CHOSEN):
        best = tl.min(tl.where(keys == tl.max(keys, 0), experts, EMPTY), 0)
        keys = tl.where(experts == best, -2e36, keys)
    taken = keys == -2e36
    weights = chances
    if NORMALIZED:
        weights = chances / tl.sum(tl.where(taken, chances, 0.0), 0)
    if FACTORS:
        weights *= tl.load(factors_ptr + experts, mask=exists, other=0.0)
    place = row * CHOSEN + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place, experts, mask=taken)
    tl.store(weights_ptr + place, weights, mask=taken)


@kernel_for_any("pairs")
def group_kernel(
    ids_ptr, order_ptr, blocks_ptr, pairs, T: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The pairs of one expert, in `order` after those of lower experts, and its blocks. Grid: experts.

    A block is [3] integers: expert, place of its first pair in the order, number of pairs, which may be 0. Where an
    expert's blocks begin follows from the number of pairs before it, so experts need not wait for each other:
    at that number itself (FEW), `pairs` blocks in all; or at that number // T + expert, pairs // T + experts in all.
    """
    expert = tl.program_id(0)
    less, same = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.int32)
    for first in range(0, pairs, CHUNK):
        its = first + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + its, mask=its < pairs, other=EMPTY)
        less += (ids < expert).to(tl.int32)
        same += (ids == expert).to(tl.int32)
    start, count = tl.sum(less, 0), tl.sum(same, 0)
    if count > 0:
        done = start
        for first in range(0, pairs, CHUNK):
            its = first + tl.arange(0, CHUNK)
            mine = tl.load(ids_ptr + its, mask=its < pairs, other=EMPTY) == expert
            ranks = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order_ptr + done + ranks - 1, its, mask=mine)
            done += tl.sum(mine.to(tl.int32), 0)
    if FEW:
        begin, end = start, start + count
    else:
        begin, end = start // T + expert, (start + count) // T + expert + 1
    for first in range(begin, end, 32):
        block = first + tl.arange(0, 32)
        before = (block - begin) * T
        tl.store(blocks_ptr + 3 * block, tl.zeros((32,), tl.int32) + expert, mask=block < end)
        tl.store(blocks_ptr + 3 * block + 1, start + before, mask=block < end)
        tl.store(blocks_ptr + 3 * block + 2, tl.minimum(tl.maximum(count - before, 0), T), mask=block < end)


@kernel
def experts_gated_kernel(
    h_ptr, w_ptr, bias_ptr, order_ptr, blocks_ptr, out_ptr,
    CHOSEN: tl.constexpr, FEATURES: tl.constexpr, K: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, FEATURES] bfloat16, in the order of experts, = activation(gate h) * (up h). Grid: blocks, tiles of F.

    h is [tokens, K], w is [experts, 2, FEATURES, K].
    """
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count  # the others repeat the first pair, and are not stored
        place = start + tl.where(valid, lanes, 0)
        x = h_ptr + (tl.load(order_ptr + place) // CHOSEN).to(tl.int64) * K
        features = tl.program_id(1) * F + tl.arange(0, F)
        rows = tl.minimum(features, FEATURES - 1)
        gates = w_ptr + expert.to(tl.int64) * (2 * FEATURES * K)
        ups = gates + FEATURES * K
        gate, up = tl.zeros((F, T), tl.float32), tl.zeros((F, T), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            inputs = input_tile(x, k, K, BLOCK_K)
            gate = dot(weight_tile(gates, rows, k, K, BLOCK_K), inputs, gate)
            up = dot(weight_tile(ups, rows, k, K, BLOCK_K), inputs, up)
        if BIAS:  # [experts, 2, FEATURES]
            bias = bias_ptr + expert * (2 * FEATURES) + rows
            gate, up = gate + tl.load(bias)[:, None], up + tl.load(bias + FEATURES)[:, None]
        made = narrow(activate(gate, up, ACTIVATION))
        places = out_ptr + place[:, None].to(tl.int64) * FEATURES + features[None, :]
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])


@kernel
def experts_down_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, blocks_ptr, out_ptr,
    FEATURES: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [pairs, FEATURES] float32, by the pairs' numbers, of x [pairs, K], in the order of experts.

    w is [experts, FEATURES, K]. Grid: blocks, tiles of F.
    """
    item = blocks_ptr + tl.program_id(0) * 3
    expert, start, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        lanes = tl.arange(0, T)
        valid = lanes < count
        place = start + tl.where(valid, lanes, 0)
        x = x_ptr + place.to(tl.int64) * K
        features = tl.program_id(1) * F + tl.arange(0, F)
        rows = tl.minimum(features, FEATURES - 1)
        w = w_ptr + expert.to(tl.int64) * (FEATURES * K)
        made = tl.zeros((F, T), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            made = dot(weight_tile(w, rows, k, K, BLOCK_K), input_tile(x, k, K, BLOCK_K), made)
        if BIAS:  # [experts, FEATURES]
            made += tl.load(bias_ptr + expert * FEATURES + rows)[:, None]
        places = out_ptr + tl.load(order_ptr + place)[:, None].to(tl.int64) * FEATURES + features[None, :]
        tl.store(places, tl.trans(made), mask=valid[:, None] & (features < FEATURES)[None, :])


@kernel
def weighted_sum_kernel(
    made_ptr, weights_ptr, out_ptr, CHOSEN: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [rows, FEATURES] float32: the weighted sum of a row's pairs, slot by slot. Grid: rows, blocks of features."""
    row = tl.program_id(0)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < FEATURES
    made = made_ptr + row.to(tl.int64) * (CHOSEN * FEATURES) + features
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(CHOSEN):
        weight = tl.load(weights_ptr + row * CHOSEN + slot)
        total += weight * tl.load(made + slot * FEATURES, mask=inside, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * FEATURES + features, total, mask=inside)


@unfused_kernel
def shared_expert_kernel(
    parts_ptr, part_stride, h_ptr, gate_ptr, norm_ptr, out_norm_ptr, eps, out_ptr,
    HIDDEN: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, HIDDEN] float32 += the parts of a product, times the sigmoid of a row's product with `gate`, if GATED.

    h is [rows, HIDDEN] bfloat16. If NORMED, either passes a norm of its own before they are added. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    at = row * HIDDEN + columns
    made = sum_of_parts(parts_ptr, part_stride, at, inside, PARTS)
    if GATED:
        h = tl.load(h_ptr + at, mask=inside, other=0.0).to(tl.float32)
        made = made * sigmoid(tl.sum(h * tl.load(gate_ptr + columns, mask=inside, other=0.0), 0))
    out = tl.load(out_ptr + at, mask=inside, other=0.0)
    if NORMED:
        made = made * rms(tl.sum(made * made, 0), HIDDEN, eps) * tl.load(norm_ptr + columns, mask=inside, other=0.0)
        out = out * rms(tl.sum(out * out, 0), HIDDEN, eps) * tl.load(out_norm_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + at, out + made, mask=inside)
