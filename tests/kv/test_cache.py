"""The KV value: sharing, copying, and refused operations."""

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kv.values import GEOMETRY, computed, contents, enter, geometry, prefill
from twostroke.backends.interface import PAGE
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.errors import GeometryMismatch, KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.pool import PagePool
from twostroke.kv.writer import KVWriter

LOGITS = Tail("m", StoredLogits(np.array([[0.5, -1.0]], np.float32)))
PENDING = Tail("m", pending=7)
NewPool = Callable[..., PagePool]


# Sharing ---------------------------------------------------------------------------------------------------------


def test_the_first_continuation_writes_in_place_and_the_second_one_copies(pool: PagePool) -> None:
    base = prefill(pool, range(6))
    first = prefill(base, [10, 11])
    assert pool.num_used == 2
    second = prefill(base, [20])
    assert pool.num_used == 3
    assert first.table[0, PAGE] == second.table[0, PAGE] == base.table[0, PAGE]
    assert base.tokens == list(range(6))
    assert contents(first)[:6] == contents(second)[:6] == contents(base)
    assert contents(first)[6] == computed("m", contents(base), 10, 6)
    assert contents(second)[6] == computed("m", contents(base), 20, 6)


def test_appending_behind_a_cut_never_overwrites_what_was_cut_off(pool: PagePool) -> None:
    base = prefill(pool, range(4))
    before = contents(base)
    forked = prefill(base[:2], [9])
    assert contents(base) == before
    assert forked.tokens == [0, 1, 9]
    assert pool.num_used == 2
    before = contents(forked)  # its copy of the page is guarded in the same way
    again = prefill(forked[:2], [8])
    assert contents(forked) == before
    assert contents(again) == contents(prefill(pool, [0, 1, 8]))


def test_operations_in_one_pool_take_no_pages(pool: PagePool) -> None:
    kv = prefill(pool, range(30))
    used = pool.num_used
    held = [kv[3:17], kv[:3] + kv[7:], kv[:5] + kv[5:], kv[-1:], kv[:0], kv.with_tail(PENDING), kv.copy_to(pool)]
    assert pool.num_used == used == 8
    assert held[-1] is kv


def test_two_writers_on_one_value_do_not_disturb_each_other(pool: PagePool) -> None:
    base = prefill(pool, range(5))
    writers = [KVWriter(base, "m"), KVWriter(base, "m")]
    frozen = []
    for token in range(6):
        for i, writer in enumerate(writers):
            enter(writer, [10 * i + token])
            frozen.append((writer.freeze(), contents(writer.freeze())))
    assert all(contents(kv) == entries for kv, entries in frozen)
    assert contents(frozen[-1][0]) == contents(prefill(pool, [*range(5), *range(10, 16)]))


def test_a_writer_goes_on_after_someone_else_has_continued_what_it_froze(pool: PagePool) -> None:
    writer = KVWriter(KVCache.empty(pool), "m")
    enter(writer, [1, 2])
    middle = writer.freeze()
    other = prefill(middle, [3])
    enter(writer, [4])
    assert (writer.freeze().tokens, other.tokens) == ([1, 2, 4], [1, 2, 3])
    assert contents(other) == contents(prefill(pool, [1, 2, 3]))
    assert contents(writer.freeze()) == contents(prefill(pool, [1, 2, 4]))


def test_an_abandoned_writer_gives_its_pages_back(pool: PagePool) -> None:
    base = prefill(pool, range(3))
    writer = KVWriter(base, "m")
    enter(writer, range(20))
    assert pool.num_used == 6
    writer.close()
    writer.close()
    assert pool.num_used == 1


@pytest.mark.parametrize("use", [KVWriter.freeze, lambda writer: writer.append([1])])
def test_a_closed_writer_is_of_no_more_use(pool: PagePool, use: Callable[[KVWriter], object]) -> None:
    writer = KVWriter(prefill(pool, [0]), "m")
    enter(writer, [1])
    writer.close()
    with pytest.raises(KVError, match="closed"):  # its pages may have another owner now
        use(writer)


def test_copying_by_the_standard_library_counts_references_too(pool: PagePool) -> None:
    kv = prefill(pool, range(5))
    assert copy.copy(kv) is kv
    assert copy.deepcopy({"held": kv})["held"] is kv


def test_values_alive_at_interpreter_exit_make_no_noise() -> None:
    program = """
        from tests.kv.values import make_pool, prefill
        kept = prefill(make_pool(), range(9))
        kept_in_a_cycle = [kept[2:]]
        kept_in_a_cycle.append(kept_in_a_cycle)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Cutting and joining ---------------------------------------------------------------------------------------------


def test_slices_keep_positions(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    assert kv[3:7].positions == [3, 4, 5, 6]
    assert kv[3:7].next_position == 7
    assert kv[-3:].positions == [7, 8, 9]
    assert kv[len(kv) :].next_position == kv.next_position == 10
    assert kv[4:4].next_position == 4
    assert kv[8:2].next_position == 8
    assert kv[3:7][1:3].positions == [4, 5]
    assert (kv[:3] + kv[7:])[3:3].next_position == 7


def test_an_empty_slice_carries_the_position_on(pool: PagePool) -> None:
    kv = prefill(pool, range(6))
    later = prefill(kv[6:], [8, 9])
    assert later.positions == [6, 7]
    assert later.table[0].tolist()[:PAGE] == [0, 2, 6]
    assert (kv + later).positions == list(range(8))


@pytest.mark.parametrize("cut", range(1, 9))
@pytest.mark.parametrize("resume", [9, 11, 12, 14])
def test_a_misaligned_join_is_extended_like_any_other(pool: PagePool, cut: int, resume: int) -> None:
    kv = prefill(pool, range(15))
    joined = kv[:cut] + kv[resume:]
    longer = prefill(joined, range(20, 26))
    assert longer.positions == [*range(cut), *range(resume, 21)]
    assert contents(longer)[: len(joined)] == contents(kv)[:cut] + contents(kv)[resume:]
    assert contents(longer)[-6] == computed("m", contents(joined), 20, 15)
    assert contents(kv) == contents(prefill(pool, range(15)))


def test_positions_must_increase(pool: PagePool) -> None:
    kv = prefill(pool, range(6))
    for left, right in [(kv, kv), (kv[3:], kv[:3]), (kv[:4], kv[3:])]:
        with pytest.raises(KVError, match=r"positions must increase: the left value ends at [35]"):
            _ = left + right
    assert (kv[:3] + kv[3:]).positions == kv.positions


@pytest.mark.parametrize("which", [0, -1, np.int64(2), slice(None, None, 2), slice(None, None, -1)])
def test_only_contiguous_slices_are_possible(pool: PagePool, which: int | slice) -> None:
    kv = prefill(pool, range(6))
    with pytest.raises(KVError, match="slices"):
        kv[which]  # pyright: ignore[reportArgumentType]
    assert kv[np.int64(1) : np.int64(3)].tokens == [1, 2]


def test_other_things_cannot_be_added(pool: PagePool) -> None:
    kv = prefill(pool, [1])
    with pytest.raises(TypeError):
        _ = kv + 2  # pyright: ignore[reportOperatorIssue]


# Tails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [LOGITS, PENDING])
def test_who_keeps_the_last_entry_keeps_the_tail(pool: PagePool, tail: Tail) -> None:
    kv = prefill(pool, range(6), tail=tail)
    for keeps in (kv[2:], kv[5:], kv[:], kv[:2] + kv[4:], kv + kv[6:], kv[0:0] + kv):
        assert keeps.tail is tail
    for cuts in (kv[:-1], kv[6:], kv[:0], kv[:5] + kv[5:].with_tail(None)):
        assert cuts.tail is None
    assert kv.pending == tail.pending
    assert kv[:3].pending is None


def test_a_join_takes_the_tail_of_its_right_operand(pool: PagePool) -> None:
    left, right = prefill(pool, range(3), tail=LOGITS), prefill(pool, range(6), tail=PENDING)
    assert (left + right[3:]).tail is PENDING
    assert (left + right[3:5]).tail is None
    assert (left + KVCache.empty(pool)).tail is LOGITS


# Other pools -----------------------------------------------------------------------------------------------------


def test_a_copy_has_the_same_slots(pool: PagePool, new_pool: NewPool) -> None:
    kv = prefill(pool, range(11), tail=LOGITS)
    value, there = kv[2:5] + kv[7:], new_pool()
    moved = value.copy_to(there)
    assert moved.pool is there
    assert (moved.table[:, :PAGE] == value.table[:, :PAGE]).all()
    assert np.array_equal(moved.entries(), value.entries())
    assert moved.tail is LOGITS
    assert there.num_used == value.num_pages == 3
    longer = prefill(moved, [30])  # in place: nothing was written after the copy
    assert there.num_used == 3
    assert contents(longer)[:-1] == contents(value)
    assert (kv[:2] + moved).positions == [0, 1, 2, 3, 4, 7, 8, 9, 10]
    assert (KVCache.empty(there) + kv[:3]).pool is there


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", geometry(num_layers=3).groups),
        ("groups", geometry(num_kv_heads=1).groups),
        ("groups", geometry(head_dim=8).groups),
        ("kv_dtype", "bfloat16"),
        ("tokenizer", "words"),
    ],
)
def test_values_of_another_geometry_are_refused_by_field(
    pool: PagePool, new_pool: NewPool, field: str, value: object
) -> None:
    kv = prefill(pool, range(3))
    changed: dict[str, Any] = {field: value}
    other = new_pool(geometry=replace(GEOMETRY, **changed))
    with pytest.raises(GeometryMismatch, match=field):
        _ = KVCache.empty(other) + kv
    with pytest.raises(GeometryMismatch, match=field):
        kv.copy_to(other)


def test_pages_of_another_size_are_refused(pool: PagePool, new_pool: NewPool) -> None:
    kv = prefill(pool, range(5))
    for size in (2, 8):
        with pytest.raises(KVError, match="pages of 4 entries, and the pool has"):
            kv.copy_to(new_pool(page_size=size))


# Running out -----------------------------------------------------------------------------------------------------


def test_a_join_across_pools_without_room_changes_nothing(pool: PagePool, new_pool: NewPool) -> None:
    kv, small = prefill(pool, range(12)), new_pool(num_pages=3)
    mine = prefill(small, range(3))
    with pytest.raises(OutOfPages, match="3 more KV pages are needed and 2 of 3 are free"):
        _ = mine + kv[3:]
    assert small.num_used == 1
    assert contents(mine) == contents(kv)[:3]
    assert (mine + kv[8:]).tokens == [0, 1, 2, 8, 9, 10, 11]


def test_append_without_room_gives_its_claim_back(new_pool: NewPool) -> None:
    small = new_pool(num_pages=2)
    base = prefill(small, range(3))
    writer = KVWriter(base, "m")
    with pytest.raises(OutOfPages):
        writer.append(list(range(6)))
    assert (len(writer), writer.next_position, small.num_used) == (3, 3, 1)
    other = prefill(base, [4])  # still in place: the claim after the last entry was released
    assert small.num_used == 1
    assert other.table[0, PAGE] == base.table[0, PAGE]
    enter(writer, [5])
    assert (writer.freeze().tokens, other.tokens) == ([0, 1, 2, 5], [0, 1, 2, 4])


def test_a_failing_write_leaks_no_pages(pool: PagePool, new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, there = prefill(pool, range(9)), new_pool()

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(there.memory, "write_page", fail)
    with pytest.raises(RuntimeError):
        kv.copy_to(there)
    assert there.num_used == 0


def test_a_value_that_could_not_be_made_releases_nothing(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = prefill(pool, range(9))

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pool, "retain", fail)
        with pytest.raises(MemoryError):
            kv[2:]
    assert [pool.num_references(page) for page in kv.table[:, PAGE]] == [1, 1, 1]


def test_repr_tells_what_it_is(pool: PagePool) -> None:
    kv = prefill(pool, range(9))
    assert repr(kv[2:]) == "KVCache(7 entries, positions 2 to 8, 896 bytes in 3 pages)"
    assert repr(kv[:0]) == "KVCache(0 entries, 0 bytes in 0 pages)"


def test_a_writer_takes_entries_back(pool: PagePool) -> None:
    """Frozen entries stay; new ones are written to the slots of the entries taken back, without a copy."""
    kv = prefill(pool, range(6))
    writer = KVWriter(kv, "model")
    for length in (9, 6, 21, 7, 16, 0):
        before = writer.table.copy()
        writer.append(list(range(40)))
        writer.truncate(length)
        assert len(writer) == max(6, length) == len(writer.freeze())
        assert writer.next_position == len(writer)
        common = min(len(before), len(writer.table))
        assert (before[: common - 1] == writer.table[: common - 1]).all()
        assert before[common - 1, PAGE] == writer.table[common - 1, PAGE]
    assert writer.freeze().tokens == list(range(6))
    writer.close()
