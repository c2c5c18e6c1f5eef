"""The one thread that owns the engine: it takes commands, steps, and publishes what came of it."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from twostroke.engine.engine import Engine, StepReport
from twostroke.engine.request import Request
from twostroke.engine.track import Token
from twostroke.server.errors import EngineFailed, ShuttingDown

log = logging.getLogger(__name__)

STALLED_S = 0.05  # a pause when there are requests and none could move, so that a mistake does not burn a core


@dataclass(eq=False)
class Job:
    """A request, and who hears of it (`owner` is the publisher's business)."""

    request: Request
    owner: Any


@dataclass(frozen=True)
class Update:
    """What a step did for a job. `error` is why it failed, on the last update."""

    job: Job
    tokens: tuple[Token, ...]
    done: bool
    error: Exception | None = None


class EngineThread:
    """Runs the step loop. Every method may be called from any thread; the engine is touched by its own alone.

    It sleeps while there is nothing to do. A step that raises is fatal: the engine's state cannot be trusted any
    more, so every request ends with `EngineFailed`, those to come as well, and `failure` says why.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[list[Update]], None],
        on_step: Callable[[float, StepReport], None],
    ) -> None:
        """`publish` gets the updates of a step in one list; `on_step` its duration in seconds and its tokens."""
        self.failure: EngineFailed | None = None
        self._engine, self._publish, self._on_step = engine, publish, on_step
        self._jobs: dict[Request, Job] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop; what runs is cancelled. Returns once the thread has ended."""
        self._commands.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def submit(self, job: Job) -> None:
        self._send(partial(self._begin, job))

    def cancel(self, job: Job) -> None:
        """End a job before the next step; its pages are free then."""
        self._send(partial(self._end, job))

    def call(self, action: Callable[[Engine], Any]) -> "Future[Any]":
        """Run something between two steps, with the engine at rest."""
        answer: Future[Any] = Future()
        self._send(partial(self._answer, action, answer))
        return answer

    # Commands: run by the thread, or once it has ended by whoever sends them ------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        with self._gate:
            if not self._closed:
                self._commands.put(command)
                return
        command()

    def _begin(self, job: Job) -> None:
        if self._closed:
            self._publish([Update(job, (), True, self.failure or ShuttingDown())])
        else:
            self._engine.submit(job.request)
            self._jobs[job.request] = job

    def _end(self, job: Job) -> None:
        if not self._closed:
            self._engine.cancel(job.request)

    def _answer(self, action: Callable[[Engine], Any], answer: "Future[Any]") -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            if self._closed:
                raise self.failure or ShuttingDown()
            answer.set_result(action(self._engine))
        except Exception as error:
            answer.set_exception(error)

    # The loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            pause: float | None = None
            while self._obey(pause):
                pause = self._step() if self._jobs else None
        except Exception as error:
            log.critical("the engine has failed", exc_info=True)
            self.failure = EngineFailed(f"{type(error).__name__}: {error}")
        finally:
            self._close()

    def _obey(self, pause: float | None) -> bool:
        """Take all commands there are, having waited `pause` seconds for the first (None: until there is one)."""
        try:
            command = self._commands.get(timeout=pause) if pause != 0 else self._commands.get_nowait()
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _step(self) -> float | None:
        """Step and publish. Returns how long to wait for commands before the next one."""
        started = time.perf_counter()
        worked = self._engine.step()
        if worked:
            self._on_step(time.perf_counter() - started, self._engine.report)
        updates = [update for job in self._jobs.values() if (update := self._news(job)) is not None]
        for update in updates:
            if update.done:
                del self._jobs[update.job.request]
        if updates:
            self._publish(updates)
        if not self._jobs:
            return None
        return 0 if worked or updates else STALLED_S

    def _news(self, job: Job) -> Update | None:
        request = job.request
        done, tokens = request.done, tuple(request.events)
        request.events.clear()
        return Update(job, tokens, done, request.error) if tokens or done else None

    def _close(self) -> None:
        """Refuse everything from now on, and end what there is."""
        with self._gate:
            self._closed = True
        reason = self.failure or ShuttingDown()
        for job in self._jobs.values():
            try:
                self._engine.cancel(job.request)
            except Exception:
                log.exception("a request of the failed engine could not be cancelled")
        self._publish([Update(job, (), True, reason) for job in self._jobs.values()])
        self._jobs.clear()
        try:
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command()
        except Empty:
            return
