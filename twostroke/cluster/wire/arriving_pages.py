"""Pages of a pool into which a value arrives, and reads of them from the sender's memory.

A read cannot be taken back. So the pages are nobody's until it has ended, also if nobody wants them any more.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.runtime import Runtime
from twostroke.cluster.wire.transport import PendingRead
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

AT_ONCE = 2  # reads that are under way
ALIVE_S = 0.2  # seconds of a read after which this side says that it is there

Arrived = Callable[[Sequence[int], Sequence[memoryview], Sequence[str]], None]  # with the fields of a `Read`


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


@dataclass(frozen=True)
class RemoteRead:
    """Pages that are being read: their numbers in the transfer, their memory, and the digests that they should have."""

    reading: PendingRead
    numbers: Sequence[int]
    views: Sequence[memoryview]
    digests: Sequence[str]


class RemoteReads:
    """The reads of one transfer, in order."""

    def __init__(self, runtime: Runtime, arrived: Arrived, alive: Callable[[], None]) -> None:
        """`arrived` is called with the pages of each read that has ended, while they are in a cache; `alive` now and
        then while one is waited for."""
        self._runtime, self._arrived, self._alive = runtime, arrived, alive
        self._under_way: deque[RemoteRead] = deque()

    def add(self, read: RemoteRead, left: Callable[[], float]) -> None:
        """A read that has begun. Waits if there are more than AT_ONCE; see `settle`."""
        self._under_way.append(read)
        self.settle(left, AT_ONCE - 1)

    def settle(self, left: Callable[[], float], most: int = 0) -> None:
        """Wait until at most so many reads are under way.

        Args:
            left: returns the seconds that the next of them may take, or raises if nobody wants it any more.

        Raises WireError: one has failed, or takes too long.
        """
        until = self._runtime.now() + left()
        while self._under_way:
            read, must = self._under_way[0], len(self._under_way) > most
            if read.reading.wait(ALIVE_S if must else 0.0):
                self._under_way.popleft()
                self._arrived(read.numbers, read.views, read.digests)
                until = self._runtime.now() + left()
            elif not must:
                return
            elif self._runtime.now() > until:
                raise WireError("the sender's memory does not answer")
            else:
                left()
                self._alive()

    def end(self, limit_s: float) -> bool:
        """Nobody wants them any more: wait until nothing is under way. Returns whether it is so within the limit."""
        until = self._runtime.now() + limit_s
        while self._under_way:
            try:
                if not self._under_way[0].reading.wait(max(0.0, until - self._runtime.now())):
                    return False
            except WireError as error:
                log.info("%s", error)
            self._under_way.popleft()
        return True
