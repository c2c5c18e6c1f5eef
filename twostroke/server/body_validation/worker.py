"""The process that tries out long bodies: the server's routes, over an engine that computes nothing."""

import asyncio
import contextlib
import gc
import pickle
import resource
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from starlette.types import Message

from twostroke.api.llm import LLM
from twostroke.api.reasoning.reasoning import Reasoning
from twostroke.engine.engine import Engine
from twostroke.engine.request import Request
from twostroke.methods import METHODS, Method, load_installed
from twostroke.server.active_call import ActiveCall
from twostroke.server.app import routes_app
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.body_validation.supervisor import HttpCall, Reply, WorkerState
from twostroke.server.error_responses import error_response
from twostroke.server.errors import ApiError
from twostroke.server.grammar import Grammars
from twostroke.server.http.call_log import CallLog
from twostroke.server.http.surrogates import refuse_lone_surrogates
from twostroke.system.priority import yield_cpu

T = TypeVar("T")
NICENESS = 10  # running streams come first
MAX_MEMORY_BYTES = 1 << 30  # of memory for one body
# Lists and objects, and commas: JSON of more takes the server's process too long to read, should it pass.
MAX_CONTAINERS, MAX_ITEMS = 20_000, 300_000


class NeedsEngine(Exception):
    """The call is one for the engine."""


class DryEngine(AsyncEngine):
    """An engine for routes that computes nothing: where it would, `NeedsEngine` ends the call."""

    def __init__(self, state: WorkerState) -> None:  # the base class would start an engine
        self.llm = state.llm.llm_of()
        self.served: Any = SimpleNamespace(parts=(), failure=None)
        self.settings, self.name, self.created = state.settings, state.name, state.created
        self.metrics: Any = SimpleNamespace(rejected=lambda reason: None)
        self.grammars = Grammars(self.llm.tokenizer, self.llm.config.vocab_size)
        self.reasoning = Reasoning.of(self.llm.tokenizer, self.llm.config.vocab_size, state.settings.reasoning_parser)
        self.leaving = self.draining = False
        self._choices_in_flight, self._active_calls = 0, set()
        self.max_running = state.max_running

    def submit(self, active_call: ActiveCall, requests: list[Request], timeout_s: float | None) -> None:
        raise NeedsEngine

    async def run_in_thread(self, action: Callable[[], T]) -> T:
        return action()

    async def between_steps(self, action: Callable[[Engine], Any], replica: int | None = None) -> Any:
        raise NeedsEngine

    async def beside_steps(self, action: Callable[[LLM], Any], replica: int | None = None) -> Any:
        raise NeedsEngine

    async def everywhere(self, action: Callable[[Any], Any], *, between_steps: bool = False) -> list[Any]:
        raise NeedsEngine

    def require_engine_process(self) -> None:
        raise NeedsEngine


def main(file: int) -> None:
    """Answer calls that come by a connection until it is closed."""
    yield_cpu(NICENESS)
    with contextlib.suppress(EOFError, OSError), Connection(file) as pipe:  # the server has ended
        app = _app(pickle.loads(pipe.recv_bytes()))
        _limit_memory()
        gc.freeze()
        pipe.send_bytes(b"ready")
        with asyncio.Runner() as runner:
            while True:
                call: HttpCall = replace(pickle.loads(pipe.recv_bytes()), body=pipe.recv_bytes())
                pipe.send_bytes(pickle.dumps(runner.run(answer(app, call))))


def _limit_memory() -> None:
    """Let the process take `MAX_MEMORY_BYTES` more than it has (Linux)."""
    with contextlib.suppress(FileNotFoundError):
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + MAX_MEMORY_BYTES, -1))


def _app(state: WorkerState) -> FastAPI:
    load_installed()
    app = routes_app(DryEngine(state))
    app.add_exception_handler(NeedsEngine, _mark_for_engine)
    return app


def _unknown_method(**_: Any) -> Method:
    """A technique that only the server's process has loaded."""
    raise NeedsEngine


async def _mark_for_engine(http: HttpRequest, _: Exception) -> Response:
    http.scope["passed"][0] = True
    return Response()


async def answer(app: FastAPI, call: HttpCall) -> Reply | None:
    """The response of the application; None if the call is one for the engine, or if the server must say why not."""
    for name in call.methods - METHODS.keys():
        METHODS[name] = _unknown_method  # pyright: ignore[reportArgumentType]
    messages = [{"type": "http.request", "body": call.body, "more_body": False}]
    passed, reply = [False], Reply()

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Message) -> None:
        reply.append(message)

    try:
        _refuse_oversized(call.body)
        await app({**call.scope, "call_log": CallLog("", ""), "passed": passed}, receive, send)
    except MemoryError:
        raise
    except ApiError as error:
        await error_response(call.scope["path"], error)(call.scope, receive, send)
    except Exception:
        return None
    return reply if reply and not passed[0] and reply[0]["status"] < 500 else None


def _refuse_oversized(body: bytes) -> None:
    """Raise ApiError for a body that must not even be read."""
    if body.count(b",") > MAX_ITEMS or body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        message = f"the body has more than {MAX_CONTAINERS:,} lists and objects, or {MAX_ITEMS:,} items: shorten it"
        raise ApiError(413, message, code="body_too_large")
    refuse_lone_surrogates(body)
