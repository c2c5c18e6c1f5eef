"""Sampling from logits on the device: Gumbel noise, the search for the largest, and the cut of filters.

A row is one program, or is divided into blocks of a fixed number of columns that are merged in one fixed order. So
what is found in a row does not depend on the other rows. There are no atomics.

The words of a row's draw, int64 [WORDS]: gain (bits of float64), key, whether noise is drawn, top_k, top_p and the
margin of min_p (bits of float64).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # columns of a block of a row
CUT_BLOCK = tl.constexpr(8192)  # columns that a program which walks a whole row takes at once
WORDS = tl.constexpr(6)
GAIN = tl.constexpr(0)
KEY = tl.constexpr(1)
DRAWN = tl.constexpr(2)
TOP_K = tl.constexpr(3)
TOP_P = tl.constexpr(4)
MARGIN = tl.constexpr(5)
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
NO_COLUMN = tl.constexpr(2**31 - 1)
UNIT = tl.constexpr(float(2**40))  # weights are counted in units of 2^-40


@triton.jit
def _mixed(x):
    """The permutation of 32 bits of native/noise.h."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _log(x):
    """The natural logarithm of positive normal numbers, as `log16` of native/noise.h computes it."""
    bits = x.to(tl.int32, bitcast=True)
    n = (bits + (0x3F800000 - 0x3F3504F3)) >> 23  # + 127
    f = (bits + (0x3F800000 - (n << 23))).to(tl.float32, bitcast=True) - 1.0
    square = f * f
    p = tl.full(x.shape, 8.7003596127e-2, tl.float32)
    p = tl.fma(p, f, tl.full(x.shape, -1.4267475903e-1, tl.float32))
    p = tl.fma(p, f, tl.full(x.shape, 1.4914786816e-1, tl.float32))
    p = tl.fma(p, f, tl.full(x.shape, -1.6577586532e-1, tl.float32))
    p = tl.fma(p, f, tl.full(x.shape, 1.9963061810e-1, tl.float32))
    p = tl.fma(p, f, tl.full(x.shape, -2.5001338124e-1, tl.float32))
    p = tl.fma(p, f, tl.full(x.shape, 3.3333909512e-1, tl.float32))
    p = tl.fma(p, square * f, f - square * 0.5)  # a product with a power of two is exact: fused or not is the same
    return tl.fma(n.to(tl.float32) - 127.0, tl.full(x.shape, 6.9314718e-1, tl.float32), p)


@triton.jit
def gumbel(columns, key):
    """The noise of int32 columns under a 64-bit key: float32, the bits of native/noise.h."""
    bits = _mixed(columns.to(tl.uint32, bitcast=True) ^ key.to(tl.uint32))
    bits = _mixed(bits ^ (key >> 32).to(tl.uint32))
    low = (bits & 0xFFFF).to(tl.float32) + 0.5
    u = ((bits >> 16).to(tl.float32) * 65536.0 + low) * 2.0**-32  # all products are exact
    u = tl.minimum(u, 1.0 - 2.0**-24)
    rest = 1.0 - u
    lost = (1.0 - rest) - u
    return 0.0 - _log(0.0 - (_log(rest) + lost))


@triton.jit
def _double(words):
    return words.to(tl.float64, bitcast=True)


@triton.jit
def _best(values, columns):
    """The largest value, and the lowest of its columns."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, columns, NO_COLUMN), 0)


@triton.jit
def search_blocks(
    logits, stride, count, words, cuts, values, columns, blocks, FILTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (R, blocks): the largest of a block's logits * gain + noise, in `values`, and its column, in `columns`.

    NaN and infinity are the largest: infinity. FILTERED: only columns that the row's cut keeps (`cut_rows`).
    """
    row, block = tl.program_id(0), tl.program_id(1)
    its = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + its, mask=its < count, other=-float("inf"))
    words += row * WORDS
    gain = _double(tl.load(words + GAIN)).to(tl.float32)
    noise = tl.zeros([BLOCK], tl.float32)
    if tl.load(words + DRAWN) != 0:
        noise = gumbel(its, tl.load(words + KEY))
    score = tl.fma(x, tl.full([BLOCK], 1.0, tl.float32) * gain, noise)
    # A finite logit stays finite, whatever the gain: only NaN and infinity may look like them.
    score = tl.where(x > -float("inf"), tl.maximum(score, -LARGEST), -float("inf"))
    if FILTERED:
        least, last = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        wide = x.to(tl.float64)
        score = tl.where((wide > least) | ((wide == least) & (its <= last)), score, -float("inf"))
    score = tl.where((x < float("inf")) | (its >= count), tl.minimum(score, LARGEST), float("inf"))
    top, column = _best(score, its)
    tl.store(values + row * blocks + block, top)
    tl.store(columns + row * blocks + block, column)


@triton.jit
def search_ends(logits, stride, values, columns, blocks, ids, PADDED: tl.constexpr):
    """Grid (R): the column of a row's largest value over its blocks; -1 if the logit there is not finite."""
    row = tl.program_id(0)
    its = tl.arange(0, PADDED)
    found = tl.load(values + row * blocks + its, mask=its < blocks, other=-float("inf"))
    _, column = _best(found, tl.load(columns + row * blocks + its, mask=its < blocks, other=NO_COLUMN))
    x = tl.load(logits + row.to(tl.int64) * stride + column)
    tl.store(ids + row, tl.where((x > -float("inf")) & (x < float("inf")), column, -1))


@triton.jit
def summarize_blocks(logits, stride, count, tops, columns, sums, blocks, BLOCK: tl.constexpr):
    """Grid (R, blocks): a block's largest logit, its column, and the sums of exp(x - top) and exp(x - top) (x - top).

    `sums` is [R, 2, blocks]. The largest is infinity where a logit is NaN or infinity.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    its = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + its, mask=its < count, other=-float("inf"))
    x = tl.where(x < float("inf"), x, float("inf"))
    top, column = _best(x, its)
    below = tl.where(x > -float("inf"), x - top, -float("inf"))
    weight = tl.exp(below)
    tl.store(tops + row * blocks + block, top)
    tl.store(columns + row * blocks + block, column)
    tl.store(sums + row * 2 * blocks + block, tl.sum(weight, 0))
    weighted = tl.where(weight > 0.0, weight * below, 0.0)
    tl.store(sums + (row * 2 + 1) * blocks + block, tl.sum(weighted, 0))


@triton.jit
def summarize_ends(tops, columns, sums, blocks, ids, numbers, PADDED: tl.constexpr):
    """Grid (R): a row's most likely id, and [3] numbers: its logit, logsumexp, and entropy in nats.

    The numbers are NaN if the largest logit is not finite.
    """
    row = tl.program_id(0)
    its = tl.arange(0, PADDED)
    inside = its < blocks
    found = tl.load(tops + row * blocks + its, mask=inside, other=-float("inf"))
    top, column = _best(found, tl.load(columns + row * blocks + its, mask=inside, other=NO_COLUMN))
    below = tl.where(found > -float("inf"), found - top, -float("inf"))
    gain = tl.where(found > -float("inf"), tl.exp(below), 0.0)
    total = tl.load(sums + row * 2 * blocks + its, mask=inside, other=0.0)
    weighted = tl.load(sums + (row * 2 + 1) * blocks + its, mask=inside, other=0.0)
    weighted = tl.sum(tl.where(gain > 0.0, (weighted + total * below) * gain, 0.0), 0)
    total = tl.sum(total * gain, 0)
    normalizer = tl.log(total)
    finite = (top > -float("inf")) & (top < float("inf"))
    tl.store(ids + row, column)
    numbers += row * 3
    tl.store(numbers, tl.where(finite, top, float("nan")))
    tl.store(numbers + 1, tl.where(finite, top + normalizer, float("nan")))
    tl.store(numbers + 2, tl.where(finite, normalizer - weighted / total, float("nan")))


@triton.jit
def _weight(x, top, gain):
    """exp((x - top) * gain) in whole units, so that any order of additions gives the same sum."""
    return (tl.exp((x - top) * gain) * UNIT).to(tl.int64)


@triton.jit
def _above(logits, count, middle, floor, top, gain, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of a row's logits above `middle`, the least of them, and the largest of the others that is not -inf.

    The mass is the sum of weights, or the number of logits. Logits below `floor` are left out.
    """
    mass = tl.zeros([BLOCK], tl.int64)
    higher = tl.full([BLOCK], float("inf"), tl.float32)
    lower = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, count, BLOCK):
        its = start + tl.arange(0, BLOCK)
        x = tl.load(logits + its, mask=its < count, other=-float("inf"))
        x = tl.where(x >= floor, x, -float("inf"))
        over = x > middle
        if WEIGHED:
            mass += tl.where(over, _weight(x, top, gain), 0)
        else:
            mass += over.to(tl.int64)
        higher = tl.minimum(higher, tl.where(over, x, float("inf")))
        lower = tl.maximum(lower, tl.where(over, -float("inf"), x))
    return tl.sum(mass, 0), tl.min(higher, 0), tl.max(lower, 0)


@triton.jit
def _reached(logits, count, goal, least, top, gain, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit with at least a mass of `goal` at it and above it, and the mass above it.

    `least`: the row's smallest logit that counts. The mass of all must reach the goal, which must be above 0. The
    range from `low` to `high` contains the logit and has logits at both ends, so it gets smaller in every round.
    """
    low, high = least, top
    above = tl.full([], 0, tl.int64)
    while low < high:
        middle = low * 0.5 + high * 0.5
        middle = tl.where((middle < high) & (middle >= low), middle, low)
        mass, higher, lower = _above(logits, count, middle, least, top, gain, WEIGHED, BLOCK)
        reached = mass >= goal
        low = tl.where(reached, higher, low)
        high = tl.where(reached, high, lower)
        above = tl.where(reached, above, mass)
    return low, above


@triton.jit
def _nth_column(logits, count, value, n, BLOCK: tl.constexpr):
    """The column of the n-th logit that equals `value`, n from 1; the last column if there are fewer."""
    seen = tl.full([], 0, tl.int32)
    last = tl.full([], NO_COLUMN, tl.int32)
    start = tl.full([], 0, tl.int32)
    while start < count:
        its = start + tl.arange(0, BLOCK)
        same = tl.load(logits + its, mask=its < count, other=-float("inf")) == value
        rank = seen + tl.cumsum(same.to(tl.int32), 0)
        last = tl.minimum(last, tl.min(tl.where(same & (rank == n), its, NO_COLUMN), 0))
        seen += tl.sum(same.to(tl.int32), 0)
        start = tl.where(last < NO_COLUMN, count, start + BLOCK)
    return last


@triton.jit
def cut_rows(logits, stride, count, words, cuts, BLOCK: tl.constexpr):
    """Grid (R): what top_k, top_p and min_p keep of a row, in `cuts`, float64 [R, 2].

    Kept are the logits above the first number, and those equal to it up to the column of the second. Rows without a
    finite largest logit keep all. See `distribution` of sampling/sampler.py for the meaning of the filters.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    words += row * WORDS
    gain = _double(tl.load(words + GAIN)).to(tl.float32)
    top_k, top_p = tl.load(words + TOP_K), _double(tl.load(words + TOP_P))

    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    odd = tl.zeros([BLOCK], tl.int32)
    number = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        its = start + tl.arange(0, BLOCK)
        x = tl.load(logits + its, mask=its < count, other=-float("inf"))
        finite = (x > -float("inf")) & (x < float("inf"))
        odd |= (x != x).to(tl.int32) | (x == float("inf")).to(tl.int32)
        number += finite.to(tl.int32)
        least = tl.minimum(least, tl.where(finite, x, float("inf")))
        most = tl.maximum(most, tl.where(finite, x, -float("inf")))
    sound = (tl.max(odd, 0) == 0) & (tl.sum(number, 0) > 0)
    floor, top = tl.min(least, 0), tl.max(most, 0)
    last = tl.full([], NO_COLUMN, tl.int32)
    if sound:
        if (top_k > 0) & (top_k < tl.sum(number, 0)):
            floor, _ = _reached(logits, count, top_k, floor, top, gain, False, BLOCK)
        if top_p < 1.0:
            total, _, _ = _above(logits, count, -float("inf"), floor, top, gain, True, BLOCK)
            goal = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            floor, above = _reached(logits, count, goal, floor, top, gain, True, BLOCK)
            weight = tl.maximum(_weight(floor, top, gain), 1)
            needed = (goal - above + weight - 1) // weight
            last = _nth_column(logits, count, floor, needed.to(tl.int32), BLOCK)
    edge = top.to(tl.float64) + _double(tl.load(words + MARGIN))
    wide = floor.to(tl.float64)
    last = tl.where(edge > wide, NO_COLUMN, last)
    cuts += row * 2
    tl.store(cuts, tl.where(sound, tl.maximum(edge, wide), -float("inf")))
    tl.store(cuts + 1, last.to(tl.float64))
