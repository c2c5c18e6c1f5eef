"""Routers: which worker gets a call."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from twostroke.errors import InvalidRequest
from twostroke.study.simulate.kv_events import page_names
from twostroke.study.simulate.prompts import prompt_tokens
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.worker import SimulatedWorker


class Router(Protocol):
    """Chooses among the workers that have joined and not left. It knows what it has sent where, and what it is told."""

    def choose(self, call: SimulatedRequest) -> SimulatedWorker | None:
        """The worker for a call, which counts as its load until `done`; None if there is none."""
        ...

    def done(self, worker: SimulatedWorker, call: SimulatedRequest) -> None:
        """The worker has no more to do for the call."""
        ...

    def join(self, worker: SimulatedWorker) -> None: ...

    def leave(self, worker: SimulatedWorker) -> None: ...

    def tell(self, worker: SimulatedWorker, changes: Iterable[tuple[bool, bytes]]) -> None:
        """Pages that the worker's index has got or lost."""
        ...


class RoundRobin:
    """Sends a request to each worker in turn."""

    def __init__(self) -> None:
        self._workers: list[SimulatedWorker] = []
        self._next = 0

    def choose(self, call: SimulatedRequest) -> SimulatedWorker | None:
        if not self._workers:
            return None
        self._next = (self._next + 1) % len(self._workers)
        return self._workers[self._next - 1]

    def done(self, worker: SimulatedWorker, call: SimulatedRequest) -> None: ...

    def join(self, worker: SimulatedWorker) -> None:
        self._workers.append(worker)

    def leave(self, worker: SimulatedWorker) -> None:
        self._workers.remove(worker)
        self._next = 0

    def tell(self, worker: SimulatedWorker, changes: Iterable[tuple[bool, bytes]]) -> None: ...


class LeastLoaded:
    """Chooses the worker with the fewest pages of prompts and answers still to serve; of equal ones the first."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.loads: dict[SimulatedWorker, int] = {}
        self._order: list[tuple[int, int, SimulatedWorker]] = []  # a heap; entries whose load has changed are skipped

    def choose(self, call: SimulatedRequest) -> SimulatedWorker | None:
        worker = self.least()
        if worker is not None:
            self.add(worker, self.weight(call))
        return worker

    def least(self) -> SimulatedWorker | None:
        """The least loaded worker; None if there is none."""
        while self._order:
            load, _, worker = self._order[0]
            if self.loads.get(worker) == load:
                return worker
            heapq.heappop(self._order)
        return None

    def weight(self, call: SimulatedRequest) -> int:
        """Pages of the call's prompt and answer."""
        return -(-(call.asked.prompt_tokens + call.asked.output_tokens) // self._page_size)

    def add(self, worker: SimulatedWorker, pages: int) -> None:
        self.loads[worker] += pages
        if len(self._order) > 4 * len(self.loads) + 64:  # most are loads that have changed
            self._order = [(load, one.number, one) for one, load in self.loads.items()]
            heapq.heapify(self._order)
            return
        heapq.heappush(self._order, (self.loads[worker], worker.number, worker))

    def done(self, worker: SimulatedWorker, call: SimulatedRequest) -> None:
        if worker in self.loads:
            self.add(worker, -self.weight(call))

    def join(self, worker: SimulatedWorker) -> None:
        self.loads[worker] = 0
        self.add(worker, 0)

    def leave(self, worker: SimulatedWorker) -> None:
        del self.loads[worker]

    def tell(self, worker: SimulatedWorker, changes: Iterable[tuple[bool, bytes]]) -> None: ...


class KvAware(LeastLoaded):
    """Chooses the worker with the least load and the fewest pages to compute, both counted in pages.

    This is the cost of Dynamo's KV router at its default weights: pages of the prompt that the worker does not hold,
    plus pages of what it serves. What workers hold is known from the events of their prefix indexes.
    """

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        # Who has a page, in order of their numbers. Pages that become known together share one tuple.
        self._holders: dict[bytes, tuple[SimulatedWorker, ...]] = {}
        # In order of the pages' arrival, so that a simulation with the same seed is the same.
        self.held: dict[SimulatedWorker, dict[bytes, None]] = {}

    def choose(self, call: SimulatedRequest) -> SimulatedWorker | None:
        least = self.least()
        if least is None:
            return None
        # Of those that hold as many pages, the one with the least load is the best.
        found = [(least, 0), *((self._lightest(those), pages) for those, pages in self.overlaps(call, least))]
        best, _ = min(found, key=lambda one: (self.loads[one[0]] - one[1], one[0].number))
        self.add(best, self.weight(call))
        return best

    def _lightest(self, workers: tuple[SimulatedWorker, ...]) -> SimulatedWorker:
        """The worker with the least load; of equal ones the first."""
        loads = [*map(self.loads.__getitem__, workers)]
        return workers[loads.index(min(loads))]

    def overlaps(
        self, call: SimulatedRequest, anybody: SimulatedWorker
    ) -> list[tuple[tuple[SimulatedWorker, ...], int]]:
        """Workers that hold equally many leading pages of the call's prompt, and how many; not those without any."""
        found: list[tuple[tuple[SimulatedWorker, ...], int]] = []
        holders: tuple[SimulatedWorker, ...] = ()
        pages = 0
        for name in page_names(prompt_tokens(call.asked.pieces, anybody.model.vocab_size), self._page_size):
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

    def join(self, worker: SimulatedWorker) -> None:
        super().join(worker)
        self.held[worker] = {}

    def leave(self, worker: SimulatedWorker) -> None:
        super().leave(worker)
        self._change(worker, ((False, name) for name in self.held.pop(worker)))

    def tell(self, worker: SimulatedWorker, changes: Iterable[tuple[bool, bytes]]) -> None:
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

    def _change(self, worker: SimulatedWorker, changes: Iterable[tuple[bool, bytes]]) -> None:
        """The worker has got pages, or has lost them."""
        before: tuple[SimulatedWorker, ...] | None = None
        after: tuple[SimulatedWorker, ...] = ()
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


def _number(worker: SimulatedWorker) -> int:
    return worker.number


ROUTERS: Sequence[str] = ("round-robin", "least-loaded", "kv-aware")


def make_router(name: str, page_size: int) -> Router:
    """The router of that name. Raises InvalidRequest, which lists all."""
    if name not in ROUTERS:
        raise InvalidRequest(f"the router must be one of {', '.join(ROUTERS)}, not {name!r}")
    return RoundRobin() if name == "round-robin" else (KvAware if name == "kv-aware" else LeastLoaded)(page_size)
