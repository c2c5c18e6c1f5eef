"""Pools that must be empty again at the end of the test, without help from the garbage collector."""

import gc
from collections.abc import Callable, Iterator

import pytest

from tests.kv.values import GEOMETRY, make_pool
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool


@pytest.fixture
def new_pool() -> Iterator[Callable[..., PagePool]]:
    pools: list[PagePool] = []

    def make(num_pages: int = 60, page_size: int = 4, geometry: Geometry = GEOMETRY) -> PagePool:
        pools.append(make_pool(num_pages, page_size, geometry))
        return pools[-1]

    gc.disable()
    yield make
    gc.enable()
    assert [pool.num_used for pool in pools] == [0] * len(pools)


@pytest.fixture
def pool(new_pool: Callable[..., PagePool]) -> PagePool:
    return new_pool()
