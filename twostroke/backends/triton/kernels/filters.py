"""The filters top_k, top_p and min_p: the logits of a row that they keep, found without sorting it.

A program takes a row. The smallest logit that is kept is found by halving the range of values in which it must be;
after a few rounds the logits that may matter are few, and are gathered. Probabilities are counted in whole units of
2^-40: such sums are exact, so it does not matter in which order, or over which of the copies, they are made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import unfused_kernel
from twostroke.backends.triton.kernels.sampling import GAIN, MARGIN, NO_COLUMN, TOP_K, TOP_P, WORDS, as_double

CUT_BLOCK = tl.constexpr(8192)  # columns that a program takes at once, and the most that are gathered
UNIT = tl.constexpr(float(2**40))


@triton.jit
def _weight(x, top, gain):
    """exp((x - top) * gain) in whole units, so that any order of additions gives the same sum."""
    return (tl.exp((x - top) * gain) * UNIT).to(tl.int64)


@triton.jit
def _above(logits, count, middle, floor, top, gain, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """What is above `middle`: its mass, its number and the least of it; and the largest of the others.

    The mass is the sum of weights, or the number of logits. Logits below `floor` are left out.
    """
    mass = tl.zeros([BLOCK], tl.int64)
    number = tl.zeros([BLOCK], tl.int32)
    higher = tl.full([BLOCK], float("inf"), tl.float32)
    lower = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, count, BLOCK):
        its = start + tl.arange(0, BLOCK)
        x = tl.load(logits + its, mask=its < count, other=-float("inf"))
        x = tl.where(x >= floor, x, -float("inf"))
        over = x > middle
        if WEIGHED:
            mass += tl.where(over, _weight(x, top, gain), 0)
        number += over.to(tl.int32)
        higher = tl.minimum(higher, tl.where(over, x, float("inf")))
        lower = tl.maximum(lower, tl.where(over, -float("inf"), x))
    total = tl.sum(number, 0)
    if WEIGHED:
        return tl.sum(mass, 0), total, tl.min(higher, 0), tl.max(lower, 0)
    return total.to(tl.int64), total, tl.min(higher, 0), tl.max(lower, 0)


@triton.jit
def _narrow(
    logits, count, goal, low, high, above, number, floor, top, gain,
    ENOUGH: tl.constexpr, WEIGHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Narrow the range in which the largest logit is that has a mass of `goal` at it and above it.

    The range has logits at both ends, `low` and `high`, so it gets smaller in every round. It ends with one logit, or
    as soon as at most ENOUGH are at `low` or above. Returns low, high, the mass above high and the number from low on.
    """
    while (low < high) & (number > ENOUGH):
        middle = low * 0.5 + high * 0.5
        middle = tl.where((middle < high) & (middle >= low), middle, low)
        mass, some, higher, lower = _above(logits, count, middle, floor, top, gain, WEIGHED, BLOCK)
        reached = mass >= goal
        low = tl.where(reached, higher, low)
        high = tl.where(reached, high, lower)
        above = tl.where(reached, above, mass)
        number = tl.where(reached, some, number)
    return low, high, above, number


@triton.jit
def _gather(logits, count, low, found, BLOCK: tl.constexpr):
    """Copy the logits from `low` on to `found`, in their order."""
    done = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        its = start + tl.arange(0, BLOCK)
        x = tl.load(logits + its, mask=its < count, other=-float("inf"))
        wanted = (x >= low).to(tl.int32)
        tl.store(found + done + tl.cumsum(wanted, 0) - 1, x, mask=wanted != 0)
        done += tl.sum(wanted, 0)
    tl.debug_barrier()  # threads read what others have written


@triton.jit
def _reached(logits, count, size, found, goal, number, floor, top, gain, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit with a mass of `goal`, above 0, at it and above it; the mass above it, and the number from it.

    Args:
        number: how many of the row's logits are at `floor`, its least, or above. Their mass must reach the goal.
        size: how many logits are in `found`; 0 for none yet. As soon as few may matter they are copied there, and the
            row is not read again.
    Returns also the new size.
    """
    low, high = floor, top
    above = tl.full([], 0, tl.int64)
    if size == 0:
        low, high, above, number = _narrow(
            logits, count, goal, low, high, above, number, floor, top, gain, BLOCK, WEIGHED, BLOCK
        )
        if number <= BLOCK:
            _gather(logits, count, low, found, BLOCK)
            size = number
    low, high, above, number = _narrow(found, size, goal, low, high, above, number, low, top, gain, 0, WEIGHED, BLOCK)
    return low, above, number, size


@triton.jit
def _equal(found, size, value, BLOCK: tl.constexpr):
    """The number of gathered logits that equal `value`."""
    its = tl.arange(0, BLOCK)
    return tl.sum((tl.load(found + its, mask=its < size, other=-float("inf")) == value).to(tl.int32), 0)


@triton.jit
def _nth_column(logits, count, value, n, BLOCK: tl.constexpr):
    """The column of the n-th logit that equals `value`, n from 1."""
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


@unfused_kernel
def cut_rows(logits, stride, count, words, cuts, found, BLOCK: tl.constexpr):
    """Grid (R): what top_k, top_p and min_p keep of a row, in `cuts`, float64 [R, 2].

    Kept are the logits above the first number, and those equal to it up to the column of the second. Rows without a
    finite largest logit keep all. `found` is scratch, float32 [R, BLOCK]. See `distribution` of sampling/sampler.py
    for the meaning of the filters.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    words += row * WORDS
    found += row * BLOCK
    gain = as_double(tl.load(words + GAIN)).to(tl.float32)
    top_k, top_p = tl.load(words + TOP_K), as_double(tl.load(words + TOP_P))

    least = tl.full([BLOCK], float("inf"), tl.float32)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    odd = tl.zeros([BLOCK], tl.int32)
    finite = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        its = start + tl.arange(0, BLOCK)
        x = tl.load(logits + its, mask=its < count, other=-float("inf"))
        number = (x > -float("inf")) & (x < float("inf"))
        odd |= (x != x).to(tl.int32) | (x == float("inf")).to(tl.int32)
        finite += number.to(tl.int32)
        least = tl.minimum(least, tl.where(number, x, float("inf")))
        most = tl.maximum(most, tl.where(number, x, -float("inf")))
    kept = tl.sum(finite, 0)
    sound = (tl.max(odd, 0) == 0) & (kept > 0)
    floor, top = tl.min(least, 0), tl.max(most, 0)
    last = tl.full([], NO_COLUMN, tl.int32)
    size = tl.full([], 0, tl.int32)
    if sound:
        if (top_k > 0) & (top_k < kept):
            floor, _, kept, size = _reached(logits, count, size, found, top_k, kept, floor, top, gain, False, BLOCK)
        if top_p < 1.0:
            if size > 0:
                total, _, _, _ = _above(found, size, -float("inf"), floor, top, gain, True, BLOCK)
            else:
                total, _, _, _ = _above(logits, count, -float("inf"), floor, top, gain, True, BLOCK)
            goal = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            floor, above, _, size = _reached(logits, count, size, found, goal, kept, floor, top, gain, True, BLOCK)
            weight = tl.maximum(_weight(floor, top, gain), 1)
            needed = (goal - above + weight - 1) // weight
            needed = needed.to(tl.int32)
            if (size == 0) | (needed < _equal(found, size, floor, BLOCK)):
                last = _nth_column(logits, count, floor, needed, BLOCK)
    edge = top.to(tl.float64) + as_double(tl.load(words + MARGIN))
    wide = floor.to(tl.float64)
    last = tl.where(edge > wide, NO_COLUMN, last)
    cuts += row * 2
    tl.store(cuts, tl.where(sound, tl.maximum(edge, wide), -float("inf")))
    tl.store(cuts + 1, last.to(tl.float64))
