"""A pool's memory is taken page by page as it is written, or at once."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from twostroke.backends.memory import HostMemory

SHAPE = (64, 2, 2, 4, 64, 128)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_all_of_it_is_there_and_what_it_held_stays() -> None:
    memory = HostMemory(SHAPE, np.dtype(np.uint16))
    page = bytes(range(256)) * (memory.page_bytes // 256)
    memory.write_page(3, page)
    before, size = resident(), SHAPE[0] * memory.page_bytes
    if not memory.populate():
        pytest.skip("the system cannot")
    assert resident() - before > 0.8 * size
    assert [bytes(view) == page for view in memory.read_pages([3])] == [True]
    assert not any(bytes(view).strip(b"\0") for view in memory.read_pages([0, 63]))


def test_less_than_a_page_of_the_system_is_left_alone() -> None:
    assert not HostMemory((1, 1, 2, 1, 2, 2), np.dtype(np.uint16)).populate()
