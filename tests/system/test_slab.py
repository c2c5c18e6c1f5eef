"""Slots of memory, which goes back to the system."""

import numpy as np
import pytest

from tests.residence import resident
from twostroke.system.slab import CHUNK, SlabAllocator


@pytest.mark.parametrize("size", [1, 4096, 5000, 368_640, CHUNK + 1])
def test_slots_do_not_overlap(size: int) -> None:
    slots = SlabAllocator(size)
    taken = [slots.allocate() for _ in range(3)]
    for i, slot in enumerate(taken):
        slots.view(slot)[:] = i + 1
    assert [set(slots.view(slot).tolist()[:: max(1, size // 100)]) for slot in taken] == [{1}, {2}, {3}]
    assert slots.num_used == len(set(taken)) == 3
    slots.free(taken[1])
    assert slots.num_used == 2
    assert slots.allocate() == taken[1]


def test_memory_is_that_of_the_slots_in_use() -> None:
    """However slots are taken and given back."""
    size, random = 368_640, np.random.default_rng(0)
    slots, held, known = SlabAllocator(size), list[int](), set[int]()
    for _ in range(3):
        while slots.num_used < 300:
            held.append(slots.allocate())
            slots.view(held[-1])[:] = 1
        known.update(held)
        assert sum(resident(slots.view(slot)) for slot in known) == 300 * size
        random.shuffle(held)
        while slots.num_used > 30:
            slots.free(held.pop())
        assert sum(resident(slots.view(slot)) for slot in known) == 30 * size


def test_without_memory() -> None:
    slots = SlabAllocator(1 << 60)
    with pytest.raises(MemoryError, match="no memory for"):
        slots.allocate()
    assert slots.num_used == 0
