"""Values at other positions: K is turned on, and everything else is what it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.kv.test_cache import LOGITS, PENDING
from tests.kv.values import GEOMETRY, RECURRENT, WINDOWED, contents, prefill
from twostroke.backends.interface import PAGE, POSITION
from twostroke.errors import KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.models.rope import NO_ROPE, Rope, frequencies, turned_on, yarn

NewPool = Callable[..., PagePool]
ROPES = {
    "plain": Rope(1e4),
    "partial": Rope(1e4, rotated=8),
    "YaRN": yarn(1e4, 16, 8.0, 64, amplitude=1.2),
    "none": NO_ROPE,
}
FLOAT32 = 2.0**-24  # relative error of one rounding


def rotated(rope: Rope, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE in complex numbers, in double precision over float32 angles: [n, heads, head_dim]."""
    half, turns = keys.shape[-1] // 2, frequencies(rope, keys.shape[-1])
    angles = (positions.astype(np.float32)[:, None] * turns).astype(np.float64)
    pairs = (keys[..., :half] + 1j * keys[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("distance", [1, 900, -37, 120_000])
def test_keys_that_are_turned_on_are_those_of_the_other_positions(rope: Rope, distance: int) -> None:
    keys, positions = np.random.default_rng(0).normal(size=(50, 2, 16)), np.arange(40, 90)
    stored = rotated(rope, keys, positions).astype(np.float32)
    found, expected = turned_on(rope, stored, positions[:, None], distance), rotated(rope, keys, positions + distance)
    half = 8
    size = np.hypot(keys[..., :half], keys[..., half:])
    # Roundings of the stored pair, of cos and sin, of two products and of a sum.
    assert (np.abs(found - expected) <= 6 * FLOAT32 * np.concatenate([size, size], -1)).all()
    if rope == NO_ROPE:
        assert np.array_equal(found, stored)


def test_moved_by_nothing_is_the_same_value(pool: PagePool) -> None:
    kv = prefill(pool, range(10), tail=LOGITS)
    assert kv.at(0) is kv
    part = kv[3:]
    assert part.at(3) is part
    assert KVCache.empty(pool).at(7).next_position == 7


def test_entries_move_as_a_block(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    value = kv[:3] + kv[6:]  # two spans, of which one begins within a page
    used, moved = pool.num_used, value.at(20)
    assert moved.positions == [20, 21, 22, 26, 27, 28, 29]
    assert (moved.tokens, moved.next_position) == (value.tokens, 30)
    assert (moved.nbytes, moved.num_pages) == (value.nbytes, value.num_pages)
    assert pool.num_used == used + 3
    assert not set(moved.entry_table.pages.tolist()) & set(value.entry_table.pages.tolist())
    was, found = value.entries(), moved.entries()
    assert np.array_equal(found[:, 1], was[:, 1])
    for layer in range(2):
        assert np.array_equal(
            found[layer, 0], turned_on(Rope(1e4), was[layer, 0], np.array(value.positions)[:, None], 20)
        )
    assert (moved.stretches[0].model, moved.canonical_length("m")) == (None, 0)
    assert np.array_equal(moved[2:5].entries(), found[:, :, 2:5])
    used, longer = pool.num_used, prefill(moved, [7])  # in place
    assert (pool.num_used, longer.positions[-1]) == (used, 30)
    back = moved.at(0)
    assert back.positions == value.positions
    assert (np.abs(back.entries() - was) <= 9 * FLOAT32 * 2**0.5 * 255).all()  # it was rounded twice
    assert contents(value) == contents(kv[:3] + kv[6:])


def test_a_long_value_is_moved_whole(new_pool: NewPool) -> None:
    kv = prefill(new_pool(num_pages=300), range(500))
    expected = turned_on(Rope(1e4), kv.entries()[1, 0], np.arange(500)[:, None], 7)
    assert np.array_equal(kv.at(7).entries()[1, 0], expected)


def test_the_tail_keeps_a_token_and_no_logits(pool: PagePool) -> None:
    assert prefill(pool, range(5), tail=LOGITS).at(2).tail is None
    assert prefill(pool, range(5), tail=PENDING).at(2).tail is PENDING


def test_layers_without_rope_share_their_pages(new_pool: NewPool) -> None:
    pool = new_pool(geometry=replace(WINDOWED, ropes=(NO_ROPE, NO_ROPE, Rope(1e4), NO_ROPE)))
    kv = prefill(pool, range(6))
    moved, was = kv.at(4), kv.entries()
    assert (moved.table[:, PAGE] == kv.table[:, PAGE]).all()
    assert (moved.table[:, PAGE + 1] != kv.table[:, PAGE + 1]).all()
    assert np.array_equal(moved.entries()[[0, 1, 3]], was[[0, 1, 3]])
    assert not np.array_equal(moved.entries()[2, 0], was[2, 0])


def test_what_a_window_has_given_back_stays_away(new_pool: NewPool) -> None:
    pool = new_pool(geometry=WINDOWED)
    kv = prefill(pool, range(30))
    moved = kv.at(100)
    assert (kv.table[:, PAGE + 1] == -1).any()
    assert np.array_equal(moved.table[:, PAGE + 1] == -1, kv.table[:, PAGE + 1] == -1)
    assert moved.nbytes == kv.nbytes
    assert moved.complete
    assert np.isnan(moved.entries()[2:]).sum() == np.isnan(kv.entries()[2:]).sum() > 0


def test_states_are_what_they_were(new_pool: NewPool) -> None:
    kv = prefill(new_pool(geometry=RECURRENT), range(21))
    moved = kv.at(5)
    assert moved.complete
    assert moved.states() is not None
    assert np.array_equal(moved.states()[2], kv.states()[2])  # pyright: ignore[reportOptionalSubscript]
    assert np.array_equal(prefill(moved, [1]).entries()[:, 1, :21], kv.entries()[:, 1])


@pytest.mark.parametrize("geometry", [GEOMETRY, WINDOWED, RECURRENT, replace(WINDOWED, kv_dtype="int8")])
@pytest.mark.parametrize("tier", ["pool", "host", "disk"])
def test_a_moved_value_is_a_value_in_every_tier(
    new_pool: NewPool, tmp_path: Path, geometry: Geometry, tier: str
) -> None:
    pool = new_pool(geometry=geometry)
    kv = prefill(pool, range(21))
    moved, expected = kv.to(tier).at(9), kv.at(9)
    assert moved.tier == tier
    same(moved, expected)
    moved.save(tmp_path / "kv")
    same(KVCache.load(tmp_path / "kv", Holder(pool)), expected)
    same(moved.copy_to(new_pool(geometry=geometry)), expected)
    joined = kv[:9] + moved if not geometry.windowed else kv[:0] + moved
    same(joined[len(joined) - 21 :], expected)


class Holder:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool


def same(one: KVCache, other: KVCache) -> None:
    assert (one.tokens, one.positions, one.next_position) == (other.tokens, other.positions, other.next_position)
    assert one.entries().tobytes() == other.entries().tobytes()
    assert (one.nbytes, one.complete, one.stretches[0].model) == (other.nbytes, other.complete, None)


def test_positions_that_do_not_exist_are_refused_before_work(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    pool.max_position = 32
    assert kv.at(22).positions[-1] == 31
    used = pool.num_used
    for position, why in ((23, "positions end at 31: .* at 32, so move them by 1 less"), (-1, "begin at 0")):
        with pytest.raises(KVError, match=why):
            kv.at(position)
    for move in (KVCache.at, KVCache.resumed_at):
        with pytest.raises(KVError, match="a position is an integer, not 2"):
            move(kv, cast("Any", 2.5))
    with pytest.raises(KVError, match="begin at 0"):  # an entry in the midst lies before the first one
        prefill(kv[4:].resumed_at(0), [1]).at(2)
    assert pool.num_used == used


def test_without_room_nothing_changes(new_pool: NewPool) -> None:
    small = new_pool(num_pages=5)
    kv = prefill(small, range(12))
    with pytest.raises(OutOfPages):
        kv.at(5)
    assert small.num_used == 3
    assert kv[8:].at(5).table[0, POSITION] == 5
