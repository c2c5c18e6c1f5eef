"""Pages on a PyTorch device return and accept the same bytes and entries as those on the host."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kv.values import GEOMETRY
from twostroke.backends.page_memory import HostMemory
from twostroke.backends.reference.memory import DeviceMemory

NUM_PAGES, PAGE_SIZE = 7, 4
DTYPES = ["float32", "bfloat16", "int8", "k8v4"]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Bitwise equality, with the same dtype and shape."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_the_same_as_on_the_host(dtype: str) -> None:
    geometry, random = replace(GEOMETRY, kv_dtype=dtype), np.random.default_rng(0)
    shape, stored = geometry.page_shape(PAGE_SIZE), geometry.stored
    layers, _, heads, _, _ = shape.of(0)
    host, device = HostMemory(NUM_PAGES, shape), DeviceMemory(NUM_PAGES, shape, "cpu")
    written = np.zeros(NUM_PAGES * PAGE_SIZE, bool)
    for count in (1, 5, 0, 12, 28):
        places = random.permutation(NUM_PAGES * PAGE_SIZE)[:count]  # distinct: the order of two writes is not defined
        entries = stored.encode(random.standard_normal((layers, 2, count, heads, geometry.groups[0].head_dim)))
        for memory in (host, device):
            memory.write(0, places // PAGE_SIZE, places % PAGE_SIZE, entries)
            assert same(memory.read(0, places // PAGE_SIZE, places % PAGE_SIZE), entries)
        written[places] = True
        pages, slots = random.integers(0, NUM_PAGES, 50), random.integers(0, PAGE_SIZE, 50)  # some more than once
        assert same(device.read(0, pages, slots), host.read(0, pages, slots))
        assert (device.read(0, pages, slots).any((0, 1, 3, 4)) == written[pages * PAGE_SIZE + slots]).all()
        for layer in range(layers):
            assert same(device.read_keys(0, layer, pages, slots), host.read_keys(0, layer, pages, slots))
            assert same(device.read_keys(0, layer, pages, slots), stored.sides(host.read(0, pages, slots))[0][layer])
    copy = device.read(0, pages, slots)
    copy[:] = 0
    assert same(device.read(0, pages, slots), host.read(0, pages, slots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_move_as_bytes(dtype: str) -> None:
    geometry, random = replace(GEOMETRY, kv_dtype=dtype), np.random.default_rng(0)
    made, dtype_of = geometry.page_shape(PAGE_SIZE), geometry.stored.dtype
    shape = NUM_PAGES, *made.of(0)
    memories = HostMemory(NUM_PAGES, made), DeviceMemory(NUM_PAGES, made, "cpu")
    pages, slots = np.divmod(np.arange(NUM_PAGES * PAGE_SIZE), PAGE_SIZE)
    for memory in memories:
        assert (memory.layout, memory.page_bytes) == ("plain", geometry.entry_bytes * PAGE_SIZE)
        data = [random.integers(0, 100, shape[1:]).astype(dtype_of) for _ in range(3)]
        for frame, page in zip((5, 2), data, strict=False):
            memory.write_page(frame, memoryview(page.tobytes()))
        with memory.filling(6) as view:
            assert len(view) == memory.page_bytes
            view[:] = memoryview(data[2].tobytes())
        memory.copy_page(5, 0)
        read = memory.read_pages([6, 5, 0, 2])
        assert [bytes(view) for view in read] == [data[i].tobytes() for i in (2, 0, 0, 1)]
        assert all(view.readonly for view in read)
        expected = np.zeros(shape, dtype_of)
        expected[[5, 2, 6, 0]] = np.stack([*data, data[0]])
        entries = expected.transpose(1, 2, 0, 4, 3, 5).reshape(*shape[1:3], -1, shape[3], shape[5])
        assert same(memory.read(0, pages, slots), np.ascontiguousarray(entries))


def test_the_bytes_of_a_host_page_are_its_memory() -> None:
    memory = HostMemory(3, GEOMETRY.page_shape(PAGE_SIZE))
    (view,) = memory.read_pages([1])
    with memory.filling(1) as page:
        page[:] = b"\1" * memory.page_bytes
    assert bytes(view) == b"\1" * memory.page_bytes
    assert np.shares_memory(np.frombuffer(view, np.uint8), memory.storages[0])
