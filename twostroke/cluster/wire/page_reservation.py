"""Pages of a pool into which a value arrives."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from twostroke.kv.pool import PagePool


class PageReservation:
    """Reserves pages, which nobody else sees until a value is made of them."""

    def __init__(self, pool: PagePool) -> None:
        self.pages: list[int] = []  # the reserved pages, by their numbers in the transfer
        self._pool = pool
        pool.pins.add(self)

    def ensure(self, count: int) -> None:
        """Reserve what is missing to so many pages. Raises OutOfPages: nothing has changed."""
        if (missing := count - len(self.pages)) > 0:
            self._pool.make_room(missing)
            self.pages += self._pool.allocate(missing, 0)  # their groups are known when all has come

    def frames(self, numbers: Sequence[int]) -> list[int]:
        """Where pages are in the pool's memory."""
        return [self._pool.frame(self.pages[number]) for number in numbers]

    @contextmanager
    def filling(self, numbers: Sequence[int]) -> Generator[list[memoryview]]:
        """The memory of pages, to be written."""
        memory = self._pool.memory
        with ExitStack() as views:
            yield [views.enter_context(memory.filling(frame)) for frame in self.frames(numbers)]

    def commit(self, numbers: Sequence[int], stops: Sequence[int]) -> np.ndarray:
        """The pages that a value needs, with their slots before `stops` claimed; the others are freed.

        The caller must release the pages returned.
        """
        kept = [self.pages[number] for number in numbers]
        for page, stop in zip(kept, stops, strict=True):
            self._pool.claim(page, 0, stop)
        needed = set(kept)
        self.pages = [page for page in self.pages if page not in needed]
        self.free()
        return np.array(kept, np.int64)

    def free(self) -> None:
        """Give back what is reserved. No byte may be under way."""
        pages, self.pages = self.pages, []
        for page in pages:  # frames are used again, and must not hold NaN
            self._pool.put(page, bytes(self._pool.page_bytes), 0)
        self._pool.pins.remove(self)
        self._pool.release(np.array(pages, np.int64))
