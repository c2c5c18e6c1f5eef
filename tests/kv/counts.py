"""A check that a pool counts exactly the pages that are held."""

from collections.abc import Iterable

import numpy as np

from twostroke.kv.pages import HOST, NOWHERE, POOL
from twostroke.kv.pool import PagePool


def check_counts(pool: PagePool, holders: Iterable[np.ndarray], in_host: Iterable[np.ndarray] = ()) -> None:
    """Raise AssertionError unless the pool counts exactly the references of `holders` and `in_host`."""
    ids = pool._num_ids
    expected = {POOL: np.zeros(ids, np.int64), HOST: np.zeros(ids, np.int64)}
    for tier, held in ((POOL, holders), (HOST, in_host)):
        for pages in held:
            np.add.at(expected[tier], pages, 1)
        wrong = np.flatnonzero(pool._references[tier][:ids] != expected[tier])
        assert not len(wrong), f"pages {wrong.tolist()} are miscounted in the {tier}"
    live, frames = expected[POOL] + expected[HOST] > 0, pool._frames[:ids]
    assert pool.num_held == np.count_nonzero(live)
    assert set(pool._copies[HOST]) >= set(np.flatnonzero(expected[HOST]).tolist())
    assert set(pool._copies[HOST]) == set(np.flatnonzero((expected[HOST] > 0) | (live & (frames == NOWHERE))).tolist())
    here = frames[(expected[POOL] > 0) & (frames != NOWHERE)]
    assert len(set(here.tolist())) == len(here) == pool.num_used
    assert sorted([*here.tolist(), *pool._free]) == list(range(pool.num_pages))
