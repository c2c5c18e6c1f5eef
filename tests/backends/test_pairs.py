"""A pool with K and V in pairs returns and accepts the same entries as any other."""

import numpy as np

from tests.kv.values import make_pool
from twostroke.kv.page_contents import read_entries, read_keys


def test_entries_are_the_same_and_lie_otherwise() -> None:
    pools = [make_pool(4, in_pairs=flag) for flag in (False, True)]
    assert [pool.memory.layout for pool in pools] == ["plain", "pairs"]
    pages, slots = np.array([2, 2, 0]), np.array([1, 3, 0])
    shape = (2, 2, 3, 2, 4)
    entries = np.random.default_rng(0).standard_normal(shape).astype(pools[0].memory.storages[0].dtype)
    for pool in pools:
        assert pool.allocate(4) == [0, 1, 2, 3]
        pool.memory.write(0, pool.frames_of(pages), slots, entries)
        pool.copy_page(2, 1, 4)
        assert (read_entries(pool, 0, pages, slots) == entries).all()
        assert read_entries(pool, 0, pages[:0], slots[:0]).shape == (*shape[:2], 0, *shape[3:])
        assert (read_entries(pool, 0, np.array([1, 1]), slots[:2]) == entries[:, :, :2]).all()
        assert (read_keys(pool, 0, 1, pages, slots) == entries[1, 0]).all()
        assert not read_entries(pool, 0, np.array([1, 3]), np.array([0, 1])).any()
    (plain_keys, plain_values), (keys, values) = (np.moveaxis(pool.memory.storages[0], 1, 0) for pool in pools)
    dim = 4
    columns = keys.reshape(*keys.shape[:3], dim // 2, 4, 2).swapaxes(-3, -2).reshape(plain_keys.shape)
    assert (columns == plain_keys).all()
    two_slots = values.reshape(*values.shape[:3], 2, dim, 2).swapaxes(-2, -1).reshape(plain_values.shape)
    assert (two_slots == plain_values).all()
