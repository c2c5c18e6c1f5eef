"""Ctrl-C at every moment of an operation on values: no page stays that nobody has."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from tests.kv.counts import check_counts
from tests.kv.values import geometry, make_pool, prefill
from tests.moments import at_each_moment
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool


class Given(NamedTuple):
    """What operations take. A value that is dropped in one would lose its own pages: Python runs its finalizer."""

    kv: KVCache
    left: KVCache
    right: KVCache  # from another value than `left`, with the seam within a page
    away: KVCache
    file: Path
    other: PagePool
    halved: PagePool  # of another dtype


ENTRIES = np.zeros((2, 2, 3, 4), np.float32)
OPERATIONS: dict[str, Callable[[Given], KVCache]] = {
    "+": lambda given: given.left + given.right,
    "at": lambda given: given.kv.at(20),
    "gather": lambda given: given.kv.gather(np.tile(np.array([0, 2, 5]), (2, 2, 1))),
    "to": lambda given: given.kv.to("host"),
    "to the pool": lambda given: given.away.to("pool"),
    "copy_to": lambda given: given.kv.copy_to(given.other),
    "to_dtype": lambda given: given.kv.to_dtype(cast(Any, SimpleNamespace(pool=given.halved))),
    "load": lambda given: KVCache.load(given.file, given.kv),
    "of_entries": lambda given: KVCache.of_entries(given.kv, ENTRIES, ENTRIES, range(3)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where it ends a generator
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_keep_no_page_that_nobody_has(operation: str, tmp_path: Path) -> None:
    kv, made = prefill(make_pool(), range(10)), list[KVCache]()
    pools = make_pool(), make_pool(geometry=geometry(kv_dtype="float16"))
    left = kv[:6]
    given = Given(kv, left, prefill(left, [9, 8])[6:], kv.to("host"), tmp_path / "value", *pools)
    kv.save(given.file)

    def check() -> None:
        made.clear()
        gc.collect()
        held = [one.entry_table.pages for one in (kv, left, given.right)]
        check_counts(kv.pool, held, {"host": [given.away.entry_table.pages]})
        for pool in pools:
            check_counts(pool, [])

    assert at_each_moment(lambda: made.append(OPERATIONS[operation](given)), check) > 20
