"""Routers: which of several engines gets a call. They know what they have sent where, and what they are told."""

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from twostroke.kv.kv_events import Change


class Numbered(Protocol):
    """What calls are sent to: an engine with a number of its own."""

    @property
    def number(self) -> int: ...


W = TypeVar("W", bound=Numbered)


class RoutedCall(NamedTuple):
    """A call, as a router sees it."""

    pages: int  # of KV that it will take, which is its load
    names: Iterable[bytes]  # of the whole pages of its prompt (`kv_events.page_names`)


class Router(Protocol[W]):
    """Chooses among the workers that have joined and not left."""

    def choose(self, call: RoutedCall) -> W | None:
        """The worker for a call, which counts as its load until `done`; None if there is none."""
        ...

    def done(self, worker: W, pages: int) -> None:
        """The worker has no more to do for a call of so many pages."""
        ...

    def join(self, worker: W) -> None: ...

    def leave(self, worker: W) -> None: ...

    def tell(self, worker: W, changes: Iterable[Change]) -> None:
        """Pages that the worker's index has got or lost."""
        ...


class RoundRobin(Generic[W]):
    """Sends a request to each worker in turn."""

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._next = 0

    def choose(self, call: RoutedCall) -> W | None:
        if not self._workers:
            return None
        self._next = (self._next + 1) % len(self._workers)
        return self._workers[self._next - 1]

    def done(self, worker: W, pages: int) -> None: ...

    def join(self, worker: W) -> None:
        self._workers.append(worker)

    def leave(self, worker: W) -> None:
        self._workers.remove(worker)
        self._next = 0

    def tell(self, worker: W, changes: Iterable[Change]) -> None: ...


class LeastLoaded(Generic[W]):
    """Chooses the worker with the fewest pages of calls still to serve; of equal ones the first."""

    def __init__(self) -> None:
        self.loads: dict[W, int] = {}
        self._order: list[tuple[int, int, W]] = []  # a heap; entries whose load has changed are skipped

    def choose(self, call: RoutedCall) -> W | None:
        worker = self.least()
        if worker is not None:
            self.add(worker, call.pages)
        return worker

    def least(self) -> W | None:
        """The least loaded worker; None if there is none."""
        while self._order:
            load, _, worker = self._order[0]
            if self.loads.get(worker) == load:
                return worker
            heapq.heappop(self._order)
        return None

    def add(self, worker: W, pages: int) -> None:
        self.loads[worker] += pages
        if len(self._order) > 4 * len(self.loads) + 64:  # most are loads that have changed
            self._order = [(load, one.number, one) for one, load in self.loads.items()]
            heapq.heapify(self._order)
            return
        heapq.heappush(self._order, (self.loads[worker], worker.number, worker))

    def done(self, worker: W, pages: int) -> None:
        if worker in self.loads:
            self.add(worker, -pages)

    def join(self, worker: W) -> None:
        self.loads[worker] = 0
        self.add(worker, 0)

    def leave(self, worker: W) -> None:
        del self.loads[worker]

    def tell(self, worker: W, changes: Iterable[Change]) -> None: ...


class KvAware(LeastLoaded[W]):
    """Chooses the worker with the least load and the fewest pages to compute, both counted in pages.

    This is the cost of Dynamo's KV router at its default weights: pages of the prompt that the worker does not hold,
    plus pages of what it serves. What workers hold is known from the events of their prefix indexes.
    """

    def __init__(self) -> None:
        super().__init__()
        # Who has a page, in order of their numbers. Pages that become known together share one tuple.
        self._holders: dict[bytes, tuple[W, ...]] = {}
        # In order of the pages' arrival, so that a simulation with the same seed is the same.
        self.held: dict[W, dict[bytes, None]] = {}

    def choose(self, call: RoutedCall) -> W | None:
        least = self.least()
        if least is None:
            return None
        # Of those that hold as many pages, the one with the least load is the best.
        found = [(least, 0), *((self._lightest(those), pages) for those, pages in self.overlaps(call.names))]
        best, _ = min(found, key=lambda one: (self.loads[one[0]] - one[1], one[0].number))
        self.add(best, call.pages)
        return best

    def _lightest(self, workers: tuple[W, ...]) -> W:
        """The worker with the least load; of equal ones the first."""
        loads = [*map(self.loads.__getitem__, workers)]
        return workers[loads.index(min(loads))]

    def overlaps(self, names: Iterable[bytes]) -> list[tuple[tuple[W, ...], int]]:
        """Workers that hold equally many leading pages of a prompt, and how many; not those without any."""
        found: list[tuple[tuple[W, ...], int]] = []
        holders: tuple[W, ...] = ()
        pages = 0
        for name in names:
            of_page = self._holders.get(name, ())
            if not pages:
                holders = of_page
            elif of_page and of_page is not holders and of_page != holders:  # pages of one prefix mostly have the same
                those = {*of_page}
                found.append((tuple(one for one in holders if one not in those), pages))
                holders = tuple(one for one in holders if one in those)
            if not (of_page and holders):
                break
            pages += 1
        return [one for one in (*found, (holders, pages)) if one[0]]

    def join(self, worker: W) -> None:
        super().join(worker)
        self.held[worker] = {}

    def leave(self, worker: W) -> None:
        super().leave(worker)
        self._change(worker, ((False, name) for name in self.held.pop(worker)))

    def tell(self, worker: W, changes: Iterable[Change]) -> None:
        held = self.held.get(worker)
        if held is None:  # it has left meanwhile
            return
        changes = list(changes)
        for has, name in changes:
            if has:
                held[name] = None
            else:
                del held[name]
        self._change(worker, changes)

    def _change(self, worker: W, changes: Iterable[Change]) -> None:
        """The worker has got pages, or has lost them."""
        before: tuple[W, ...] | None = None
        after: tuple[W, ...] = ()
        got = False
        for has, name in changes:
            if (known := self._holders.get(name, ())) is not before or has != got:
                place = bisect_left(known, worker.number, key=_number)
                before, got = known, has
                after = (*known[:place], worker, *known[place:]) if has else (*known[:place], *known[place + 1 :])
            if after:
                self._holders[name] = after
            else:
                del self._holders[name]


def _number(worker: Numbered) -> int:
    return worker.number
