"""Several processes of one model. Each request goes to one of them: by the pages that each has, and by their loads.

What a replica has is known from what its prefix index tells. If one dies, its own requests wait for its next process,
and the others go on; new ones go to those that are there. If the next one does not start, others take its requests.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.engine_thread import OnStep, Publish, Update
from twostroke.engine.request import Request
from twostroke.engine.router import KvAware, RoutedCall
from twostroke.errors import EngineFailed
from twostroke.kv.kv_events import Change, page_names, root_of
from twostroke.server.engine_process.codec import RemoteValue
from twostroke.server.engine_process.in_flight import InFlight
from twostroke.server.engine_process.launch import Launch
from twostroke.server.engine_process.link import LinkOpener
from twostroke.server.engine_process.remote import RemoteEngine, Siblings

log = logging.getLogger(__name__)


@dataclass
class _Sent:
    """A request in flight: to whom it went, the pages that it has there as load, and whether it is to end."""

    replica: RemoteEngine
    pages: int
    cancelled: bool = False


class ReplicatedEngine(Siblings):
    """A `ServedEngine` of several."""

    def __init__(self, launches: Sequence[Launch], watchdog_s: float = 0.0) -> None:
        """Start a process with each of `launches`, one after the other. Raises what `LLM` raises, or ModelChanged."""
        self._router = KvAware[RemoteEngine]()
        self._lock = threading.Lock()
        self._sent: dict[Request, _Sent] = {}
        self._publish: Publish = lambda updates: None
        self.parts: list[RemoteEngine] = []  # the replicas
        try:
            for launch in launches:
                known = self.parts[0].llm if self.parts else None
                opener = LinkOpener(launch, len(self.parts), len(launches), known)
                self.parts.append(RemoteEngine(opener, watchdog_s, self))
        except BaseException:
            self.stop()
            raise
        self.llm = self.parts[0].llm  # the model as the first one has described it

    @property
    def alive(self) -> bool:
        return any(one.alive for one in self.parts)

    @property
    def failure(self) -> EngineFailed | None:
        return None if self.alive else next((one.failure for one in self.parts if one.failure is not None), None)

    @property
    def restarting(self) -> bool:
        return all(one.restarting for one in self.parts if one.alive) and self.alive

    @property
    def step_age_s(self) -> float:
        return max((one.step_age_s for one in self.parts if one.alive and not one.restarting), default=0.0)

    def start(self, publish: Publish, on_step: OnStep) -> None:
        self._publish = publish
        for one in self.parts:
            self.came(one)
            one.start(partial(self._deliver, one), on_step)

    def stop(self) -> None:
        if self.parts:
            with ThreadPoolExecutor(len(self.parts)) as pool:  # each may have much to write to its tiers
                list(pool.map(RemoteEngine.stop, self.parts))

    def submit(self, request: Request, owner: Any) -> None:
        with self._lock:
            self._sent[request] = sent = _Sent(*self._choice(request))
        sent.replica.submit(request, owner)

    def cancel(self, request: Request) -> None:
        with self._lock:
            sent = self._sent.get(request)
            if sent is not None:
                sent.cancelled = True
        if sent is not None:
            sent.replica.cancel(request)

    def call(self, action: Callable[[Engine], Any]) -> "Future[Any]":
        return self._one_for(action).call(action)

    def beside_steps(self, action: Callable[[LLM], Any]) -> "Future[Any]":
        return self._one_for(action).beside_steps(action)

    def _choice(self, request: Request) -> tuple[RemoteEngine, int]:
        """A replica for a request, and the pages that it has there as load."""
        size, router = self.llm.pool.page_size, self._router
        pages = -(-len(request.prompt) // size) + len(request.choices)
        home, least = self._home(request.make_program), router.least()
        if home is not None and least is not None and router.loads.get(home, 1 << 60) - pages <= router.loads[least]:
            router.add(home, pages)
            return home, pages
        names = page_names(request.prompt, size, root_of(request.cache_salt))
        return router.choose(RoutedCall(pages, names)) or self._anyone, pages

    def _home(self, action: Any) -> RemoteEngine | None:
        """The replica that has a value which a function is given."""
        if isinstance(action, RemoteValue):
            return None if action.lost else self.parts[action.generation % len(self.parts)]
        if isinstance(action, partial):
            homes = map(self._home, (*action.args, *action.keywords.values()))
            return next((home for home in homes if home is not None), None)
        return None

    def _one_for(self, action: Any) -> RemoteEngine:
        with self._lock:
            return self._home(action) or self._router.least() or self._anyone

    @property
    def _anyone(self) -> RemoteEngine:
        """One to wait for while none is there."""
        return next((one for one in self.parts if one.alive), self.parts[0])

    # For replicas: called by the threads of their processes -----------------------------------------------------------

    def can_replace(self, engine: RemoteEngine) -> bool:
        return any(one is not engine and one.alive and not one.restarting for one in self.parts)

    def came(self, engine: RemoteEngine) -> None:
        with self._lock:
            self._router.join(engine)
            for sent in self._sent.values():
                if sent.replica is engine:
                    self._router.add(engine, sent.pages)

    def went(self, engine: RemoteEngine) -> None:
        with self._lock:
            if engine in self._router.loads:
                self._router.leave(engine)

    def not_taken(self, left: list[InFlight]) -> list[InFlight]:
        """Hand requests of a replica that cannot be started to others. Returns those that end with it."""
        ended: list[InFlight] = []
        for one in left:
            with self._lock:
                sent = self._sent[one.request]
                one.cancelled |= sent.cancelled
                if one.cancelled or not self.alive:
                    ended.append(one)
                    continue
                sent.replica, sent.pages = self._choice(one.request)
            sent.replica.submit(one.request, one.owner)
            if sent.cancelled:  # meanwhile, by somebody who may have asked one that did not have it
                sent.replica.cancel(one.request)
            log.warning("a request goes on at replica %d, since its own cannot be started", sent.replica.number)
        return ended

    def pages_changed(self, engine: RemoteEngine, changes: list[Change]) -> None:
        with self._lock:
            self._router.tell(engine, changes)

    def _deliver(self, replica: RemoteEngine, updates: list[Update]) -> None:
        with self._lock:
            for update in updates:
                if update.done and (sent := self._sent.pop(update.request, None)) is not None:
                    self._router.done(replica, sent.pages)
        self._publish(updates)
