"""An engine's process: it opens a model, does what its server asks, tells it of every step, and never outlives it."""

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from twostroke.api.llm import LLM
from twostroke.engine.engine_thread import Update
from twostroke.engine.request import Request
from twostroke.engine.step import Chunk, StepReport
from twostroke.errors import EngineFailed, InvalidRequest, TwostrokeError
from twostroke.kv.kv_events import KvEventLog
from twostroke.methods import load_installed, load_module
from twostroke.server.engine_process.codec import EngineCodec
from twostroke.server.engine_process.hollow import HollowState
from twostroke.server.engine_process.messages import (
    VERSION,
    Ask,
    AskReply,
    Beat,
    Begin,
    Cancel,
    Failed,
    News,
    Opened,
    OpenOptions,
    Release,
    RequestFacts,
    RequestNews,
    Stop,
)
from twostroke.server.engine_process.step_note import StepNote
from twostroke.server.observability.logs import configure
from twostroke.server.served_engine import LocalEngine

log = logging.getLogger(__name__)
BEAT_S = 0.5
PR_SET_PDEATHSIG = 1  # prctl(2)
FAILED = 70  # exit code: a step has failed, or the model cannot be opened; the server was told why
SWITCH_INTERVAL_S = 0.001  # for sys.setswitchinterval: with Python's 0.005 a thread that reads messages delays steps


class EngineHost:
    """Serves one connection with one model."""

    def __init__(self, llm: LLM, pipe: Connection, note: StepNote, generation: int, tells_pages: bool = False) -> None:
        self._index_events = KvEventLog(llm.model.index) if tells_pages and llm.model.index is not None else None
        self._engine, self._pipe, self._note = LocalEngine(llm), pipe, note
        self._codec = EngineCodec(llm, generation)
        self._sending = threading.Lock()
        self._running: dict[int, Request] = {}
        self._numbers: dict[Request | None, int] = {}
        self._told: dict[int, int] = {}  # times of each request's tokens that were sent
        self._steps: list[tuple[float, StepReport]] = []
        self._over = threading.Event()

    def serve(self) -> bool:
        """Serve until the server says stop (True), or is gone (False). Raises EngineFailed if a step fails."""
        llm, stopped, message = self._engine.llm, False, None
        self._engine.start(self._publish, self._stepped)
        llm.engine.before_step = self._note_step
        self._pipe.send_bytes(pickle.dumps(Opened(HollowState.of(llm))))  # the other side has nothing by name yet
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        try:
            while not isinstance(message := self._codec.loads(self._pipe.recv_bytes()), Stop):
                self._obey(message)
                message = None  # a value that it names is not kept while nothing comes
            stopped = True
        except (EOFError, OSError):
            pass
        self._over.set()
        if (failure := self._engine.failure) is not None:
            raise failure
        self._engine.stop()
        if isinstance(message, Stop) and message.comes_back:
            stores = [model.backing_stores for model in llm.engine.models.values()]
            for one in stores:
                if one is not None:
                    one.write_rest()
        return stopped

    def _obey(self, message: object) -> None:
        match message:
            case Begin():
                self._begin(message)
            case Cancel(id) if id in self._running:
                self._engine.cancel(self._running[id])
            case Ask(id, action, between_steps):
                ask: Callable[[Any], Future[Any]] = self._engine.call if between_steps else self._engine.beside_steps
                ask(action).add_done_callback(partial(self._reply, id))
            case Release(value):
                self._codec.release(value)
            case _:  # of a request that is done
                pass

    def _begin(self, message: Begin) -> None:
        tokenizer = self._engine.llm.tokenizer
        request = Request(message.program, message.params, tokenizer, message.prompt_tokens)
        request.seed, request.priority, request.name = message.seed, message.priority, message.name
        request.cache_salt, request.first_choice = message.salt, message.first_choice
        request.timings.arrival = message.arrival
        if any(message.given):
            request.take_over(*message.given)
        self._running[message.id], self._told[message.id] = request, 0
        self._numbers[request] = message.id
        self._engine.submit(request, message.id)

    def _note_step(self, chunks: Sequence[Chunk]) -> None:
        """Called by the engine before a step; its requests are those that the step may be ended by."""
        known = {self._numbers.get(chunk.choice.request_if_kept) for chunk in chunks}
        self._note.write([number for number in known if number is not None])

    def _stepped(self, seconds: float, report: StepReport) -> None:
        self._note.write(())
        self._steps.append((seconds, report))

    def _publish(self, updates: list[Update]) -> None:
        """Called by the engine's thread. What an engine that fails says of its requests is for nobody: they go on."""
        if (failure := self._engine.failure) is not None:
            self._over.set()
            self._send(Failed(EngineFailed(str(failure))))
            with socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.shutdown(socket.SHUT_RDWR)  # wakes `serve`
            return
        steps, self._steps = self._steps, []
        pages = [] if self._index_events is None else self._index_events.take()
        self._send(News([self._news(update) for update in updates], steps, pages))

    def _news(self, update: Update) -> RequestNews:
        number, request, times = update.owner, update.request, update.request.timings.tokens
        told = self._told[number]
        self._told[number] = len(times)
        facts = self._facts(request) if update.done or (update.tokens and not told) else None
        if update.done:
            del self._running[number], self._told[number], self._numbers[request]
        return RequestNews(number, update.tokens, tuple(times[told:]), update.done, update.error, facts)

    def _facts(self, request: Request) -> RequestFacts:
        times = request.timings
        return RequestFacts(
            times.scheduled, times.finished, times.loading, times.in_bulk, request.cancelled,
            request.prefilled_tokens, request.kv_bytes, request.preemptions, request.cached_by_tier,
            request.prompt_scores, request.result if request.done else None,
        )  # fmt: skip

    def _reply(self, id: int, done: "Future[Any]") -> None:
        error = done.exception()
        self._send(AskReply(id, None if error else done.result(), error if isinstance(error, Exception) else None))

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self._send(Beat(self._engine.step_age_s))

    def _send(self, message: object) -> None:
        try:
            data = self._codec.dumps(message)
        except Exception as error:
            log.warning("a message of the engine's process cannot be sent: %s", error)
            data = self._codec.dumps(_without_values(message))
        try:
            with self._sending:
                self._pipe.send_bytes(data)
        except OSError:  # the server is gone, which `serve` notices
            return


def _without_values(message: object) -> object:
    """The same without what a technique, or a library, has made."""
    match message:
        case AskReply(id, _, _):
            return AskReply(id, None, InvalidRequest("the result cannot leave the engine's process"))
        case News(requests, steps, pages):
            return News([_bare(one) for one in requests], steps, pages)
        case _:
            raise TypeError(type(message).__name__)


def _bare(one: RequestNews) -> RequestNews:
    error = None if one.error is None else RuntimeError(f"{type(one.error).__name__}: {one.error}")
    facts = None if one.facts is None else replace(one.facts, result=None)
    return RequestNews(one.id, one.tokens, one.times, one.done, error, facts)


def main(file: int, note: int, parent: int) -> None:
    """Serve the connection of this file descriptor until it is closed; `parent` is the server's process."""
    _die_with(parent)
    for sig in (signal.SIGINT, signal.SIGTERM):  # the server says when to end; a service manager signals both
        signal.signal(sig, signal.SIG_IGN)
    with Connection(file) as pipe:
        try:
            options: OpenOptions = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the server has ended before it was ready
            sys.exit(0)
        try:
            if options.log_format == "json":
                configure("json")
            if options.version != VERSION:
                raise EngineFailed("this installation was changed while the server ran: start the server again")
            if options.cores:
                os.sched_setaffinity(0, options.cores)
            load_installed()
            for source in options.methods:
                load_module(source)
            llm = options.opener(**options.arguments)
        except (TwostrokeError, OSError, MemoryError) as error:
            told = error if isinstance(error, TwostrokeError) else EngineFailed(f"{type(error).__name__}: {error}")
            pipe.send_bytes(pickle.dumps(Failed(told)))
            sys.exit(FAILED)
        if options.log_format == "text":
            configure("text")  # from here on: until now people read notes
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            stopped = EngineHost(llm, pipe, StepNote(note), options.generation, options.tells_pages).serve()
        except EngineFailed:
            os._exit(FAILED)
        if stopped:
            llm.close()  # what waits to be written to a tier is written
    os._exit(0)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the server's ends, however it does (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
