"""Pages: allocated, counted, claimed, and freed once."""

# pyright: reportPrivateUsage=false

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.kv.counts import check_counts
from tests.kv.values import GEOMETRY, contents, prefill
from twostroke.backends.interface import PAGE
from twostroke.backends.page_memory import HUGE_PAGE
from twostroke.errors import OutOfPages
from twostroke.kv import pool as pool_module
from twostroke.kv.cache import KVCache
from twostroke.kv.page_contents import masked_page, read_entries
from twostroke.kv.pages import HOST, POOL, Frames, ReferenceCounts
from twostroke.kv.pool import PagePool
from twostroke.kv.releases import Releases
from twostroke.kv.tier_moves import join_pages, spill
from twostroke.kv.writer import KVWriter

NewPool = Callable[..., PagePool]


def test_storage_is_zeroed_and_of_the_size_it_says(new_pool: NewPool) -> None:
    for dtype, size in [("float32", 4), ("bfloat16", 2)]:
        pool = new_pool(num_pages=10, page_size=4, geometry=replace(GEOMETRY, kv_dtype=dtype))
        assert pool.memory.storages[0].shape == (2, 2, 10, 2, 4, 4)
        assert not pool.memory.storages[0].any()
        assert pool.entry_bytes == 2 * 2 * 2 * 4 * size
        assert pool.page_bytes * pool.num_pages == pool.memory.storages[0].nbytes


def test_storage_begins_on_a_huge_page(new_pool: NewPool) -> None:
    """So no page of a head begins within a cache line, and there are few address translations."""
    assert np.asarray(new_pool().memory.storages[0]).ctypes.data % HUGE_PAGE == 0


def test_pages_are_handed_out_side_by_side_and_come_back(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=6)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert (pool.num_used, pool.num_free) == (4, 2)
    pool.release(np.array([1, 2]))
    assert pool.num_used == 2
    assert sorted(pool.allocate(4)) == [1, 2, 4, 5]
    assert pool.allocate(0) == []
    pool.release(np.arange(6))


def test_frames_come_back_where_there_is_no_id(new_pool: NewPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "max_elsewhere", 1)
    pool = new_pool(num_pages=3)
    held = [pool.allocate_elsewhere(HOST, 0, 0) for _ in range(3)]
    for _ in range(4):
        with pytest.raises(OutOfPages, match="no more than 4 KV pages"):
            pool.allocate(2)
    assert pool.num_free == 3
    pool.release(np.array(held), HOST)


def test_references_are_counted_for_every_occurrence(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=3)
    (page,) = pool.allocate(1)
    pool.retain(np.array([page, page]))
    assert pool.num_references(page) == 3
    pool.release(np.array([page, page]))
    assert pool.num_used == 1
    pool.retain(np.array([page]))
    pool.release(np.array([page, page]))
    assert (pool.num_used, pool.num_free) == (0, 3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]  # it is on the free list once
    pool.release(np.arange(3))


def test_slots_are_claimed_once(new_pool: NewPool) -> None:
    pool = new_pool()
    (page,) = pool.allocate(1)
    assert pool.claim(page, 0, 2)
    assert not pool.claim(page, 0, 1)
    assert not pool.claim(page, 1, 3)
    assert pool.claim(page, 2, 3)
    pool.unclaim([page], 2)
    assert pool.claim(page, 2, 4)
    pool.release(np.array([page]))
    assert pool.allocate(1) == [page]
    assert pool.claim(page, 0, 1)  # the page is unused again
    pool.release(np.array([page]))


def test_running_out_takes_nothing_and_asks_for_reclaim_first(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=4)
    pages, asked = pool.allocate(3), []
    with pytest.raises(OutOfPages, match="2 more KV pages are needed and 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1

    def reclaim(count: int) -> None:
        asked.append(count)
        pool.release(np.array([pages.pop() for _ in range(min(count, len(pages)))]))

    pool.reclaim = reclaim
    assert len(pool.allocate(1)) == 1
    assert asked == []  # not while there are free pages
    assert len(pool.allocate(2)) == 2
    assert asked == [2]
    with pytest.raises(OutOfPages):
        pool.allocate(3)
    assert asked == [2, 3]
    pool.release(np.array([page for page in range(4) if pool.num_references(page)]))


def test_read_is_the_inverse_of_write(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=5)
    held = np.array(pool.allocate(5))
    pages, slots = np.array([4, 0, 0, 2]), np.array([3, 0, 2, 1])
    entries = np.random.default_rng(0).standard_normal((2, 2, 4, 2, 4), np.float32)
    pool.memory.write(0, pool.frames_of(pages), slots, entries)
    assert read_entries(pool, 0, pages, slots).dtype == entries.dtype
    assert np.array_equal(read_entries(pool, 0, pages, slots), entries)
    assert np.array_equal(pool.memory.storages[0][1, 0, 4, :, 3], entries[1, 0, 0])
    assert np.count_nonzero(pool.memory.storages[0]) == entries.size
    pool.release(held)


def filled_pool(pool: PagePool) -> list[int]:
    """The pool's first two pages, filled with random numbers."""
    pages = pool.allocate(2)
    pool.memory.storages[0][:, :, :2] = np.random.default_rng(0).standard_normal((2, 2, 2, 2, 4, 4))
    for page in pages:
        pool.claim(page, 0, 4)
    return pages


def test_a_page_is_copied_whole(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=4)
    pages = filled_pool(pool)
    pages += pool.allocate(1)
    pool.copy_page(pages[0], pages[2], 3)
    assert np.array_equal(pool.memory.storages[0][:, :, 2], pool.memory.storages[0][:, :, 0])
    assert not pool.memory.storages[0][:, :, 3].any()
    assert not pool.claim(pages[2], 0, 1)
    assert pool.claim(pages[2], 3, 4)  # after its value's entries
    pool.release(np.array(pages))


@pytest.mark.parametrize("tier", [POOL, HOST])
@pytest.mark.parametrize("elsewhere", [(), (0,), (1,), (0, 1)])
def test_pages_are_joined_at_a_slot_wherever_they_are(new_pool: NewPool, tier: str, elsewhere: tuple[int, ...]) -> None:
    pool = new_pool(num_pages=4)
    left, right = pages = filled_pool(pool)
    storage = pool.memory.storages[0].copy()
    assert spill(pool, np.array([pages[i] for i in elsewhere], np.int64)) == len(elsewhere)
    joined = join_pages(pool, left, right, 1, 3, tier)
    slots = np.arange(3)
    found = read_entries(pool, 0, np.full(3, joined), slots)
    assert np.array_equal(found[:, :, 0], storage[:, :, 0, :, 0])
    assert np.array_equal(found[:, :, 1:], storage[:, :, 1, :, 1:3].swapaxes(2, 3))
    assert pool.num_copies == len(elsewhere) + (tier == HOST)
    pool.release(np.array([joined]), tier)
    pool.release(np.array(pages))


def test_a_part_of_a_page_is_alone(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=2)
    page, other = filled_pool(pool)
    alone = np.frombuffer(
        masked_page(pool, 0, pool.memory.read_pages([page])[0], np.array([1, 2])), np.float32
    ).reshape(2, 2, 2, 4, 4)
    assert np.array_equal(alone[..., 1:3, :], pool.memory.storages[0][:, :, 0, :, 1:3])
    assert not alone[..., [0, 3], :].any()
    pool.release(np.array([page, other]))


def test_what_a_writer_holds_is_not_spilled(pool: PagePool) -> None:
    kv = prefill(pool, range(9))
    writer = KVWriter(kv[:6], "m")
    writer.append([1])
    assert spill(pool, np.arange(4)) == 2  # the page of entry 8, and the copied one
    assert pool.step_tables([writer.table])[0][:, :PAGE].tolist() == [[0, 4, 0], [0, 3, 4]]
    assert contents(kv) == contents(prefill(pool, range(9)))
    writer.close()
    assert spill(pool, np.arange(4)) == 1
    assert contents(kv) == contents(prefill(pool, range(9)))
    with pytest.raises(AssertionError, match="left the pool"):
        pool.step_tables([kv.table])


def test_check_counts_notices_every_kind_of_miscount(pool: PagePool) -> None:
    kv = prefill(pool, range(9))
    pages = kv.table[:, PAGE]
    check_counts(pool, [pages])
    for wrong in ([], [pages, pages], [pages[:-1]]):
        with pytest.raises(AssertionError):
            check_counts(pool, wrong)


def test_a_value_dropped_in_the_midst_of_a_release_frees_its_pages_once(new_pool: NewPool) -> None:
    """The garbage collector may run between any two lines; here another value is dropped at each line in turn."""
    parts = (
        Releases._settle,
        Releases._remove,
        Frames.vacate,
        ReferenceCounts.subtract,
        ReferenceCounts.free_unused_ids,
    )
    moments, releasing = 0, [part.__code__ for part in parts]
    while True:
        pool = new_pool(num_pages=8)
        kv = prefill(pool, range(20))
        held, moment = [kv[2:]], 0

        def trace(frame: FrameType, event: str, _: object, held: list[KVCache] = held, at: int = moments) -> Any:
            nonlocal moment
            if frame.f_code not in releasing:
                return trace if event == "call" else None
            if event == "line":
                moment += 1
                if moment == at + 1:
                    sys.settrace(None)
                    held.clear()
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            del kv
        finally:
            sys.settrace(previous)
        if held:
            held.clear()  # past the last line
            break
        assert (pool.num_used, pool.num_free) == (0, 8)
        assert len(set(pool.allocate(8))) == 8
        pool.release(np.arange(8))
        moments += 1
    assert moments >= 8


def test_room_is_made_a_few_pages_at_a_time(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has the lock in between."""
    monkeypatch.setattr(pool_module, "LOCKED_BYTES", 4 * pool.page_bytes)
    held = np.array(pool.allocate(pool.num_pages), np.int64)
    asked, between, waits = list[int](), list[int](), threading.Event()

    def reclaim(count: int) -> None:
        nonlocal held
        asked.append(count)
        pool.release(held[:count])
        held = held[count:]

    def other() -> None:
        waits.wait(60)
        with pool.lock:
            between.append(pool.num_free)

    def pause(_: float) -> None:
        waits.set()
        thread.join(60)

    thread = threading.Thread(target=other)
    thread.start()
    monkeypatch.setattr(pool_module.time, "sleep", pause)
    pool.reclaim = reclaim
    pool.make_room(10)
    assert (asked, between, pool.num_free) == ([4, 4, 2], [4], 10)
    pool.reclaim = None
    pool.release(held)
