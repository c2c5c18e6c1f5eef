"""Checksums of pages, made and compared piece by piece while bytes move."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self, TypeVar

from twostroke.cluster.wire import checksum, value_format
from twostroke.cluster.wire.checksum import Kind
from twostroke.errors import TwostrokeError
from twostroke.kv.page_contents import PageSource
from twostroke.system.limits import usable_cores

MAX_THREADS = 4
MAX_PENDING = 4  # messages of pages that have come and are not checked yet

T = TypeVar("T")


class DigestThreads:
    """Who makes digests: other threads where there are cores for them, else the thread that moves the bytes.

    On two cores, sender and receiver take one each, and a piece is digested while it is in the core's cache.
    """

    def __init__(self, name: str, cores: int | None = None) -> None:
        count = min(MAX_THREADS, (usable_cores() if cores is None else cores) - 2)
        self._executor = ThreadPoolExecutor(count, name) if count > 0 else None
        self.ahead = max(0, count)  # number of pieces that are worth beginning before they are needed

    def submit(self, job: Callable[..., T], *given: Any) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(job, *given)
        done = Future[T]()
        try:
            done.set_result(job(*given))
        except TwostrokeError as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()


class OutgoingDigests:
    """Digests of pages that are about to be sent, by their numbers in the transfer. A context manager: outside of it,
    no page is read any more."""

    def __init__(
        self,
        digesting: DigestThreads,
        kind: Kind,
        first: int,
        pages: list[int],
        sources: list[PageSource],
        known: dict[tuple[Kind, int], str],
    ) -> None:
        """`first`: number of the first page. `known`: digests by kind and page, which are not made again."""

        def made(some: slice) -> list[str]:
            for page, source in zip(pages[some], sources[some], strict=True):
                if (kind, page) not in known:
                    known[kind, page] = checksum.checksum(source.data(), kind)
            return [known[kind, page] for page in pages[some]]

        self._first, self._size, self._made, self._digesting = first, value_format.piece(sources), made, digesting
        self._left, self._pieces = deque(value_format.pieces(len(pages), self._size)), list[Future[list[str]]]()
        self._begin(digesting.ahead)

    def _begin(self, count: int) -> None:
        """Have so many pieces begun, if there are so many."""
        while self._left and len(self._pieces) < count:
            self._pieces.append(self._digesting.submit(self._made, self._left.popleft()))

    def __call__(self, numbers: Sequence[int]) -> list[str]:
        """Wait for digests of some of the pages. Raises PageLost."""
        places = [divmod(number - self._first, self._size) for number in numbers]
        self._begin(places[-1][0] + 1 + self._digesting.ahead)
        return [self._pieces[piece].result()[index] for piece, index in places]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _stop(self._pieces)


class IncomingChecks:
    """Compares pages that have come with their digests, while others come. If a page comes again, that one counts."""

    def __init__(self, digesting: DigestThreads) -> None:
        self._digesting = digesting
        self._pending: deque[Future[set[int]]] = deque()
        self._by_page: dict[int, Future[set[int]]] = {}  # the page's last check, which returns the pages that are wrong

    def add(self, numbers: Sequence[int], views: Sequence[memoryview], digests: Sequence[str]) -> None:
        """Check pages soon."""
        while len(self._pending) >= MAX_PENDING:
            wait([self._pending.popleft()])

        def check() -> set[int]:
            found = zip(numbers, views, digests, strict=True)
            return {number for number, view, digest in found if not checksum.is_right(view, digest)}

        self._pending.append(self._digesting.submit(check))
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
