"""A tiny model behind a real server on the loopback interface, and behind ASGI only."""

import asyncio
import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.patience import PATIENCE_S
from tests.server.long_answers import unhurried
from tests.server.loop_clock import LoopClock
from tests.server.wire import over_the_wire
from twostroke.api.llm import LLM
from twostroke.engine.strokes import Program
from twostroke.errors import InvalidRequest
from twostroke.methods.method import Prompt
from twostroke.methods.plain import Plain
from twostroke.server.app import create_app
from twostroke.server.lifecycle import HttpServer, make_server
from twostroke.server.settings import Settings

WIRE = bool(os.environ.get("TWOSTROKE_TEST_WIRE"))  # whether engines are reached as those of other processes are
LOCAL = pytest.mark.skipif(WIRE, reason="reaches into the engine, or sends it what no other process has")

FAILING = [9, 9, 9]  # see `failing_program`


class ShortSleeps:
    """asyncio as uvicorn's loop uses it: a server of a test looks a hundred times a second whether it shall end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = ShortSleeps()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Serving:
    """A server that runs in a thread of this process."""

    llm: LLM
    server: HttpServer
    thread: threading.Thread
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url)

    @contextlib.contextmanager
    def leaving(self, body: dict[str, Any], path: str = "/v1/completions") -> Generator[None]:
        """A call whose client goes at the end of the block, whatever has come of the answer."""
        connection = http.client.HTTPConnection(self.url.partition("//")[2])
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        try:
            yield
        finally:
            connection.close()

    @property
    def state(self) -> Any:
        """What routes share: `engine`, `contexts`."""
        return self.server.config.app.state  # pyright: ignore

    @property
    def front(self) -> LLM:
        """The model as routes see it."""
        return self.state.engine.llm

    @property
    def pages_used(self) -> int:
        return self.llm.pool.num_used - self.llm.engine.cached_pages(self.llm.pool)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(llm: LLM, port: int = 0, **settings: Any) -> Generator[Serving]:
    """A server on a port of the loopback interface, a free one unless it is given. Answers of `LONG` do not end."""
    unhurried(llm)
    chosen: dict[str, Any] = {"grace_s": 0.5, "model_name": "tiny"}
    server = make_server(over_the_wire(llm) if WIRE else llm, Settings(**(chosen | settings)), "127.0.0.1", port)
    thread, url = started(server)
    running = Serving(llm, server, thread, url)
    try:
        yield running
    finally:
        running.stop()
        assert llm.engine.num_running + llm.engine.num_waiting == 0
        assert running.pages_used == 0, "pages were lost"


def started(server: HttpServer) -> tuple[threading.Thread, str]:
    """Run a server in a thread. Returns it and the server's address."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started)
    return thread, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


@contextlib.contextmanager
def client_of(server: HttpServer) -> Generator[httpx.Client]:
    """A client of a server that runs in a thread."""
    thread, url = started(server)
    try:
        with httpx.Client(base_url=url) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def eventually(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, on a busy machine too."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def open_tiny(tiny_directory: Callable[[str], Path]) -> Callable[..., LLM]:
    def opened(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1} | options
        return LLM(str(tiny_directory("llama")), **chosen)

    return opened


@pytest.fixture(scope="module")
def server(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    with serving(LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def loop_clock() -> Iterator[LoopClock]:
    """The clock of all event loops of this process."""
    clock = LoopClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.now)
        yield clock


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def reference(tiny_directory: Callable[[str], Path]) -> LLM:
    """The same model without a server, to compare with."""
    return LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)


@contextlib.asynccontextmanager
async def asgi(llm: LLM, **settings: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client of the application itself, without a socket."""
    chosen: dict[str, Any] = {"model_name": "tiny"} | settings
    app = create_app(over_the_wire(llm) if WIRE else llm, Settings(**chosen))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


@pytest.fixture
def failing_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of FAILING raises InvalidRequest, as one may that found out late."""
    sound = Plain.program

    def program(self: Plain, prompt: Prompt) -> Program:
        if list(prompt) == FAILING:
            raise InvalidRequest("this program fails")
        return (yield from sound(self, prompt))

    monkeypatch.setattr(Plain, "program", program)
