"""A pool whose pages hold keys as [D, page_size] gives and takes the same entries as any other."""

import numpy as np
import torch

from tests.kv.values import GEOMETRY
from twostroke.kv.pool import PagePool


def test_entries_are_the_same_and_only_keys_lie_otherwise() -> None:
    pools = [PagePool(GEOMETRY, 4, page_size=4, transposed_keys=flag) for flag in (False, True)]
    pages, slots = np.array([2, 2, 0]), np.array([1, 3, 0])
    shape = (GEOMETRY.num_layers, 2, 3, GEOMETRY.num_kv_heads, GEOMETRY.head_dim)
    entries = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(pools[0].storage.dtype)
    for pool in pools:
        pool.write(pages, slots, entries)
        pool.copy_slots(2, 1, 1, 4)
        assert (pool.read(pages, slots) == entries).all()
        assert (pool.read(np.array([1, 1]), slots[:2]) == entries[:, :, :2]).all()
        assert not pool.read(np.array([1, 3]), np.array([0, 1])).any()
    plain, transposed = (pool.storage for pool in pools)
    assert (plain[:, 1] == transposed[:, 1]).all()
    keys = transposed[:, 0].reshape(*transposed[:, 0].shape[:3], GEOMETRY.head_dim, 4).transpose(-1, -2)
    assert (plain[:, 0] == keys).all()
