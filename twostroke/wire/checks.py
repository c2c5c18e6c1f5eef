"""Digests of pages, made by other threads while bytes move: BLAKE3 does not hold Python's lock."""

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

from twostroke.kv.moves import Source
from twostroke.wire import form

NOTICE_S = 1.0  # seconds for the notification of pages whose writer says that they are written
MOST_PENDING = 4  # messages of pages that have come and are not checked yet

Arrived = Callable[[float], object]


def executor(name: str) -> ThreadPoolExecutor:
    """Threads that make digests; one core is left to who moves bytes."""
    return ThreadPoolExecutor(min(4, max(1, (os.cpu_count() or 1) - 1)), name)


class Ahead:
    """Digests of pages that are about to be sent, by their numbers in the transfer. A context manager: outside of it,
    no page is read any more."""

    def __init__(
        self, executor: ThreadPoolExecutor, first: int, pages: list[int], sources: list[Source], known: dict[int, str]
    ) -> None:
        """`first`: number of the first page. `known`: digests by page, which are not made again."""

        def made(some: slice) -> list[str]:
            for page, source in zip(pages[some], sources[some], strict=True):
                if page not in known:
                    known[page] = form.digest(source.data())
            return [known[page] for page in pages[some]]

        self._first, self._size = first, form.piece(sources)
        self._pieces = [executor.submit(made, some) for some in form.pieces(sources)]

    def __call__(self, numbers: Sequence[int]) -> list[str]:
        """Wait for digests of some of the pages. Raises PageLost."""
        places = [divmod(number - self._first, self._size) for number in numbers]
        return [self._pieces[piece].result()[index] for piece, index in places]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _stop(self._pieces)


class Checks:
    """Compares pages that have come with their digests, while others come. If a page comes again, that one counts."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._pending: deque[Future[set[int]]] = deque()
        self._by_page: dict[int, Future[set[int]]] = {}  # the page's last check, which returns the pages that are wrong

    def add(
        self, numbers: Sequence[int], views: Sequence[memoryview], digests: Sequence[str], arrived: Arrived
    ) -> None:
        """Check pages soon. `arrived` waits for bytes that may still be under way, if they are not there."""
        while len(self._pending) >= MOST_PENDING:
            wait([self._pending.popleft()])

        def wrong() -> set[int]:
            found = zip(numbers, views, digests, strict=True)
            return {number for number, view, digest in found if form.digest(view) != digest}

        def check() -> set[int]:
            if not wrong():
                arrived(0.0)
                return set()
            arrived(NOTICE_S)
            return wrong()

        self._pending.append(self._executor.submit(check))
        self._by_page |= dict.fromkeys(numbers, self._pending[-1])

    def settle(self) -> bool:
        """Wait for all checks. Returns whether every page is right."""
        return not any(number in check.result() for number, check in self._by_page.items())

    def close(self) -> None:
        """Nothing is read any more when it returns."""
        _stop(self._pending)


def _stop(jobs: Collection[Future[Any]]) -> None:
    for job in jobs:
        job.cancel()
    wait(jobs)
