"""Pages on a device of PyTorch's give and take the same entries as those on the host."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kv.values import GEOMETRY
from twostroke.backends.memory import HostMemory
from twostroke.backends.reference.memory import DeviceMemory

NUM_PAGES, PAGE_SIZE = 7, 4


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """To the bit, in type and in shape."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entries_are_the_same_as_on_the_host(dtype: str) -> None:
    geometry, random = replace(GEOMETRY, kv_dtype=dtype), np.random.default_rng(0)
    shape = (NUM_PAGES, geometry.num_layers, 2, geometry.num_kv_heads, PAGE_SIZE, geometry.head_dim)
    host, device = HostMemory(shape, geometry.dtype), DeviceMemory(shape, dtype, "cpu")
    written = np.zeros(NUM_PAGES * PAGE_SIZE, bool)
    for count in (1, 5, 0, 12, 28):
        places = random.permutation(NUM_PAGES * PAGE_SIZE)[:count]  # each once: of two writes either may be the last
        entries = random.standard_normal((geometry.num_layers, 2, count, geometry.num_kv_heads, geometry.head_dim))
        entries = entries.astype(geometry.dtype)
        for memory in (host, device):
            memory.write(places // PAGE_SIZE, places % PAGE_SIZE, entries)
            assert same(memory.read(places // PAGE_SIZE, places % PAGE_SIZE), entries)
        written[places] = True
        pages, slots = random.integers(0, NUM_PAGES, 50), random.integers(0, PAGE_SIZE, 50)  # some more than once
        assert same(device.read(pages, slots), host.read(pages, slots))
        assert (device.read(pages, slots).any((0, 1, 3, 4)) == written[pages * PAGE_SIZE + slots]).all()
        for layer in range(geometry.num_layers):
            assert same(device.read_keys(layer, pages, slots), host.read_keys(layer, pages, slots))
            assert same(device.read_keys(layer, pages, slots), host.read(pages, slots)[layer, 0])
    copy = device.read(pages, slots)
    copy[:] = 0
    assert same(device.read(pages, slots), host.read(pages, slots))
