"""Listening until a signal: uvicorn, with an end that lets running requests finish."""

import socket
from typing import Any

import uvicorn

from twostroke.llm import LLM
from twostroke.server.app import create_app
from twostroke.server.settings import Settings

FAREWELL_S = 5  # to send errors to open connections, once the grace time is over


class Server(uvicorn.Server):
    """On SIGTERM or SIGINT it accepts nothing new, and running requests may finish within the grace time."""

    def __init__(self, config: uvicorn.Config, app: Any, grace_s: float) -> None:
        super().__init__(config)
        self._app, self._grace_s = app, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn on a signal."""
        self._app.state.engine.drain(self._grace_s)
        await super().shutdown(sockets)


def make_server(llm: LLM, settings: Settings, host: str, port: int) -> Server:
    """A server for one model; `run` serves until a signal."""
    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        host,
        port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace_s) + FAREWELL_S,
    )
    return Server(config, app, settings.grace_s)
