"""A check that a pool counts exactly the pages that are held."""

from collections.abc import Iterable, Mapping

import numpy as np

from twostroke.kv.pages import HOST, NOWHERE, POOL, TIERS
from twostroke.kv.pool import PagePool


def check_counts(
    pool: PagePool, holders: Iterable[np.ndarray], elsewhere: Mapping[str, Iterable[np.ndarray]] | None = None
) -> None:
    """Raise AssertionError unless the pool counts exactly the references of `holders` and those of other tiers.

    No arrival may be open.
    """
    ids = pool.references.num_ids
    expected = {tier: np.zeros(ids, np.int64) for tier in TIERS}
    for tier, tables in {POOL: holders, **(elsewhere or {})}.items():
        for pages in tables:
            np.add.at(expected[tier], pages, 1)
        wrong = np.flatnonzero(pool.references.of_tier(tier)[:ids] != expected[tier])
        assert not len(wrong), f"pages {wrong.tolist()} are miscounted in the tier {tier}"
    live, frames = sum(expected.values()) > 0, pool.frames.of_page[:ids]
    assert pool.num_held == np.count_nonzero(live)
    spilled = (expected[POOL] > 0) & (frames == NOWHERE)
    for tier in TIERS[1:]:
        needed = (expected[tier] > 0) | (spilled & (tier == HOST))
        assert set(pool.copies.in_tier(tier)) == set(np.flatnonzero(needed).tolist()), f"copies in the tier {tier}"
    assert pool.copies.num_host_slots == pool.num_copies
    here = frames[(expected[POOL] > 0) & (frames != NOWHERE)]
    assert len(set(here.tolist())) == len(here) == pool.num_used
    assert sorted([*here.tolist(), *pool.frames.free]) == list(range(pool.num_pages))
    assert pool.num_arriving == 0
