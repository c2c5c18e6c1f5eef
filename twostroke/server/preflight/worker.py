"""The process that tries out long bodies: the server's routes, over an engine that computes nothing."""

import asyncio
import contextlib
import gc
import os
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

from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.model import Model
from twostroke.engine.request import Request
from twostroke.methods import METHODS, Method, load_installed
from twostroke.server.app import routes_app
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.errors import ApiError
from twostroke.server.exchange import Exchange
from twostroke.server.grammar import Grammars
from twostroke.server.http.surrogates import refuse_halves
from twostroke.server.observability.metrics import Metrics
from twostroke.server.preflight.supervisor import Call, Facts, Reply
from twostroke.server.refusals import refused

T = TypeVar("T")
NICE = 10  # running streams come first
MOST_BYTES = 1 << 30  # of memory for one body
# Lists and objects, and commas: JSON of more takes the server's process too long to read, should it pass.
MOST_CONTAINERS, MOST_ITEMS = 20_000, 300_000


class Passed(Exception):
    """The call is one for the engine."""


class DryEngine(AsyncEngine):
    """What routes see of an engine, up to the point where it would do something."""

    def __init__(self, facts: Facts) -> None:  # the base class would start an engine
        self.llm = LLM.__new__(LLM)
        vars(self.llm).update(facts.llm)
        self.llm.model = Model.__new__(Model)
        compiled = SimpleNamespace(config=facts.llm["config"])
        vars(self.llm.model).update(name=facts.llm["name"], pool=facts.llm["pool"], compiled=compiled)
        self.settings, self.name, self.created = facts.settings, facts.name, facts.created
        self.metrics = Metrics(self.llm)
        self.grammars = Grammars(self.llm.tokenizer, self.llm.config.vocab_size)
        self.draining, self._taken, self._exchanges = False, 0, set()

    @property
    def alive(self) -> bool:
        return True

    @property
    def failure(self) -> None:
        return None

    def begin(self, exchange: Exchange, requests: list[Request], timeout_s: float | None) -> None:
        raise Passed

    async def aside(self, action: Callable[[], T]) -> T:
        return action()

    async def between_steps(self, action: Callable[[Engine], Any]) -> Any:
        raise Passed

    def needs_state(self) -> None:
        raise Passed


def main(file: int) -> None:
    """Answer calls that come by a connection until it is closed."""
    os.nice(NICE)
    with contextlib.suppress(EOFError, OSError), Connection(file) as pipe:  # the server has ended
        app = _app(pickle.loads(pipe.recv_bytes()))
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, -1))
        gc.freeze()
        pipe.send_bytes(b"ready")
        with asyncio.Runner() as runner:
            while True:
                call: Call = replace(pickle.loads(pipe.recv_bytes()), body=pipe.recv_bytes())
                pipe.send_bytes(pickle.dumps(runner.run(answer(app, call))))


def _app(facts: Facts) -> FastAPI:
    load_installed()
    app = routes_app(DryEngine(facts))
    app.add_exception_handler(Passed, _passed)
    return app


def _elsewhere(**_: Any) -> Method:
    """A technique that only the server's process has loaded."""
    raise Passed


async def _passed(http: HttpRequest, _: Exception) -> Response:
    http.scope["passed"][0] = True
    return Response()


async def answer(app: FastAPI, call: Call) -> Reply | None:
    """The response of the application; None if the call is one for the engine, or if the server must say why not."""
    try:
        _refuse(call.body)
    except ApiError as error:
        refusal = refused(call.scope["path"], error)
        return Reply(refusal.status_code, refusal.raw_headers, bytes(refusal.body))
    for name in call.methods - METHODS.keys():
        METHODS[name] = _elsewhere  # pyright: ignore[reportArgumentType]
    messages = [{"type": "http.request", "body": call.body, "more_body": False}]
    passed, headers, body, status = [False], [], bytearray(), 500

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        else:
            body.extend(message.get("body", b""))

    try:
        await app({**call.scope, "facts": {}, "passed": passed}, receive, send)
    except MemoryError:
        raise
    except Exception:
        return None
    return None if passed[0] or status >= 500 else Reply(status, headers, bytes(body))


def _refuse(body: bytes) -> None:
    """Raise ApiError for a body that must not even be read."""
    if body.count(b",") > MOST_ITEMS or body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:
        message = f"the body has more than {MOST_CONTAINERS:,} lists and objects, or {MOST_ITEMS:,} items: shorten it"
        raise ApiError(413, message, code="body_too_large")
    refuse_halves(body)
