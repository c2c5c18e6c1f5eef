"""The server's process: its start, and an end at a signal that lets requests finish."""

import gc
import os
import signal
import socket
import ssl
import sys
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from twostroke.api.llm import LLM
from twostroke.engine.memory_budget import MemoryBudget
from twostroke.server.app import DEFAULT_CONTEXT_BYTES, create_app
from twostroke.server.http.protocol import protocol_class
from twostroke.server.listener import MAX_PENDING_CONNECTIONS
from twostroke.server.served_engine import ServedEngine
from twostroke.server.settings import Settings
from twostroke.system.service_manager import notify

FAILURE_GRACE_S = 3  # /health is still answered this long after the engine has failed
SERVER_BYTES = 224 << 20  # of this process, connections, and the worker that validates bodies (docs/production.md)
CLOSE_S = 5  # for sending errors to open connections once the grace time is over


class HttpServer(uvicorn.Server):
    """On SIGTERM or SIGINT it accepts nothing new, and running requests may finish within the grace time.

    With a drain delay it serves as before for that time, and only its readiness says 503: orchestrators and load
    balancers go on sending calls for seconds after the signal. A second signal ends the process at once, with the exit
    code 128 + its number.
    """

    def __init__(self, config: uvicorn.Config, app: Any, settings: Settings) -> None:
        super().__init__(config)
        self._app, self._settings = app, settings
        self._drain_at: float | None = None  # when it stops to accept, once a signal has come
        self.lost_at: float | None = None  # when the engine was found to have failed

    def warm_up(self) -> None:
        """Prepare what the first calls would wait for, and the process for being a server."""
        self._app.state.engine.warm_up()
        gc.collect()
        gc.freeze()  # what is loaded stays: a collection that visited it would stop streams for 100 ms

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server. It ends when the engine has failed."""
        ended, engine = await super().on_tick(counter), self._app.state.engine
        if engine.lost and self.lost_at is None:
            self.lost_at = time.monotonic()
        if self._drain_at is not None:
            engine.leaving = True
            ended = ended or time.monotonic() >= self._drain_at
        return ended or (self.lost_at is not None and time.monotonic() > self.lost_at + FAILURE_GRACE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn on a signal."""
        self._app.state.engine.drain(self._settings.grace_s)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on a signal."""
        if self.should_exit or self._drain_at is not None:
            end_at_once(sig, frame)
        notify("STOPPING=1")
        self._drain_at = time.monotonic() + self._settings.drain_delay_s
        self.should_exit = self._settings.drain_delay_s == 0


def end_at_once(sig: int, _: FrameType | None = None) -> None:
    """End the process without any cleaning up; nothing is stored that would need it."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # a progress bar has hidden the cursor
    os._exit(128 + sig)


def end_at_signals() -> None:
    """Let SIGINT and SIGTERM end the process at once from here on, without a traceback."""
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, end_at_once)


def _context_bytes(memory: MemoryBudget, asked: int | None) -> int:
    """The bytes that contexts may hold. Raises InvalidRequest if more were asked for than a control group leaves."""
    room = memory.left_bytes // 2 if memory.hard else DEFAULT_CONTEXT_BYTES
    chosen = max(0, min(DEFAULT_CONTEXT_BYTES, room)) if asked is None else asked
    memory.add("contexts", chosen)
    memory.require("give contexts less with --max-context-bytes, or the pool less with --kv-bytes")
    return chosen


def make_server(
    model: LLM | ServedEngine, settings: Settings, host: str | None, port: int, tls: ssl.SSLContext | None = None
) -> HttpServer:
    """A server for one model; `run` serves until a signal, at the host and port or at the sockets that it is given.

    `host` is None for a unix socket. What browsers may send is checked where they can: at hosts.
    """
    memory = (model if isinstance(model, LLM) else model.llm).memory
    settings = replace(settings, max_context_bytes=_context_bytes(memory, settings.max_context_bytes))
    return http_server(create_app(model, settings, host), settings, host, port, tls)


def http_server(
    app: FastAPI, settings: Settings, host: str | None, port: int, tls: ssl.SSLContext | None = None
) -> HttpServer:
    """A server of an application whose `state.engine` is what it serves."""
    config = uvicorn.Config(
        app,
        host or "",
        port,
        http=protocol_class(settings.header_timeout_s, settings.write_timeout_s),
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=MAX_PENDING_CONNECTIONS,
        timeout_keep_alive=settings.keep_alive_s,  # pyright: ignore[reportArgumentType] (seconds of a timer)
        timeout_graceful_shutdown=int(settings.grace_s) + CLOSE_S,
    )
    config.load()  # which would make a context of its own
    config.ssl = tls
    return HttpServer(config, app, settings)
