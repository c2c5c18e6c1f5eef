"""Pages of a pool into which a value arrives."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from secrets import token_hex

import numpy as np

from twostroke.kv import spans
from twostroke.kv.pool import PagePool


class Landing:
    """Reserves pages, which nobody else sees until a value is made of them.

    Attributes:
        generation: names this landing, and no other ever.
        pages: the reserved pages, by their numbers in the transfer.
    """

    def __init__(self, pool: PagePool) -> None:
        self.generation = token_hex(8)
        self.pages: list[int] = []
        self._pool = pool
        pool.pin(self)

    @property
    def table(self) -> np.ndarray:
        """The pages as a pinned holder has them."""
        return spans.of_pages(np.array(self.pages, np.int64))

    def reserve(self, count: int) -> list[int]:
        """Reserve pages, and return their frames. Raises OutOfPages: nothing has changed."""
        self._pool.make_room(count)
        pages = self._pool.allocate(count)
        self.pages += pages
        return [self._pool.frame(page) for page in pages]

    @contextmanager
    def filling(self, numbers: Sequence[int]) -> Generator[list[memoryview]]:
        """The memory of pages, to be written."""
        memory = self._pool.memory
        with ExitStack() as views:
            frames = [self._pool.frame(self.pages[number]) for number in numbers]
            yield [views.enter_context(memory.filling(frame)) for frame in frames]

    def keep(self, numbers: Sequence[int], stops: Sequence[int]) -> np.ndarray:
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
        self._pool.unpin(self)
        self._pool.release(np.array(pages, np.int64))
