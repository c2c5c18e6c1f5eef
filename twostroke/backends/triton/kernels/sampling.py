"""Sampling from logits on the device: Gumbel noise, the search for the largest, and statistics.

A row is divided into blocks of a fixed number of columns, which are merged in one fixed order. So what is found in a
row does not depend on the other rows.

The words of a row's draw, int64 [WORDS]: gain (bits of float64), key, whether noise is drawn, top_k, top_p and the
margin of min_p (bits of float64).
"""

from __future__ import annotations

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel, unfused_kernel

BLOCK = tl.constexpr(1024)  # columns of a block of a row
WORDS = tl.constexpr(6)
GAIN = tl.constexpr(0)
KEY = tl.constexpr(1)
DRAWN = tl.constexpr(2)
TOP_K = tl.constexpr(3)
TOP_P = tl.constexpr(4)
MARGIN = tl.constexpr(5)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)  # of float32
NO_COLUMN = tl.constexpr(2**31 - 1)


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
def as_double(words):
    """The float64 whose bits are in int64 words."""
    return words.to(tl.float64, bitcast=True)


@triton.jit
def _best(values, columns):
    """The largest value, and the lowest of its columns."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, columns, NO_COLUMN), 0)


@unfused_kernel
def search_blocks(
    logits, stride, count, words, cuts, values, columns, blocks, FILTERED: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (R, blocks): the largest of a block's logits * gain + noise, in `values`, and its column, in `columns`.

    NaN and infinity are the largest: infinity. FILTERED: only columns that the row's cut keeps (`filters.py`).
    """
    row, block = tl.program_id(0), tl.program_id(1)
    its = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + its, mask=its < count, other=-float("inf"))
    words += row * WORDS
    gain = as_double(tl.load(words + GAIN)).to(tl.float32)
    noise = tl.zeros([BLOCK], tl.float32)
    if tl.load(words + DRAWN) != 0:
        noise = gumbel(its, tl.load(words + KEY))
    score = tl.fma(x, tl.full([BLOCK], 1.0, tl.float32) * gain, noise)
    # A finite logit stays finite, whatever the gain: only NaN and infinity may look like them.
    score = tl.where(x > -float("inf"), tl.maximum(score, -FLOAT32_MAX), -float("inf"))
    if FILTERED:
        least, last = tl.load(cuts + row * 2), tl.load(cuts + row * 2 + 1)
        wide = x.to(tl.float64)
        score = tl.where((wide > least) | ((wide == least) & (its <= last)), score, -float("inf"))
    score = tl.where((x < float("inf")) | (its >= count), tl.minimum(score, FLOAT32_MAX), float("inf"))
    top, column = _best(score, its)
    tl.store(values + row * blocks + block, top)
    tl.store(columns + row * blocks + block, column)


@kernel
def search_ends(logits, stride, values, columns, blocks, ids, PADDED: tl.constexpr):
    """Grid (R): the column of a row's largest value over its blocks; -1 if the logit there is not finite."""
    row = tl.program_id(0)
    its = tl.arange(0, PADDED)
    found = tl.load(values + row * blocks + its, mask=its < blocks, other=-float("inf"))
    _, column = _best(found, tl.load(columns + row * blocks + its, mask=its < blocks, other=NO_COLUMN))
    x = tl.load(logits + row.to(tl.int64) * stride + column)
    tl.store(ids + row, tl.where((x > -float("inf")) & (x < float("inf")), column, -1))


@unfused_kernel
def summarize_blocks(logits, stride, count, tops, columns, sums, blocks, BLOCK: tl.constexpr):
    """Grid (R, blocks): a block's largest logit, its column, and the sums of exp(x - top) and exp(x - top) (x - top).

    `sums` is [R, 2, blocks]. The largest is infinity where a logit is NaN or infinity.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    its = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + its, mask=its < count, other=-float("inf"))
    x = tl.where(x < float("inf"), x, float("inf"))
    top, column = _best(x, its)
    below = tl.where(x > -float("inf"), x - top, -FLOAT32_MAX)
    weight = tl.exp(below)
    tl.store(tops + row * blocks + block, top)
    tl.store(columns + row * blocks + block, column)
    tl.store(sums + row * 2 * blocks + block, tl.sum(weight, 0))
    tl.store(sums + (row * 2 + 1) * blocks + block, tl.sum(weight * below, 0))


@unfused_kernel
def summarize_ends(tops, columns, sums, blocks, ids, numbers, PADDED: tl.constexpr):
    """Grid (R): a row's most likely id, and [3] numbers: its logit, logsumexp, and entropy in nats.

    The numbers are NaN if the largest logit is not finite.
    """
    row = tl.program_id(0)
    its = tl.arange(0, PADDED)
    inside = its < blocks
    found = tl.load(tops + row * blocks + its, mask=inside, other=-float("inf"))
    top, column = _best(found, tl.load(columns + row * blocks + its, mask=inside, other=NO_COLUMN))
    below = tl.where(found > -float("inf"), found - top, -FLOAT32_MAX)
    gain = tl.exp(below)
    total = tl.load(sums + row * 2 * blocks + its, mask=inside, other=0.0)
    weighted = tl.load(sums + (row * 2 + 1) * blocks + its, mask=inside, other=0.0)
    weighted = tl.sum(weighted * gain + total * (below * gain), 0)
    total = tl.sum(total * gain, 0)
    normalizer = tl.log(total)
    finite = (top > -float("inf")) & (top < float("inf"))
    tl.store(ids + row, column)
    numbers += row * 3
    tl.store(numbers, tl.where(finite, top, float("nan")))
    tl.store(numbers + 1, tl.where(finite, top + normalizer, float("nan")))
    tl.store(numbers + 2, tl.where(finite, normalizer - weighted / total, float("nan")))
