"""An engine in another process, as the server sees it. Its requests outlive the process: they go on in the next one."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.engine_thread import OnStep, Publish, Update
from twostroke.engine.request import Request
from twostroke.errors import EngineFailed, EngineRestarting, EngineStopped, InvalidRequest, TwostrokeError
from twostroke.kv.kv_events import Change
from twostroke.server.engine_process.in_flight import InFlight, Roster
from twostroke.server.engine_process.launch import STOP_S
from twostroke.server.engine_process.link import END_S, LinkOpener, ModelChanged, ProcessLink
from twostroke.server.engine_process.messages import Ask, AskReply, Beat, Cancel, Failed, News, Stop
from twostroke.server.engine_process.rest import Rest
from twostroke.server.engine_process.watchdog import Watchdog
from twostroke.system.futures import settle

log = logging.getLogger(__name__)
MAX_DEATHS = 5  # in a row, without a step between them
BACKOFF_S = 0.5  # seconds before a process that follows two deaths in a row; twice as long with each


class Siblings:
    """Other engines of the same model, as one of them tells them of itself: none, unless a subclass knows some."""

    def can_replace(self, engine: "RemoteEngine") -> bool:
        """Whether another engine can go on with its requests."""
        return False

    def came(self, engine: "RemoteEngine") -> None:
        """Its process has its requests."""

    def went(self, engine: "RemoteEngine") -> None:
        """Its process has ended, and its KV with it."""

    def pages_changed(self, engine: "RemoteEngine", changes: list[Change]) -> None:
        """Its prefix index has got or lost pages."""

    def not_taken(self, left: list[InFlight]) -> list[InFlight]:
        """Those of its requests that no other engine goes on with."""
        return left


class RemoteEngine:
    """The engine of a process, and of the next one when it dies.

    Requests of a process that has died go on in the next one from the tokens that were delivered. New ones wait for it.
    A process that dies again and again without a step is not started any more: then `failure` says why.
    """

    def __init__(self, opener: LinkOpener, watchdog_s: float = 0.0, siblings: Siblings | None = None) -> None:
        """Start the process and open the model; `watchdog_s`: see `Watchdog`. Raises as `LLM`, and ModelChanged."""
        self._opener, self.number, self._siblings = opener, opener.number, siblings or Siblings()
        self._link: ProcessLink | None = opener.open()
        self.llm = opener.llm
        self.failure: EngineFailed | None = None
        self._publish: Publish = lambda updates: None
        self._on_step: OnStep = lambda seconds, report: None
        self._lock = threading.Lock()
        self._roster = Roster()
        self._asks: dict[int, tuple[Ask, Future[Any]]] = {}  # what the process was asked to run, until it answers
        self._numbers = count()
        self._deaths, self._beat = 0, time.monotonic()
        self._stopped, self._rest = threading.Event(), Rest()
        self._thread = threading.Thread(target=self._run, args=(self._link,), name="engine reader", daemon=True)
        self._watchdog = Watchdog(watchdog_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def restarting(self) -> bool:
        return self.alive and self._link is None

    @property
    def step_age_s(self) -> float:
        return max(0.0, time.monotonic() - self._beat)

    @property
    def pid(self) -> int | None:
        return None if (link := self._link) is None else link.process.pid

    @property
    def parts(self) -> "Sequence[RemoteEngine]":
        return (self,)

    def start(self, publish: Publish, on_step: OnStep) -> None:
        self._publish, self._on_step = publish, on_step
        assert self._link is not None
        self._link.start(self._unsendable)
        self._thread.start()
        threading.Thread(target=self._watch, name="engine watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._link is not None:
                self._link.outbox.put(Stop())
        self._rest.stop()
        if self._thread.is_alive():
            self._thread.join()
        elif self._link is not None:  # it has never begun
            self._link.process.end(0)
            self._link = None

    def rest(self) -> "Future[None] | None":
        """Close the model and end the process, which writes its KV to its tiers; None if something runs or waits.

        The result is there once the memory is free. What is submitted from then on waits for `wake`.
        """
        with self._lock:
            if self._link is None or self._roster.busy or self._asks:
                return None
            self._link.outbox.put(Stop(comes_back=True))
            self._link = None
            return self._rest.begin()

    def wake(self) -> "Future[None]":
        """Open the model again after a rest. The result raises what `LLM` raises; then it rests on."""
        return self._rest.wake()

    def submit(self, request: Request, owner: Any) -> None:
        with self._lock:
            one, alive = self._roster.add(request, owner), self.alive
            if alive and self._link is not None:
                self._link.outbox.put(one)
        if not alive:
            self._give_up()

    def cancel(self, request: Request) -> None:
        with self._lock:
            if (one := self._roster.of(request)) is None:
                return
            one.cancelled = True
            if self._link is not None and not self._roster.is_held(one):
                self._link.outbox.put(Cancel(one.id))
                return
            self._roster.remove(one)
        self._publish([one.cut_short(None)])

    def call(self, action: Callable[[Engine], Any]) -> "Future[Any]":
        return self._ask(action, between_steps=True)

    def beside_steps(self, action: Callable[[LLM], Any]) -> "Future[Any]":
        return self._ask(action, between_steps=False)

    def _ask(self, action: Callable[[Any], Any], *, between_steps: bool) -> "Future[Any]":
        result = Future[Any]()
        with self._lock:
            if self.alive:
                ask = Ask(next(self._numbers), action, between_steps)
                self._asks[ask.id] = ask, result
                if self._link is not None:
                    self._link.outbox.put(ask)
                return result
        settle(result, None, self._reason)
        return result

    @property
    def _reason(self) -> EngineStopped:
        return self.failure or EngineStopped("the engine was stopped")

    def _unsendable(self, message: Any, error: Exception) -> None:
        refusal = InvalidRequest(f"this cannot be sent to the engine's process: {error}")
        if isinstance(message, InFlight):
            with self._lock:
                self._roster.remove(message)
            self._publish([message.ended(refusal)])
        elif isinstance(message, Ask):
            self._answer(AskReply(message.id, None, refusal))

    def _run(self, link: ProcessLink | None) -> None:
        try:
            while link is not None:
                failed = self._read(link)
                self._leave(link, failed)
                if self._stopped.is_set():
                    break
                link = self._rest.last(partial(self._open, logging.DEBUG)) if self._rest else self._start_again()
        except Exception as error:
            log.critical("the engine's process is lost", exc_info=True)
            self.failure = EngineFailed(f"the server has lost its engine ({error}): start it again")
        self._give_up()
        with self._lock:
            asks, self._asks = self._asks, {}
        _refuse(asks, self._reason)

    def _give_up(self) -> None:
        """There is no process for its requests."""
        with self._lock:
            left = self._roster.clear()
        if not self._stopped.is_set():
            left = self._siblings.not_taken(left)
        self._publish([one.cut_short(None if one.cancelled else self._reason) for one in left])

    def _watch(self) -> None:
        """Kill a process that hangs, in a step or at its end."""
        dog = self._watchdog
        while not self._stopped.wait(dog.look_s) and self._thread.is_alive():
            if (link := self._link) is not None and dog.hangs(link.process.pid, self.step_age_s):
                link.process.kill()
        self._thread.join(STOP_S)
        if self._thread.is_alive() and (link := self._link) is not None:
            link.process.kill()

    def _read(self, link: ProcessLink) -> Exception | None:
        """Take messages until the connection ends. Returns why it did, if the process has said so."""
        failed: Exception | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                failed = self._obey(link.codec.loads(link.process.pipe.recv_bytes())) or failed
        return failed

    def _obey(self, message: object) -> Exception | None:
        match message:
            case News():
                self._take(message)
            case Beat(step_age_s):
                self._beat = time.monotonic() - step_age_s
            case AskReply():
                self._answer(message)
            case _:
                assert isinstance(message, Failed), type(message).__name__
                return message.error
        return None

    def _take(self, news: News) -> None:
        updates: list[Update] = []
        with self._lock:
            for one in news.requests:
                if (found := self._roster.get(one.id)) is not None:
                    updates.append(found.take(one))
                    if one.done:
                        self._roster.remove(found)
            if (suspect := self._roster.released()) is not None and self._link is not None:
                self._link.outbox.put(suspect)
        self._siblings.pages_changed(self, news.pages)
        for seconds, report in news.steps:
            self._on_step(seconds, report)
        if news.steps:
            self._deaths, self._beat = 0, time.monotonic()
        self._publish(updates)

    def _answer(self, reply: AskReply) -> None:
        with self._lock:
            _, result = self._asks.pop(reply.id, (None, None))
        if result is not None:
            settle(result, reply.result, reply.error)

    def _leave(self, link: ProcessLink, failed: Exception | None) -> None:
        """The process is gone, or ends now: note what that means for its requests."""
        with self._lock:
            self._link = None
            self._opener.ended()
            link.codec.generation = -1  # its values are lost
            link.outbox.put(None)
            told = self._stopped.is_set() or bool(self._rest)
            asks, self._asks = ({}, self._asks) if self._rest else (self._asks, {})  # those of a rest wait for its end
        self._siblings.went(self)
        accused = link.process.note.read()
        how = link.process.end(STOP_S if told else END_S)
        _refuse(asks, EngineRestarting("the engine's process has died and is started again: try again"))
        if told:
            return
        log.error("the engine's process %d has ended %s%s", link.process.pid, how, f": {failed}" if failed else "")
        self._deaths += 1
        with self._lock:
            ended = self._roster.after_death(accused)
        self._publish([one.cut_short(error) for one, error in ended])

    def _start_again(self) -> ProcessLink | None:
        """Start the next process after a death; None if there is none any more."""
        while self.failure is None and not self._stopped.wait(BACKOFF_S * 2**self._deaths if self._deaths > 1 else 0):
            if self._deaths >= MAX_DEATHS:
                self.failure = EngineFailed(f"the engine's process died {self._deaths} times in a row: start it again")
                log.critical("%s", self.failure)
                break
            try:
                return self._open(logging.WARNING)
            except (TwostrokeError, OSError) as error:
                log.error("the engine's process cannot be started: %s", error)
                self._deaths += 1
                self.failure = error if isinstance(error, ModelChanged) else None
                if self._siblings.can_replace(self):
                    self._give_up()
        return None

    def _open(self, level: int) -> ProcessLink:
        """Start the next process and hand it all requests. Raises what `LLM` raises, or ModelChanged."""
        link = self._opener.open()
        link.start(self._unsendable)
        with self._lock:
            self._beat = time.monotonic()
            self._link = link
            going_on = list(self._roster.to_begin())
            for message in (*going_on, *(ask for ask, _ in self._asks.values())):
                link.outbox.put(message)
            if self._stopped.is_set():
                link.outbox.put(Stop())
        self._siblings.came(self)
        log.log(level, "the engine is there again (process %d); %d requests go on", link.process.pid, len(going_on))
        return link


def _refuse(asks: "Mapping[int, tuple[Ask, Future[Any]]]", error: Exception) -> None:
    """End asks that will have no answer."""
    for _, result in asks.values():
        settle(result, None, error)
