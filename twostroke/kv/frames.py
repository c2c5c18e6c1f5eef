"""Frames: the places of pages in the pool's memory, where kernels read them."""

from collections.abc import Iterable
from functools import cache

import numpy as np

from twostroke.kv.pages import NOWHERE


class Frames:
    """Which frames are free, which are reserved, and where each page is. The pool's lock guards every change."""

    def __init__(self, num_frames: int, max_ids: int) -> None:
        self.of_page = np.zeros(max_ids, np.int32)  # [ids] int32, the frame of each page, or NOWHERE
        self.reserved: set[int] = set()  # frames that wait for the contents of pages on their way into the pool
        self.free = [*_countdown(num_frames)]  # those that hold no page and are not reserved

    def absent(self, pages: np.ndarray) -> np.ndarray:
        """Whether each page has no frame, [n] bool."""
        return self.of_page[pages] == NOWHERE

    def take(self, count: int) -> list[int]:
        """Take free frames, of which there must be as many."""
        return [self.free.pop() for _ in range(count)]

    def give_back(self, frames: Iterable[int]) -> None:
        """Free frames that hold no page. Atomic, so a finalizer may do it without the lock."""
        self.free.extend(frames)

    def vacate(self, pages: np.ndarray) -> None:
        """Free the frames of distinct pages that have one."""
        frames = self.of_page[pages]
        self.of_page[pages] = NOWHERE
        self.free.extend(frames[::-1].tolist())

    def fill(self, page: int, frame: int) -> None:
        """Let a page be found in a reserved frame, which is freed if the page has another one by now."""
        self.reserved.discard(frame)
        if self.of_page[page] == NOWHERE:
            self.of_page[page] = frame
        else:
            self.free.append(frame)

    def cancel(self, frames: list[int]) -> None:
        """Free reserved frames. A finalizer may do it without the lock."""
        self.reserved.difference_update(frames)
        self.give_back(frames)


@cache
def _countdown(count: int) -> tuple[int, ...]:
    """count - 1, ..., 0: numbers that the free lists of a thousand simulated pools share."""
    return tuple(range(count - 1, -1, -1))
