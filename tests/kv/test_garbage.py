"""Values in garbage reference cycles do not keep a pool full, and a pool that is full of live values costs no time."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kv.values import contents, make_pool, prefill
from twostroke.errors import OutOfPages
from twostroke.kv import garbage
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool
from twostroke.kv.tier_moves import spill
from twostroke.kv.writer import KVWriter

PAGES = 6  # of the pool; a value takes two


class Session:
    """An object that refers to itself."""

    def __init__(self, kv: KVCache) -> None:
        self.kv, self.me = kv, self


class Traceback:
    """An exception in a frame of its own traceback, which holds a value."""

    def __init__(self, kv: KVCache) -> None:
        kept: list[Exception] = []
        try:
            raise LookupError
        except LookupError as error:
            kept.append(error)


@pytest.fixture
def pool() -> Iterator[PagePool]:
    gc.disable()
    yield make_pool(PAGES)
    gc.enable()


@contextmanager
def collections() -> Generator[list[str]]:
    """The full collections that run meanwhile."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def value(pool: PagePool, first: int = 0) -> KVCache:
    return prefill(pool, range(first, first + 8))


@pytest.mark.parametrize("kind", [Session, Traceback])
def test_cycles_are_collected_when_the_pool_is_full(pool: PagePool, kind: Callable[[KVCache], Any]) -> None:
    """One collection each time that the pool is full, and none before."""
    with collections() as seen:
        for i in range(10 * PAGES):
            kind(value(pool, i))
    assert len(seen) == (10 * PAGES - 1) // (PAGES // 2)


def test_what_is_dropped_after_an_error_is_found_at_once(pool: PagePool, tmp_path: Path) -> None:
    """Though the last collection, a moment ago, found nothing."""
    kept = [Session(value(pool, i)) for i in range(PAGES // 2)]
    saved = tmp_path / "kv"
    kept[0].kv.save(saved)
    other = make_pool(PAGES)
    copied, away = value(other, 9), kept[0].kv.to("host")
    bits = contents(copied), contents(away)
    for again in (lambda: copied.copy_to(pool), lambda: KVCache.load(saved, holder(pool)), lambda: away.to("pool")):
        with pytest.raises(OutOfPages):
            again()
        kept.clear()
        made = again()
        assert contents(made) in bits
        del made
        kept += [Session(value(pool, i)) for i in range(PAGES // 2)]


def holder(pool: PagePool) -> Any:
    class Holder:
        pass

    found: Any = Holder()
    found.pool = pool
    return found


def test_a_pool_that_writers_fill_is_not_collected_for(pool: PagePool) -> None:
    """Which is what a full pool under load is."""
    writers = [KVWriter(KVCache.empty(pool), "m") for _ in range(PAGES)]
    for writer in writers:
        writer.append([1, 2, 3, 4])
    with collections() as seen:
        for writer in writers:
            with pytest.raises(OutOfPages):
                writer.append([5])
    assert not seen
    for writer in writers:
        writer.close()


def test_collections_that_find_nothing_are_rare(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values that are held, one may run after some time, and not for each page that is wanted."""
    monkeypatch.setattr(garbage.time, "monotonic", lambda: clock[0])
    held, clock = [value(pool, i) for i in range(PAGES // 2)], [0.0]
    takes_50_ms: Callable[..., None] = lambda *_: clock.__setitem__(0, clock[0] + 0.05)  # noqa: E731
    monkeypatch.setattr(garbage.gc, "collect", takes_50_ms)
    for _ in range(10_000):
        clock[0] += 0.001
        with pytest.raises(OutOfPages):
            pool.allocate(1)
    assert clock[0] - 10 == pytest.approx(0.5)  # of 10 s: each 50 ms is followed by 1 s without
    assert len(held) == PAGES // 2


def test_a_finalizer_that_allocates_does_not_collect_again(pool: PagePool) -> None:
    class Greedy(Session):
        def __del__(self) -> None:
            with pytest.raises(OutOfPages):
                pool.allocate(PAGES + 1)

    Greedy(value(pool))
    kept = [value(pool, i) for i in range(PAGES // 2 - 1)]
    with collections() as seen:
        made = value(pool, 5)
    assert (len(seen), len(made), len(kept)) == (1, 8, PAGES // 2 - 1)


def test_pages_that_are_arriving_are_nobodys_garbage(pool: PagePool) -> None:
    kv = value(pool)
    assert spill(pool, np.arange(2)) == 2
    arrival = kv.swap_in()
    with collections() as seen, pytest.raises(OutOfPages):
        pool.allocate(PAGES)
    assert not seen
    arrival.close()
