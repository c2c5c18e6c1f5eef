"""Validates long bodies in another process first, so that no request stops the others.

Reading 8 MB of JSON, checking it, and tokenizing what it holds takes Python's interpreter lock (GIL) for up to a
second, in which the event loop answers nobody and the engine makes no token. So a long body goes through the same
routes in a worker process (`worker.py`), up to the point where it would be handed to the engine. A refusal, or
an answer that needs no engine (`/tokenize`), is sent from there. A body that passes is within the model's context and
is then read here as well.
"""

import asyncio
import itertools
import logging
import pickle
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from queue import PriorityQueue
from typing import Any

from starlette.types import Message

from twostroke.methods import METHODS
from twostroke.server.engine_process.hollow import HollowState
from twostroke.server.engine_process.launch import ChildProcess
from twostroke.server.errors import ApiError
from twostroke.server.settings import Settings
from twostroke.system.futures import fulfil

log = logging.getLogger(__name__)

LONG_BODY_BYTES = 16 << 10  # bytes; a shorter body takes the lock for a few milliseconds
HUGE_BODY_BYTES = 1 << 20  # bytes
Reply = list[Message]  # a complete response, as ASGI has it
MAX_SECONDS = 10  # that one body may take
START_CODE = "from twostroke.server.body_validation.worker import main; main({file})"


@dataclass(frozen=True)
class HttpCall:
    """A call over HTTP: ASGI's scope without the server's state, the body, and the techniques that there are."""

    scope: dict[str, Any]
    body: bytes
    methods: frozenset[str] = field(default_factory=lambda: frozenset(METHODS))


@dataclass(frozen=True)
class WorkerState:
    """The server's state that decides about a request, without weights."""

    llm: HollowState
    settings: Settings
    name: str
    created: int
    max_running: int


class BodyValidator:
    """Two worker processes: one for long bodies, and one for huge ones, for which no other body should wait."""

    def __init__(self, state: Callable[[], WorkerState]) -> None:
        pickled = cache(lambda: pickle.dumps(state()))  # made once, since that takes the lock
        self._long, self._huge = _WorkerQueue(pickled), _WorkerQueue(pickled)

    def start(self) -> None:
        """Start the process for long bodies now, so that the first of them does not wait for it."""
        self._long.send(0, None)

    async def validate(self, call: HttpCall) -> Reply | None:
        """The response to send, or None for a call that the engine has to serve. Raises ApiError."""
        lane = self._huge if len(call.body) > HUGE_BODY_BYTES else self._long
        return await asyncio.wrap_future(lane.send(len(call.body), call))

    def stop(self) -> None:
        """End the processes. Nothing may be in flight."""
        self._long.stop()
        self._huge.stop()


class _WorkerQueue:
    """A worker process, and who waits for it: the shortest body goes first.

    The process begins with the first call. One that dies or takes too long over a body is replaced, and that body is
    refused. One that has died over none is replaced before the next.
    """

    def __init__(self, state: Callable[[], bytes]) -> None:
        self._state = state
        self._order = itertools.count()
        self._waiting: PriorityQueue[tuple[int, int, HttpCall | None, Future[Reply | None]]] = PriorityQueue()
        self._worker: _WorkerProcess | None = None
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """End the process."""
        if self._thread is not None:
            self.send(-1, None)
            self._thread.join()
            self._thread = None  # the next call begins anew

    def send(self, priority: int, call: HttpCall | None) -> "Future[Reply | None]":
        """Queue a call, lower priorities first; None only starts the process."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="body validation", daemon=True)
            self._thread.start()
        result: Future[Reply | None] = Future()
        self._waiting.put((priority, next(self._order), call, result))
        return result

    def _run(self) -> None:
        while True:
            priority, _, call, result = self._waiting.get()
            if priority < 0:
                break
            fulfil(result, partial(self._ask, call))
            del call, result  # a long body is not kept while nothing happens
        if self._worker is not None:
            self._worker.end(0)
            self._worker = None

    def _ask(self, call: HttpCall | None) -> Reply | None:
        if self._worker is not None and not self._worker.alive:
            self._worker.end(0)
            self._worker = None
        if self._worker is None:
            try:
                self._worker = _WorkerProcess(self._state())
            except (EOFError, OSError) as error:
                log.error("the process that reads long bodies does not start: %s", error or "it has ended")
                message = "the process that reads long bodies does not start: try again in 2 s"
                raise ApiError(503, message, code="body_reader_lost", headers={"retry-after": "2"}) from None
        if call is None:
            return None
        try:
            return self._worker.ask(call)
        except (EOFError, OSError):
            self._worker.end(0)
            self._worker = None
            log.warning("a body of %d bytes took too much memory or time to read", len(call.body))
            raise ApiError(
                413, "reading the body takes too much memory or time: shorten it", code="body_too_large"
            ) from None


class _WorkerProcess(ChildProcess):
    """One process, which answers one call after another."""

    def __init__(self, state: bytes) -> None:
        """Raises EOFError or OSError if it does not start."""
        super().__init__(START_CODE, stdout=subprocess.DEVNULL)
        try:
            self.pipe.send_bytes(state)
            self.pipe.recv_bytes()  # it is ready; EOFError if it failed, with the reason on stderr
        except (EOFError, OSError):
            self.end(0)
            raise

    def ask(self, call: HttpCall) -> Reply | None:
        """Raises EOFError or OSError if the process has died or takes too long."""
        self.pipe.send_bytes(pickle.dumps(replace(call, body=b"")))
        self.pipe.send_bytes(call.body)  # not copied
        if not self.pipe.poll(MAX_SECONDS):
            raise EOFError
        return pickle.loads(self.pipe.recv_bytes())
