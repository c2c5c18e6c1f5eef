"""Pools with stores, all of which must be empty at the end of the test, without the garbage collector."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kv.tiers.faults import kept
from tests.kv.tiers.memory_store import MemoryStore
from tests.kv.values import GEOMETRY, make_pool
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool


@pytest.fixture(autouse=True, scope="module")
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate home, so that no test makes a key in this user's."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_HOME", str(home))
        yield home


@pytest.fixture
def new_pool() -> Iterator[Callable[..., PagePool]]:
    pools: list[PagePool] = []

    def make(num_pages: int = 60, page_size: int = 4, geometry: Geometry = GEOMETRY) -> PagePool:
        pool = make_pool(num_pages, page_size, geometry)
        pool.stores = {tier: MemoryStore(tier) for tier in ("disk", "remote")}
        pools.append(pool)
        return pool

    gc.disable()
    yield make
    gc.enable()
    assert [(pool.num_used, pool.num_held, pool.num_copies) for pool in pools] == [(0, 0, 0)] * len(pools)
    for pool in pools:
        assert (pool.copies.num_host_slots, pool.num_arriving, kept(pool, "disk"), kept(pool, "remote")) == (0, 0, 0, 0)


@pytest.fixture
def pool(new_pool: Callable[..., PagePool]) -> PagePool:
    return new_pool()
