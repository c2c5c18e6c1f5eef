"""Rotary position embedding (RoPE) and the ways in which it is scaled to longer contexts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, floor, log, pi, sqrt

import numpy as np

from twostroke.models.stable_repr import LATER, StableRepr

# The factor of pairs that do not turn where the others do at the speed that they have among all (Gemma 4), as llama.cpp
# writes it.
STILL = float(np.float32(1e30))


@dataclass(frozen=True, repr=False)
class Rope(StableRepr):
    """RoPE (Su et al. 2021): pair i of a head is rotated by position * base**(-2i / rotated) / factors[i] radians.

    `factors` (length rotated / 2) holds the divisors of a scaling; None is all ones. `amplitude` multiplies rotated
    queries and keys (transformers' attention factor). `rotated` is how many numbers of a head are rotated (GPT-J's
    partial RoPE); None is all. Pairs are (i, i + head_dim / 2), of which the first ones are rotated; loaders permute
    other layouts (`families.head_layouts`). `short` is LongRoPE's other list: the longest sequence for which it holds,
    and its factors. An engine has one of the lists (`within`), so it is no part of what entries depend on.
    """

    base: float
    factors: tuple[float, ...] | None = None
    amplitude: float = 1.0
    rotated: int | None = field(default=None, repr=False, metadata=LATER)
    short: tuple[int, tuple[float, ...] | None] | None = field(default=None, repr=False, compare=False)

    def within(self, length: int) -> "Rope":
        """The RoPE of an engine whose sequences have at most `length` tokens."""
        shorter = self.short is not None and length <= self.short[0]
        return replace(self, factors=self.short[1] if self.short and shorter else self.factors, short=None)

    @property
    def scaled(self) -> bool:
        return self.amplitude != 1 or any(factor not in (1, STILL) for factor in self.factors or ())

    def turned(self, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        return head_dim - 2 * (self.factors or ()).count(STILL) if self.rotated is None else self.rotated

    def __str__(self) -> str:
        if self == NO_ROPE:
            return "no RoPE"
        part = "" if self.rotated is None else f" of {self.rotated} numbers"
        return f"base {self.base:g}{part}{' scaled' if self.scaled else ''}"


NO_ROPE = Rope(1.0, rotated=0)  # of a layer that knows no positions (NoPE, Kazemnejad et al. 2023, arXiv:2305.19466)


@cache
def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32: each pair's angle per position, in radians; 0 for those that are not rotated."""
    rotated = head_dim if rope.rotated is None else rope.rotated
    turns = np.float32(1.0) / _periods(rope.base, rotated)
    if rope.factors is not None:
        turns = (turns / np.array(rope.factors, np.float64)).astype(np.float32)
    return np.concatenate([turns, np.zeros((head_dim - rotated) // 2, np.float32)])


def _periods(base: float, rotated: int) -> np.ndarray:
    """[rotated / 2] float32: positions per radian of each pair, without scaling."""
    return np.float32(base) ** (np.arange(0, rotated, 2, dtype=np.float32) / np.float32(max(rotated, 1)))


def _with_turns(base: float, turns: np.ndarray, amplitude: float = 1.0) -> Rope:
    """The RoPE whose frequencies are exactly these, [head_dim / 2] float32.

    Scalings compute them in float32 and in transformers' order, since position times frequency multiplies what is
    rounded: at position 3,000, one last bit of the fastest pair is an angle of 2e-4.
    """
    plain = np.float32(1.0) / _periods(base, 2 * len(turns))
    return Rope(base, tuple((plain / turns.astype(np.float64)).tolist()), amplitude)


@cache
def amplitudes(rope: Rope, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32: each pair's factor of queries and keys; 1 for those that are not rotated."""
    sizes = np.ones(head_dim // 2, np.float32)
    sizes[: None if rope.rotated is None else rope.rotated // 2] = rope.amplitude
    return sizes


def turned_on(rope: Rope, keys: np.ndarray, positions: np.ndarray, distance: int | np.ndarray) -> np.ndarray:
    """Keys (or queries) that are rotated to `positions`, rotated on to positions that are `distance` further.

    Pairs turn by the difference of the two float32 angles that backends compute, so no rounding of an angle grows with
    the position.

    Args:
        keys: [n, heads, head_dim] float32; positions: [n, heads], or [n, 1] if they are those of all heads.
        distance: one for all, or an array as `positions`.
    """
    turns, start = frequencies(rope, keys.shape[-1]), positions.astype(np.float32)[..., None]
    goal = (positions + distance).astype(np.float32)[..., None]
    return _turned(keys, np.exp(1j * ((goal * turns).astype(np.float64) - start * turns)))


def mean_turned_back(rope: Rope, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The mean of keys, [..., head_dim] float32, that are each turned back by the angles of several positions, [n]."""
    angles = positions.astype(np.float32)[:, None] * frequencies(rope, keys.shape[-1])
    return _turned(keys, np.exp(-1j * angles.astype(np.float64)).mean(0))


def _turned(keys: np.ndarray, by: np.ndarray) -> np.ndarray:
    """The pairs of keys, [..., head_dim] float32, as complex numbers times others, [..., head_dim / 2]."""
    cos, sin = np.real(by).astype(np.float32), np.imag(by).astype(np.float32)
    x, y = np.split(keys, 2, -1)
    return np.concatenate([x * cos - y * sin, y * cos + x * sin], -1)


def linear(base: float, head_dim: int, factor: float) -> Rope:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): all frequencies divided by `factor`."""
    return Rope(base, (factor,) * (head_dim // 2))


def llama3(base: float, head_dim: int, factor: float, original: float, low: float, high: float) -> Rope:
    """The scaling of Llama 3.1, by each pair's rotations over the original context of `original` positions.

    Below `low` rotations the frequency is divided by `factor`, above `high` it is unchanged, in between interpolated.
    """
    context, times = np.float32(original), np.float32(factor)
    slow, fast = np.float32(low), np.float32(high)
    turns = np.float32(1.0) / _periods(base, head_dim)
    lengths = np.float32(2 * pi) / turns
    smooth = (context / lengths - slow) / (fast - slow)
    between = (1 - smooth) * turns / times + smooth * turns
    scaled = np.where(lengths > context / slow, turns / times, np.where(lengths < context / fast, turns, between))
    return _with_turns(base, scaled)


def yarn(
    base: float,
    head_dim: int,
    factor: float,
    original: float,
    *,
    amplitude: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    strength: float = 1.0,
) -> Rope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): fast pairs keep their frequency, slow ones are divided by `factor`.

    A pair is fast if it rotates at least `beta_fast` times over the original context, slow below `beta_slow`; between
    them the frequency goes over linearly in the pair's index. `truncate` rounds the two ends outwards to whole pairs.
    `strength` is llama.cpp's extrapolation factor: with 0, every pair is slow.
    """

    def pair(rotations: float) -> float:
        return head_dim * log(original / (rotations * 2 * pi)) / (2 * log(base))

    first, last = pair(beta_fast), pair(beta_slow)
    if truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    periods, one = _periods(base, head_dim), np.float32(1.0)
    slow = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    fast = (one - slow) * np.float32(strength)
    turns = one / (np.float32(factor) * periods) * (one - fast) + one / periods * fast
    return _with_turns(base, turns, amplitude)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """The factor by which a context that is so many times the original makes queries and keys larger."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def yarn_amplitude(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's factor of queries and keys (section 3.4); with both scales, DeepSeek's ratio of two such factors."""
    both = mscale and mscale_all_dim
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim) if both else yarn_mscale(factor)


def longrope(
    base: float, short: Sequence[float], long: Sequence[float], original: float, context: float, amplitude: float
) -> Rope:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): one list of divisors for all positions.

    They are the long ones where `context`, the longest sequence that the model is declared for, exceeds the original
    context; an engine for shorter sequences takes the short ones (`Rope.within`), as vLLM does. The paper changes lists
    when a sequence grows past it. That would change keys that are in a cache already.
    """

    def of(divisors: Sequence[float]) -> Rope:
        times = np.array(divisors, np.float32)
        return _with_turns(base, np.float32(1.0) / (times * _periods(base, 2 * len(times))), amplitude)

    return of(short) if context <= original else replace(of(long), short=(int(original), of(short).factors))


def longrope_amplitude(factor: float, original: float) -> float:
    """LongRoPE's factor of queries and keys, for a context that is `factor` times the original."""
    return 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(original))
