"""Pages come back in three phases, and nobody waits for them or sees them half loaded."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.kv.tiers.memory_store import MemoryStore
from tests.kv.values import contents, prefill
from twostroke.backends.interface import PAGE
from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool
from twostroke.kv.tier_moves import spill
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.writer import KVWriter

NewPool = Callable[..., PagePool]
TIERS = ["host", "disk", "remote"]
HANG_S = 60


class Hanging:
    """A store's reads hang until `go`."""

    def __init__(self, pool: PagePool, tier: str = "disk", what: str = "fetch") -> None:
        self.began, self.go, self.what = threading.Event(), threading.Event(), what
        store = pool.stores[tier]
        assert isinstance(store, MemoryStore)
        store.before = self._before

    def _before(self, what: str) -> None:
        if what == self.what:
            self.began.set()
            assert self.go.wait(HANG_S)


@pytest.mark.parametrize("tier", TIERS)
def test_three_phases(pool: PagePool, tier: str) -> None:
    kv = prefill(pool, range(10))
    away, bits, held = kv.to(tier), contents(kv), kv[:4]
    del kv
    arrival = away.swap_in()
    assert (arrival.missing, pool.num_used, pool.num_arriving) == ({tier: 2}, 3, 2)
    with pytest.raises(KVError, match="not arrived"):
        arrival.publish()
    arrival.load()
    assert [pool.frame(page) >= 0 for page in away.table[:, PAGE]] == [True, False, False]
    arrival.publish()
    assert (pool.num_used, pool.num_arriving) == (3, 0)
    assert spill(pool, away.table[:, PAGE]) == 0  # it is pinned
    del away
    back = held + prefill(pool, [9])[:0]
    arrival.close()
    arrival.close()
    assert (pool.num_used, contents(back)) == (1, bits[:4])


def test_what_is_there_has_arrived(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    with kv.swap_in() as arrival:
        assert arrival.missing == {}
        arrival.publish()
        assert pool.num_used == 3


def test_spilled_pages_arrive_and_leave_the_host(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    bits = contents(kv)
    assert spill(pool, kv.table[:, PAGE]) == 3
    with kv.swap_in() as arrival:
        assert (arrival.missing, pool.num_copies) == ({"host": 3}, 3)
        arrival.load()
        arrival.publish()
        assert (pool.num_copies, pool.num_used) == (0, 3)
    assert contents(kv) == bits


def test_no_room_for_an_arrival(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=3)
    away = prefill(pool, range(10)).to("disk")
    held = prefill(pool, [1])
    with pytest.raises(OutOfPages, match="3 more KV pages are needed and 2 of 3 are free"):
        away.swap_in()
    assert (pool.num_used, pool.num_arriving, pool.num_references(int(held.table[0, PAGE]))) == (1, 0, 1)


@pytest.mark.parametrize("first", ["one", "other"])
def test_of_two_arrivals_the_later_gives_its_frames_back(pool: PagePool, first: str) -> None:
    away = prefill(pool, range(10)).to("disk")
    arrivals = {"one": away.swap_in(), "other": away.swap_in()}
    assert pool.num_arriving == 6
    order = [arrivals.pop(first), *arrivals.values()]
    for arrival in order:
        arrival.load()
    order[0].publish()
    frames = pool.frames.of_page[away.table[:, PAGE]].tolist()
    order[1].publish()
    assert pool.frames.of_page[away.table[:, PAGE]].tolist() == frames
    assert (pool.num_used, pool.num_arriving) == (3, 0)
    for arrival in order:
        arrival.close()
    assert pool.num_used == 0


def test_given_up_in_the_midst_of_a_read(pool: PagePool) -> None:
    """The frames are kept until the read has returned: a late write reaches nobody."""
    away = prefill(pool, range(10)).to("disk")
    hanging, arrival = Hanging(pool), away.swap_in()
    with ThreadPoolExecutor(1) as thread:
        load = thread.submit(arrival.load)
        assert hanging.began.wait(HANG_S)
        arrival.close()
        assert (pool.num_used, pool.num_arriving) == (3, 3)
        with pytest.raises(KVError):
            arrival.publish()
        others = prefill(pool, range(4 * 57))  # all other frames
        bits = contents(others)
        with pytest.raises(OutOfPages):
            pool.allocate(1)
        hanging.go.set()
        load.result(HANG_S)
    assert (pool.num_used, pool.num_arriving) == (57, 0)
    assert contents(others) == bits


@pytest.mark.parametrize("loaded", [False, True])
def test_an_arrival_that_nobody_closed(pool: PagePool, loaded: bool) -> None:
    away = prefill(pool, range(10)).to("disk")
    arrival = away.swap_in()
    if loaded:
        arrival.load()
    del arrival
    assert (pool.num_used, pool.num_arriving, pool.num_held) == (0, 0, 3)


def test_frames_of_a_failed_read_hold_no_nan(pool: PagePool) -> None:
    away = prefill(pool, range(10)).to("disk")
    store = pool.stores["disk"]
    assert isinstance(store, MemoryStore)

    def spoil(namespace: Namespace, name: PageName, into: memoryview) -> None:
        into[:] = b"\xff" * len(into)
        raise PageLost("damaged")

    store.fetch = spoil
    with pytest.raises(PageLost, match="damaged"):
        away.to("pool")
    assert (pool.num_used, pool.num_arriving) == (0, 0)
    assert np.isfinite(pool.memory.storages[0]).all()


@pytest.mark.parametrize("what", ["keep", "fetch"])
def test_others_go_on_while_a_store_hangs(pool: PagePool, what: str) -> None:
    """Values are made, cut, moved, written and dropped in other threads."""
    kv = prefill(pool, range(10))
    bits, source = contents(kv), kv.to("disk") if what == "fetch" else kv
    del kv
    hanging = Hanging(pool, what=what)
    with ThreadPoolExecutor(1) as thread:
        moving = thread.submit(source.to, "pool" if what == "fetch" else "disk")
        assert hanging.began.wait(HANG_S)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(work, pool).result(HANG_S) == contents(prefill(pool, range(7)))
            if what == "keep":
                longer = another.submit(prefill, source, [10, 11]).result(HANG_S)
                assert contents(longer)[:10] == bits
            assert another.submit(spill, pool, np.arange(pool.num_held)).result(HANG_S) >= 0
        hanging.go.set()
        moved = moving.result(HANG_S)
    assert contents(moved) == bits


def work(pool: PagePool) -> list[bytes]:
    kv = prefill(pool, range(7))
    host = kv[:2].to("host") + kv[2:]
    return contents(prefill(host[:5], [5, 6]))


def test_a_value_dropped_while_it_is_written(pool: PagePool) -> None:
    kv = prefill(pool, range(10))
    hanging = Hanging(pool, what="keep")
    with ThreadPoolExecutor(1) as thread:
        moving = thread.submit(kv[2:].to, "disk")
        assert hanging.began.wait(HANG_S)
        bits = contents(kv)[2:]
        del kv
        hanging.go.set()
        moved = moving.result(HANG_S)
        del moving
    assert contents(moved) == bits
    assert (pool.num_used, pool.num_in("disk")) == (0, 3)


def test_many_threads_move_what_they_share(new_pool: NewPool) -> None:
    """Whatever others do with the same pages, everybody finds the bits of a value."""
    pool = new_pool(num_pages=400)
    base = prefill(pool, range(14))
    bits = contents(base)
    tiers = [*TIERS, "pool"]
    start = threading.Barrier(6)

    def move(i: int) -> None:
        random = np.random.default_rng(i)
        kv: KVCache = base
        start.wait(HANG_S)
        for _ in range(60):
            match int(random.integers(6)):
                case 0 | 1 | 2:
                    kv = kv.to(tiers[random.integers(4)])
                case 3:
                    a = int(random.integers(14))
                    kv = kv[:a] + kv[a:].to(tiers[random.integers(4)])
                case 4:
                    spill(pool, np.arange(12))
                case _:
                    writer = KVWriter(kv[: int(random.integers(1, 15))], "m")
                    longer = writer.freeze()
                    writer.close()
                    assert contents(longer) == bits[: len(longer)]
            assert contents(kv) == bits

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(move, range(6), timeout=120))
    assert contents(base) == bits


def test_a_page_written_behind_while_it_is_spilled_stays(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer opens, enters and closes between the copy and the books: the copy has not all of the page."""
    values = [prefill(pool, range(6))]
    pages, read = values[0].table[:, PAGE], pool.memory.read_pages

    def reads(frames: list[int]) -> list[memoryview]:
        data = [memoryview(bytes(page)) for page in read(frames)]
        if frames == [pool.frame(int(pages[1]))] and len(values) == 1:
            values.append(prefill(values[0], [6]))
        return data

    with monkeypatch.context() as patch:
        patch.setattr(pool.memory, "read_pages", reads)
        assert spill(pool, pages) == 1
    assert pool.frame(int(pages[1])) >= 0
    assert contents(values[1]) == contents(prefill(pool, range(7)))
    values.clear()
