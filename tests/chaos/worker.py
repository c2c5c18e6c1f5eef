"""A worker process: an engine and its thread, the role of a cluster's worker, and what the front end asks of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.chaos.network import Machine
from tests.chaos.standin import Opened, Sizes
from tests.chaos.tasks import Process, Task, Workers
from twostroke.backends.interface import PAGE
from twostroke.cluster.asked import Asked
from twostroke.cluster.roles import Decoding, Prefilling
from twostroke.engine.request import Request
from twostroke.errors import EngineStopped, TwostrokeError
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import POOL
from twostroke.simulation.audit import leaked
from twostroke.wire.landing import Landing
from twostroke.wire.outgoing import Outgoing

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet
    from tests.chaos.front import Stream

STEP_S, PROMPT_S, TOKEN_S = 2e-3, 2e-4, 5e-4  # of a step, and of each token of a prompt and each decode row in it
PYTHON_S = 1e-4  # of a step in which nothing is computed
IDLE_S = 1.0
STALLED_S = 0.05
MOST_PREEMPTIONS = 500  # of a request at one worker; more would be churn


class Worker:
    """Attributes: steps: of its engine. audited: how often its pages were counted."""

    def __init__(self, fleet: Fleet, number: int, role: str, sizes: Sizes) -> None:
        self.fleet, self.number, self.role = fleet, number, role
        self.process = Process(f"{role} {number}")
        self.tasks = fleet.tasks
        readers = Workers(self.tasks, self.process, 4)
        self.llm = Opened(sizes, lambda: fleet.events.now, self._pause, readers)
        self.transport = fleet.transport(self)
        around = Machine(fleet.network, self.process)
        llm = self.llm.as_llm
        self.prefilling = Prefilling(llm, transport=self.transport, around=around) if role == "prefill" else None
        self.decoding = Decoding(llm, transport=self.transport, around=around) if role == "decode" else None
        self.steps = 0
        self.closing = False
        self.streams: dict[Request, Stream] = {}
        self.outgoing: dict[Stream, tuple[Request, Outgoing]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._waits = False
        self.llm.engine.on_arrival = lambda: self.send(_look)
        self._thread: Task = self.tasks.start(self.process, self._run)

    # What the front end asks ------------------------------------------------------------------------------------------

    def ask(self, asked: Asked, handed: dict[str, Any] | None, stream: Stream) -> None:
        """A request has come. It is read in a thread of its own, as in a worker."""
        if self.process.dead:
            return
        if self.closing:
            stream.tell("lost", "it takes no more requests")
        elif self.prefilling is not None:
            self.tasks.start(self.process, lambda: self._prefill(asked, stream))
        else:
            self.tasks.start(self.process, lambda: self._decode(asked, handed, stream))

    def _prefill(self, asked: Asked, stream: Stream) -> None:
        assert self.prefilling is not None
        try:
            request, outgoing = self.prefilling.request(asked)
        except TwostrokeError as error:
            stream.tell("lost", str(error))
            return
        self.outgoing[stream] = request, outgoing
        stream.tell("handle", self.prefilling.handed(asked, outgoing))
        self.send(lambda: self._begin(request, stream))

    def _decode(self, asked: Asked, handed: dict[str, Any] | None, stream: Stream) -> None:
        assert self.decoding is not None
        request = self.decoding.request(asked, handed)
        asked.continued(request)
        self.send(lambda: self._begin(request, stream))

    def cancel(self, stream: Stream) -> None:
        """The front end has dropped it."""
        if not self.process.dead:
            self.tasks.start(self.process, lambda: self._cancel(stream))

    def _cancel(self, stream: Stream) -> None:
        self.send(lambda: self._cancel_requests(stream))
        request, outgoing = self.outgoing.pop(stream, (None, None))
        if request is not None and outgoing is not None and not request.done:
            outgoing.fail("its request was cancelled")

    def _cancel_requests(self, stream: Stream) -> None:
        for request in [request for request, one in self.streams.items() if one is stream]:
            self.llm.engine.cancel(request)

    # The engine's thread ----------------------------------------------------------------------------------------------

    def send(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        if self._waits:
            self.tasks.wake(self._thread)

    def _begin(self, request: Request, stream: Stream) -> None:
        if stream.dropped:
            if stream in self.outgoing:
                self.outgoing.pop(stream)[1].fail("its request was cancelled")
            return
        request.timings.arrival = self.fleet.events.now
        try:
            self.llm.engine.submit(request)
        except EngineStopped as error:
            stream.tell("lost", str(error))
            return
        self.streams[request] = stream

    def _run(self) -> None:
        engine = self.llm.engine
        while not self.closing:
            while self._commands:
                self._commands.popleft()()
            began = self.fleet.events.now
            worked = engine.step()
            self.steps += worked
            self._publish()
            if worked:
                self.audit()
            if worked or self._commands:
                if self.fleet.events.now == began:  # nothing was computed
                    self.tasks.sleep(PYTHON_S)
            else:
                pause = (engine.pause() or STALLED_S) if self.streams else IDLE_S
                self._waits = True
                self.tasks.park(self.fleet.events.now + pause)
                self._waits = False

    def _publish(self) -> None:
        for request, stream in list(self.streams.items()):
            assert request.preemptions < MOST_PREEMPTIONS, "a request is preempted again and again"
            done = request.done
            tokens = [request.events.popleft() for _ in range(len(request.events))]
            if tokens or done:
                stream.tell("tokens", tokens, done, request.error)
            if done:
                if self.role == "decode" and request.prefilled_tokens:
                    self.fleet.happened["a decode worker prefills"] += 1
                del self.streams[request]
                self.outgoing.pop(stream, None)

    def _pause(self, prompt: int, rows: int) -> None:
        self.tasks.sleep(STEP_S + PROMPT_S * prompt + TOKEN_S * rows)

    def close(self) -> None:
        """SIGTERM: what runs is lost here, and goes on elsewhere. Nothing may be held afterwards."""
        self.closing = True
        self.send(_look)
        self.tasks.start(self.process, self._close)

    def _close(self) -> None:
        self.tasks.join(self._thread, None)
        for stream in self.streams.values():
            stream.tell("lost", "the engine was stopped")
        self.llm.engine.close()
        self.streams.clear()
        self.outgoing.clear()
        role = self.prefilling or self.decoding
        assert role is not None
        role.close()
        until = self.fleet.events.now + 100
        while self.receptions and self.fleet.events.now < until:  # in quarantine
            self.tasks.sleep(0.5)
        used, pins = self.llm.pool.num_used, len(self.llm.pool._pins)
        assert (used, pins) == (0, 0), f"{self.process.name} has ended and holds {used} pages, {pins} pins"
        self.fleet.ended(self)

    # Counting ---------------------------------------------------------------------------------------------------------

    @property
    def offers(self) -> list[Outgoing]:
        return [] if self.prefilling is None else list(self.prefilling.sender._offers.values())

    @property
    def receptions(self) -> list[Any]:
        return [] if self.decoding is None else list(self.decoding.receiver._receptions)

    @property
    def landings(self) -> list[Landing]:
        return [one._landing for one in self.receptions if one._landing is not None]

    def must_be_granted(self, generation: str, frame: int) -> None:
        """A write lands in a frame: it must be reserved for it."""
        pool = self.llm.pool
        granted = [pool.frame(page) for one in self.landings if one.generation == generation for page in one.pages]
        assert frame in granted, "a late write reaches a page of somebody else"

    def audit(self) -> None:
        """Count pages: each has a holder, and one that a value arrives in has no other."""
        pool, engine = self.llm.pool, self.llm.engine
        if self.decoding is not None and self.decoding.receiver.num_quarantined:
            self.fleet.happened["steps beside pages in quarantine"] += 1
        values: list[KVCache | None] = []
        for one in self.offers:
            final = one._final
            values += [one._kv, one._longer, None if final is None else final.kv]
        for choice in engine.choices:
            shared = [one.value for one in choice.request.shared.values()]
            values += [getattr(result, "kv", result) for result in (*choice.results, *shared)]
            for lane in choice.lanes:
                values += [] if lane.load is None else [lane.load.known]
            for errand in choice.errands:
                if errand.future.done() and not errand.future.cancelled() and errand.future.exception() is None:
                    values.append(errand.future.result().kv)
        lost = leaked(engine, pool, [kv for kv in values if isinstance(kv, KVCache) and kv.tier == POOL])
        # A transfer that sends holds its value itself, also when the lease has ended.
        sends = self.prefilling is not None and bool(self.prefilling.sender._channels)
        assert lost == 0 or sends, f"{self.process.name}: {lost} pages that nobody holds"
        landing = [page for one in self.landings for page in one.pages]
        assert len(set(landing)) == len(landing), "a page is reserved twice"
        assert all(pool.references(page) == 1 for page in landing), "a page that a value arrives in has another holder"
        assert not set(landing) & _held(engine.lanes), "a lane reads a page that a value arrives in"
        frames = pool.all_frames()
        here = frames[frames >= 0]
        assert len(set(here.tolist())) == len(here) == pool.num_pages - len(pool._free), "a frame is in two hands"

    def tell_ends(self) -> None:
        """Count how its leases have ended, before it ends itself."""
        if self.prefilling is not None:
            for why in self.prefilling.sender._ended.values():
                self.fleet.happened[f"offer: {why}"] += 1

    @property
    def idle(self) -> bool:
        return not (self.streams or self.offers or self.receptions or self.llm.engine.num_requests)

    def must_be_empty(self) -> None:
        """Nobody wants anything any more: the prefix index alone may hold pages."""
        index = self.llm.model.index
        indexed = 0 if index is None else len(set(index.pages))
        used = self.llm.pool.num_used
        assert used == indexed, f"{self.process.name}: {used - indexed} pages are still held"
        assert not self.llm.pool._pins, f"{self.process.name}: pins are left"
        assert not self.outgoing, f"{self.process.name}: prefills are left"


def _held(lanes: Sequence[Any]) -> set[int]:
    tables = [lane.writer.table[:, PAGE] for lane in lanes]
    return set(np.concatenate(tables).tolist()) if tables else set()


def _look() -> None:
    pass
