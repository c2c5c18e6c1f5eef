"""Memory is reused once no reference is left, and not before."""

import threading

import numpy as np

from twostroke.system.scratch import MAX_KEPT_BYTES, ScratchMemory, address


def test_memory_comes_back_when_nobody_holds_it() -> None:
    room = ScratchMemory()
    first = room.array(3, 1000)
    view, place = first[1], address(first)
    assert view.base is first
    assert place % 64 == 0
    del first
    second = room.array(3, 1000)
    assert not np.shares_memory(second, view), "a view holds it"
    del view
    assert address(room.array(2, 500)) == place, "a smaller one fits"
    del second
    assert room.array(4, 1000).nbytes == 16000
    assert room.array(0, 7).shape == (0, 7)


def test_what_is_too_large_is_not_kept() -> None:
    room = ScratchMemory()
    room.array(MAX_KEPT_BYTES // 4 + 1)
    assert not room.free


def test_threads_get_memory_of_their_own() -> None:
    assert ScratchMemory().array(0).size == 0
    room, failures = ScratchMemory(), []

    def work(number: int) -> None:
        for _ in range(2000):
            mine = room.array(50)
            mine[:] = number
            if not (mine == number).all():
                failures.append(number)

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
