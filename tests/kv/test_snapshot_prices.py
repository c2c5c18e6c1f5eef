"""Of models with recurrent layers, what saves the fewest tokens for its pages leaves a prefix index first."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.kv.values import RECURRENT, WINDOWED, prefill
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex

NewPool = Callable[..., PagePool]
LONG = list(range(64))


def short(number: int) -> list[int]:
    return [1000 + 10 * number + i for i in range(9)]


def ask(index: PrefixIndex, tokens: list[int]) -> int:
    """Answer a prompt, with room that the index makes if it must. Returns how many of its tokens were found."""
    found = index.match(tokens)
    lacks = len(tokens) - len(found)
    if (missing := lacks + 16 - index.pool.num_free) > 0:
        index.evict(missing)
    index.insert(prefill(found, tokens[len(found) :]))
    return len(found)


def flooded(new_pool: NewPool, shorts: int) -> PrefixIndex:
    """A long prompt, and behind it so many short ones."""
    index = PrefixIndex(new_pool(150, geometry=RECURRENT), "m")
    ask(index, LONG)
    for number in range(shorts):
        ask(index, short(number))
    return index


def test_many_short_prompts_do_not_drive_out_a_long_one(new_pool: NewPool) -> None:
    index = flooded(new_pool, 40)
    assert index.evicted_snapshots > 10
    assert len(index.match([*LONG, 7])) == 56  # the last snapshot saves no more than a short one
    index.clear()


def test_what_is_not_used_leaves_in_the_end(new_pool: NewPool) -> None:
    index = flooded(new_pool, 2000)
    assert len(index.match([*LONG, 7])) == 0
    assert len(index.match(short(1999))) == 8
    index.clear()


def test_what_is_used_again_stays(new_pool: NewPool) -> None:
    index = PrefixIndex(new_pool(150, geometry=RECURRENT), "m")
    ask(index, short(0))
    for number in range(1, 200):
        ask(index, short(number))
        if number % 8 == 0:
            assert ask(index, short(0)) == 8
    index.clear()


@pytest.mark.parametrize("geometry", [RECURRENT, WINDOWED])
def test_credits_are_those_of_indexed_pages(geometry: Geometry, new_pool: NewPool) -> None:
    index, rng = PrefixIndex(new_pool(200, geometry=geometry), "m"), np.random.default_rng(1)
    for _ in range(150):
        ask(index, LONG[: int(rng.integers(4, 64))] + short(int(rng.integers(30))))
    credits = index.prices.credits
    pages = set(index.pages)
    assert set(credits) <= pages
    assert bool(credits) == bool(geometry.states)
    index.clear()
    assert not index.prices.credits
