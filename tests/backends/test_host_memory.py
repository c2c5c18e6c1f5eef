"""A pool's memory is taken page by page as it is written, or at once."""

import mmap

import numpy as np
import pytest

from tests.kv.values import geometry
from tests.residence import resident
from twostroke.backends.page_memory import HostMemory

SHAPE, SIZE = geometry(2, 4, 128, "bfloat16").page_shape(64), 16 << 20  # of a page, and bytes of all


def test_all_of_it_is_there_and_what_it_held_stays() -> None:
    data = np.frombuffer(mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory = HostMemory(64, SHAPE, data=data)
    page = bytes(range(256)) * (memory.page_bytes // 256)
    memory.write_page(3, page)
    assert resident(data) < SIZE / 2
    if not memory.populate():
        pytest.skip("the system cannot")
    assert resident(data) == SIZE
    assert [bytes(view) == page for view in memory.read_pages([3])] == [True]
    assert not any(bytes(view).strip(b"\0") for view in memory.read_pages([0, 63]))


def test_less_than_a_page_of_the_system_is_left_alone() -> None:
    assert not HostMemory(1, geometry(1, 1, 2, "bfloat16").page_shape(2)).populate()
