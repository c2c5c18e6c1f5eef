"""Values whose heads hold different entries."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kv.test_cache import LOGITS, PENDING
from tests.kv.test_other_positions import Holder
from tests.kv.values import APART, GEOMETRY, RECURRENT, WINDOWED, make_pool, prefill
from twostroke.backends.interface import PAGE
from twostroke.errors import KVError, OutOfPages
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.kv.geometry import Geometry
from twostroke.kv.header_fields import InvalidHeader
from twostroke.kv.pool import PagePool
from twostroke.kv.stream_header import StreamHeader, decode, encode
from twostroke.kv.writer import KVWriter
from twostroke.models.rope import Rope, turned_on

NewPool = Callable[..., PagePool]


def chosen(length: int, count: int, seed: int = 0) -> np.ndarray:
    """[2, 2, count] rising indices, others for each layer and head; all end with the last entry."""
    random = np.random.default_rng(seed)
    rows = [np.append(np.sort(random.permutation(length - 1)[: count - 1]), length - 1) for _ in range(4)]
    return np.reshape(rows, (2, 2, count))


def expected(kv: KVCache, indices: np.ndarray) -> np.ndarray:
    """[layers, 2, n, heads, head_dim], one head at a time."""
    entries = kv.entries()
    heads = [[entries[layer][:, indices[layer, head], head] for head in range(2)] for layer in range(2)]
    return np.stack([np.stack(row, 2) for row in heads])


def same(one: KVCache, other: KVCache) -> None:
    assert (one.tokens, one.positions, one.next_position) == (other.tokens, other.positions, other.next_position)
    assert one.entries().tobytes() == other.entries().tobytes()
    assert np.array_equal(one.head_positions, other.head_positions)  # pyright: ignore[reportArgumentType]
    assert (one.nbytes, one.canonical_length("m")) == (other.nbytes, 0)


def test_each_head_holds_its_entries(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=300)
    kv = prefill(pool, range(700), tail=LOGITS)
    indices, used = chosen(700, 301), pool.num_used
    made = kv.gather(indices)
    assert np.array_equal(made.entries(), expected(kv, indices))
    assert made.head_positions is not None
    assert np.array_equal(made.head_positions, indices)
    assert (made.positions, made.next_position) == (list(range(399, 700)), 700)
    assert made.tokens == indices[0, 0].tolist()
    assert (made.nbytes, made.num_pages, pool.num_used) == (kv.nbytes * 301 // 700, 76, used + 76)
    assert made.tail is LOGITS
    assert [one.model for one in made.stretches] == [None]


def test_the_tail_stays_if_all_heads_end_with_the_last_entry(pool: PagePool) -> None:
    kv = prefill(pool, range(12), tail=PENDING)
    indices = chosen(12, 5)
    assert kv.gather(indices).tail is PENDING
    indices[1, 0] = np.arange(5)
    other = kv.gather(indices)
    assert kv.resumed_at(30).gather(indices).next_position == 30
    assert kv.resumed_at(30).gather(indices[:, :, :3]).next_position == indices[:, :, :3].max() + 1
    assert (other.tail, other.next_position) == (None, 12)
    with pytest.raises(KVError, match="the last entry cannot be computed again"):
        other.without_last()
    assert (kv[:11].gather(indices[:, :, :3]) + kv[11:]).without_last().next_position == 11


def test_a_gathered_value_is_a_value(new_pool: NewPool, tmp_path: Path) -> None:
    pool = new_pool(num_pages=100)
    kv = prefill(pool, range(20))
    made, indices = kv.gather(chosen(20, 9)), chosen(20, 9)
    for tier in ("host", "disk"):
        there = kv.to(tier).gather(indices)
        assert there.tier == tier
        same(there, made)
    made.save(tmp_path / "kv")
    same(KVCache.load(tmp_path / "kv", Holder(pool)), made)
    same(made.copy_to(new_pool()), made)
    same(made[:4] + made[4:], made)
    joined = kv[:3] + prefill(made[2:], [1, 2])
    assert joined.head_positions is not None
    assert joined.head_positions[1, 0].tolist() == [0, 1, 2, *indices[1, 0, 2:].tolist(), 20, 21]
    assert np.array_equal(joined.entries()[:, :, 3:10], made.entries()[:, :, 2:])
    assert kv.gather(indices[:, :, :0]).next_position == 20


def test_entries_of_heads_move_from_their_own_positions(pool: PagePool) -> None:
    kv = prefill(pool, range(20))
    indices = chosen(20, 9)
    made = kv.gather(indices)
    moved = made.at(made.positions[0] + 100)
    for head in range(2):
        keys = made.entries()[1, 0, :, head : head + 1]
        found = turned_on(Rope(1e4), keys, indices[1, head][:, None], 100)
        assert np.array_equal(moved.entries()[1, 0, :, head : head + 1], found)
    assert np.array_equal(moved.head_positions, indices + 100)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KVError, match="positions begin at 0"):
        made.at(0)  # some head would hold an entry before that


def test_a_head_with_fewer_entries_begins_with_empty_slots(pool: PagePool, tmp_path: Path) -> None:
    kv = prefill(pool, range(20), tail=LOGITS)
    indices = chosen(20, 9)
    indices[0, 1, :4] = NO_ENTRY
    made, filled = kv.gather(indices), indices.copy()
    filled[0, 1, :4] = indices[0, 1, 4]
    assert np.array_equal(made.entries(), expected(kv, filled))
    assert made.head_positions is not None
    assert np.array_equal(made.head_positions[indices != NO_ENTRY], indices[indices != NO_ENTRY])
    assert (np.diff(made.head_positions, axis=-1) >= 0).all()
    assert (made.head_positions <= made.positions).all()
    assert made.bias is not None
    assert np.array_equal(np.isneginf(made.bias), indices == NO_ENTRY)
    assert (made.tail, made.tokens) == (LOGITS, indices[0, 0].tolist())
    made.save(tmp_path / "kv")
    same(KVCache.load(tmp_path / "kv", Holder(pool)), made)
    bias = np.arange(2 * 2 * 20, dtype=np.float32).reshape(2, 2, 20)
    again = kv.with_bias(bias).gather(indices).bias
    assert again is not None
    assert np.array_equal(again, np.where(indices == NO_ENTRY, -np.inf, np.take_along_axis(bias, filled, 2)))


def test_what_was_left_out_is_zeros_where_it_comes_beside_what_is_seen(new_pool: NewPool) -> None:
    pool = new_pool(geometry=APART)
    kv = prefill(pool, range(20))
    indices = chosen(20, 12)
    indices[1, :, :5] = NO_ENTRY  # pages of 4
    made = kv.gather(indices)
    assert np.isnan(made.entries()[1, :, :4]).all()
    assert made.num_pages == 5
    writer = KVWriter(made, "m")
    (table,) = pool.step_tables([writer.table])
    assert table[0, PAGE + 1] == table[-1, PAGE + 1]  # which kernels may read for nothing
    again = made.gather(np.broadcast_to(np.arange(2, 10), (2, 2, 8)))
    found = again.entries()
    assert not found[1, :, :2].any()
    assert np.array_equal(found[0], made.entries()[0, :, 2:10])
    assert np.array_equal(found[1, :, 2:], made.entries()[1, :, 4:10])


def test_a_file_that_lacks_what_a_head_sees_is_damaged(new_pool: NewPool) -> None:
    pool = new_pool(geometry=APART)
    indices = chosen(20, 12)
    indices[1, :, :5] = NO_ENTRY
    contents = prefill(pool, range(20)).gather(indices).entry_table
    pages = spans.distinct_pages(contents.table)
    told = contents.in_pages(pages, np.arange(len(pages)))
    header = StreamHeader(pool.geometry, pool.page_size, pool.memory.layout, len(pages), told, 0)
    assert np.array_equal(decode(encode(header)).contents.table, told.table)
    assert told.bias is not None
    for bias in (None, np.where(np.arange(12)[:, None, None] == 3, np.float32(0), told.bias)):
        with pytest.raises(InvalidHeader, match="a layer without a window lacks entries"):
            decode(encode(replace(header, contents=replace(told, bias=bias))))


def test_gathered_again(pool: PagePool) -> None:
    kv = prefill(pool, range(20))
    first, second = chosen(20, 12), chosen(12, 5, seed=1)
    same(kv.gather(first).gather(second), kv.gather(np.take_along_axis(first, second, 2)))


@pytest.mark.parametrize(
    ("indices", "why"),
    [
        (np.zeros((2, 3, 1), int), r"\[2, 2, n\], not int64 \[2, 3, 1\]"),
        (np.zeros((2, 2, 1)), "not float64"),
        (np.full((2, 2, 1), 9), "from 0 to 8, not 9 to 9"),
        (np.full((2, 2, 1), -2), "from 0 to 8, not -2 to -2"),
        (np.full((2, 2, 1), -1), "each head needs an entry"),
        (np.array([[[-1, 3], [3, -1]]] * 2), "empty slots come before all others"),
        (np.array([[[-1, 3, 4], [3, -1, 4]]] * 2), "must rise|empty slots"),
        (np.full((2, 2, 2), 3), "must rise"),
    ],
)
def test_indices_are_checked_before_work(pool: PagePool, indices: np.ndarray, why: str) -> None:
    kv = prefill(pool, range(9))
    used = pool.num_used
    with pytest.raises(KVError, match=why):
        kv.gather(indices)
    assert pool.num_used == used


@pytest.mark.parametrize("geometry", [WINDOWED, RECURRENT])
def test_windows_and_states_go_by_positions(geometry: Geometry) -> None:
    with pytest.raises(KVError, match="layers attend to all entries"):
        prefill(make_pool(geometry=geometry), range(9)).gather(np.zeros((2, 2, 1), int))


def test_without_room_nothing_changes(new_pool: NewPool) -> None:
    small = new_pool(num_pages=4, geometry=GEOMETRY)
    kv = prefill(small, range(12))
    with pytest.raises(OutOfPages):
        kv.gather(chosen(12, 9))
    assert small.num_used == 3


# Entries that a technique makes --------------------------------------------------------------------------------------


def test_entries_that_are_written_are_those_that_were_read(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=400)
    kv = prefill(pool, range(300), tail=LOGITS)
    indices = chosen(300, 270)
    made = kv.gather(indices).with_tail(None)
    keys, values = made.entries().transpose(1, 0, 3, 2, 4)
    written = KVCache.of_entries(Holder(pool), keys, values, indices, made.tokens)
    same(written, made)
    assert written.tail is None
    alike = KVCache.of_entries(Holder(pool), keys, values, range(30, 300))
    assert alike.entries().tobytes() == made.entries().tobytes()
    assert (alike.positions, alike.next_position, alike.tokens) == (list(range(30, 300)), 300, [0] * 270)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"keys": np.zeros((2, 2, 3, 5))}, r"here \[2, 2, 3, 4\], not \[2, 2, 3, 5\]"),
        ({"values": np.full((2, 2, 3, 4), np.nan)}, "must be finite"),
        ({"positions": [1.0, 2, 3]}, "positions are integers"),
        ({"positions": np.zeros((2, 1, 3), int)}, "positions are integers of shape"),
        ({"positions": [1, 1, 2]}, "rise, from 0 to 99"),
        ({"positions": [-1, 1, 2]}, "rise, from 0 to 99"),
        ({"positions": [1, 2, 100]}, "rise, from 0 to 99"),
        ({"positions": []}, "no entries"),
        ({"tokens": [1, 2]}, r"here \[2, 2, 2, 4\]"),
    ],
)
def test_entries_that_cannot_be_are_refused(pool: PagePool, change: dict[str, Any], why: str) -> None:
    pool.max_position = 100
    given: dict[str, Any] = {"keys": np.ones((2, 2, 3, 4)), "values": np.ones((2, 2, 3, 4)), "positions": [1, 2, 3]}
    with pytest.raises(KVError, match=why):
        KVCache.of_entries(Holder(pool), **given | change)
    assert pool.num_used == 0
