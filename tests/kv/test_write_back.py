"""Pages that wait to be written while they leave the index."""

from collections.abc import Callable

import pytest

from tests.kv.values import RECURRENT, contents, prefill
from twostroke.kv.host_budget import HostBudget
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.write_back import WriteBack, WriteBackBlock


def indexed(pool: PagePool) -> tuple[PrefixIndex, list[int], list[bytes]]:
    """An index with three pages that nobody else holds, the pages, and their bytes."""
    index = PrefixIndex(pool, "m")
    pages = index.insert(prefill(pool, range(12)))
    return index, pages, [bytes(page) for page in pool.memory.read_pages([pool.frame(page) for page in pages])]


def read(offers: WriteBack, waiting: list[WriteBackBlock]) -> list[bytes]:
    return [bytes(page) for page in offers.read(waiting)]


@pytest.mark.parametrize("host", [0, 1, 9])
def test_bytes_of_pages_that_have_left(pool: PagePool, host: int) -> None:
    """In the pool, in the host, or gone and used by others: the bytes are those that were offered."""
    index, pages, data = indexed(pool)
    index.host, offers = HostBudget(host * pool.page_bytes), WriteBack(index)
    waiting = offers.enqueue(pages)
    assert read(offers, waiting) == data
    for _ in range(3):
        index.evict(1)
        other = prefill(pool, range(40, 44))  # writes to the frame
        assert read(offers, waiting) == data
        assert contents(other)
        del other
    index.clear()
    assert read(offers, waiting) == data
    assert (pool.num_used, pool.num_held) == (0, 0)
    assert offers.slots.num_used == 3
    del waiting
    assert offers.slots.num_used == 0


def test_bytes_of_a_snapshot_that_has_left(new_pool: Callable[..., PagePool]) -> None:
    """Its parts have its states, and zeros behind them, whatever was in their pages before."""
    pool = new_pool(geometry=RECURRENT)
    for frame in range(pool.num_pages):
        pool.memory.write_page(frame, b"\1" * pool.page_bytes)
    index, kv = PrefixIndex(pool, "m"), prefill(pool, range(18))
    blocks, (snapshot,) = index.insert(kv), kv.entry_table.snapshots
    sizes = pool.geometry.state_pages(pool.page_size).used_bytes
    found = pool.memory.read_pages(pool.frames_of(snapshot.pages).tolist())
    data = [bytes(page[:size]).ljust(pool.block_bytes, b"\0") for page, size in zip(found, sizes, strict=True)]
    assert len(data) == pool.snapshot_pages
    offers = WriteBack(index)
    waiting = offers.enqueue_snapshot(blocks[snapshot.at // pool.page_size - 1])
    assert offers.enqueue_snapshot(blocks[0]) == []
    assert read(offers, waiting) == data
    del kv, found
    index.clear()
    assert (pool.num_used, read(offers, waiting)) == (0, data)


def test_who_does_not_wait_is_not_copied(pool: PagePool) -> None:
    index, pages, _ = indexed(pool)
    offers = WriteBack(index)
    offers.enqueue(pages)
    index.clear()
    assert offers.slots.num_used == 0


def test_copies_are_bounded(pool: PagePool) -> None:
    """What does not fit is lost, and with it all that follows."""
    index, pages, _ = indexed(pool)
    offers = WriteBack(index)
    offers.max_copies = 2
    waiting = offers.enqueue(pages)
    for _ in range(3):  # the deepest goes first
        index.evict(1)
    assert read(offers, waiting) == []
    assert offers.slots.num_used == 2
