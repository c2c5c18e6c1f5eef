"""Provenance: which model computed an entry, and over which prefix. It decides what a prefix index may hold.

An entry is canonical for a model if that model computed it over exactly the tokens at positions 0 to its own.
A value has a list of stretches. A canonical stretch remembers the tokens before it: a slice is canonical again when it
is joined to its original prefix, and not when it is joined to any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Stretch:
    """`count` consecutive entries of one origin."""

    count: int
    model: str | None  # id of the model that computed them canonically; None if they are not canonical
    before: np.ndarray  # [n] int32, the tokens before the stretch, from position 0; empty if it is not canonical


NOTHING = np.zeros(0, np.int32)


def cut(stretches: Sequence[Stretch], tokens: np.ndarray, start: int, stop: int) -> tuple[Stretch, ...]:
    """The stretches of entries [start, stop) of a value that holds `tokens`."""
    kept, index = [], 0
    for s in stretches:
        first, last = max(start, index), min(stop, index + s.count)
        if first < last:
            before = np.concatenate([s.before, tokens[index:first]]) if s.model and first > index else s.before
            kept.append(Stretch(last - first, s.model, before))
        index += s.count
    return tuple(kept)


def canonical_length(stretches: Sequence[Stretch], tokens: np.ndarray, model: str) -> int:
    """Number of leading entries that are canonical for `model`, each over exactly the entries before it."""
    index = 0
    for s in stretches:
        if s.model != model or len(s.before) != index or (index and not np.array_equal(s.before, tokens[:index])):
            break
        index += s.count
    return index


def extend(
    stretches: Sequence[Stretch], tokens: np.ndarray, next_position: int, model: str, count: int
) -> tuple[Stretch, ...]:
    """The stretches after `model` computed `count` entries over a value that holds `tokens`."""
    if not count:
        return tuple(stretches)
    whole = next_position == len(tokens) == canonical_length(stretches, tokens, model)
    origin = model if whole else None
    if stretches and stretches[-1].model == origin:
        return (*stretches[:-1], Stretch(stretches[-1].count + count, origin, stretches[-1].before))
    return (*stretches, Stretch(count, origin, NOTHING))
