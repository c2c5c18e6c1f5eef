"""The one thread that owns the engine: it takes commands, steps, and publishes updates."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from twostroke.engine.engine import Engine
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.step import StepReport
from twostroke.errors import EngineFailed, EngineStopped
from twostroke.system.futures import fulfil

log = logging.getLogger(__name__)

LOOK_S = 1.0  # time after which an idle thread looks whether a rank is lost
STALLED_S = 0.05  # pause after a step in which no request could advance, so that a mistake does not occupy a core


@dataclass(frozen=True)
class Update:
    """What a step did for a request."""

    request: Request  # which one
    owner: Any  # what was given with it to `submit`; the publisher knows what to do with it
    tokens: tuple[Token, ...]  # those that are new
    done: bool  # nothing more will come
    error: Exception | None = None  # why it failed, on the last update


Publish = Callable[[list[Update]], None]
OnStep = Callable[[float, StepReport], None]


def _look() -> None:
    """The command that wakes the thread: pages have come."""


class EngineThread:
    """Runs the step loop. Every method may be called from any thread; this one alone touches the engine.

    It sleeps while there is nothing to do. A step that raises, or a rank that is lost while it sleeps, is fatal: the
    engine's state cannot be trusted any more, so every request ends with `EngineStopped`, now and later, and `failure`
    says why.
    """

    def __init__(self, engine: Engine) -> None:
        self.failure: EngineFailed | None = None
        self._engine = engine
        self._publish: Publish = lambda updates: None
        self._on_step: OnStep = lambda seconds, report: None
        self._owners: dict[Request, Any] = {}  # of every request that is not done
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        self._between_steps_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, publish: Publish, on_step: OnStep | None = None) -> None:
        """Begin. `publish` gets the updates of a step in one list; `on_step` its duration in seconds and its tokens."""
        self._publish, self._on_step = publish, on_step or self._on_step
        self._engine.on_arrival = lambda: self._commands.put(_look)
        self._thread.start()

    def stop(self) -> None:
        """End the loop; what runs is cancelled. Returns once the thread has ended."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def step_age_s(self) -> float:
        """Seconds since it was last between two steps: what a step takes that hangs, and about 1 s at rest."""
        return time.monotonic() - self._between_steps_at

    def submit(self, request: Request, owner: Any) -> None:
        """Start a request; its updates carry the owner."""
        self._send(partial(self._begin, request, owner))

    def cancel(self, request: Request) -> None:
        """End a request before the next step; its pages are free then."""
        self._send(partial(self._end, request))

    def call(self, action: Callable[[Engine], Any]) -> "Future[Any]":
        """Run something between two steps, with the engine at rest."""
        result: Future[Any] = Future()
        self._send(partial(self._call, action, result))
        return result

    # Commands: run by the thread, or once it has ended, by their sender -----------------------------------------

    def _send(self, command: Callable[[], None]) -> None:
        with self._gate:
            if not self._closed:
                self._commands.put(command)
                return
        command()

    def _begin(self, request: Request, owner: Any) -> None:
        if self._closed:
            self._publish([Update(request, owner, (), True, self._reason())])
            return
        try:
            self._engine.submit(request)
        except EngineStopped as error:  # closed by somebody else
            self._publish([Update(request, owner, (), True, error)])
        else:
            self._owners[request] = owner

    def _end(self, request: Request) -> None:
        if not self._closed:
            self._engine.cancel(request)

    def _call(self, action: Callable[[Engine], Any], result: "Future[Any]") -> None:
        def run() -> Any:
            if self._closed:
                raise self._reason()
            return action(self._engine)

        fulfil(result, run)

    # The loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            pause = LOOK_S
            while self._obey(pause):
                self._between_steps_at = time.monotonic()
                if (lost := self._engine.failure) is not None:
                    raise lost
                pause = self._step() if self._owners else LOOK_S
        except EngineFailed as error:
            log.critical("the engine has failed: %s", error)
            self.failure = error
        except Exception as error:
            log.critical("the engine has failed", exc_info=True)
            self.failure = EngineFailed(f"the engine has failed ({type(error).__name__}: {error}): start it again")
        finally:
            self._close()

    def _obey(self, pause: float) -> bool:
        """Run all commands in the queue, after waiting at most `pause` seconds for the first."""
        try:
            command = self._commands.get(timeout=pause) if pause != 0 else self._commands.get_nowait()
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except Empty:
            return True
        return False

    def _step(self) -> float:
        """Step and publish. Returns how long to wait for commands before the next one."""
        started = time.perf_counter()
        worked = self._engine.step()
        if worked:
            self._on_step(time.perf_counter() - started, self._engine.report)
        updates = [update for request in self._owners if (update := self._news(request)) is not None]
        for update in updates:
            if update.done:
                del self._owners[update.request]
        if updates:
            self._publish(updates)
        if not self._owners:
            return LOOK_S
        if worked or updates:
            return 0
        return self._engine.idle_timeout() or STALLED_S  # an arrival is a command

    def _news(self, request: Request) -> Update | None:
        done = request.done  # read first: after it no token is added
        tokens = tuple(request.events.popleft() for _ in range(len(request.events)))
        if not tokens and not done:
            return None
        return Update(request, self._owners[request], tokens, done, request.error)

    def _reason(self) -> EngineStopped:
        return self.failure or EngineStopped("the engine was stopped")

    def _close(self) -> None:
        """Refuse every command from now on, and end all requests."""
        with self._gate:
            self._closed = True
        reason = self._reason()
        for request in self._owners:
            try:
                self._engine.cancel(request)
            except Exception:
                log.exception("a request of the failed engine could not be cancelled")
        self._publish([Update(request, owner, (), True, reason) for request, owner in self._owners.items()])
        self._owners.clear()
        try:
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command()
        except Empty:
            return
