"""A server as a child process, on a free port of the loopback interface."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peer.environments import environment, last_words, log_file
from benchmarks.peer.processes import await_end, cpu_seconds, tree

PATIENCE_S = 900.0  # vLLM compiles for minutes the first time


class ServerFailed(Exception):
    """The server ended, was not ready in time, or did not answer as it should; the message is one line."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class ServerProcess:
    """A context manager: inside of it the server answers at `url`.

    Attributes:
        log: file with its stdout and stderr.
    """

    def __init__(
        self, name: str, command: Sequence[str], work: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        """The port replaces "{port}" in `command`."""
        self.port = free_port()
        self.name, self.url, self.log = name, f"http://127.0.0.1:{self.port}", log_file(work, f"server-{name}")
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [part.format(port=self.port) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(variables or {}),
                cwd=work,
            )

    def __enter__(self) -> ServerProcess:
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not _ready(self.port):
                if self._process.poll() is not None:
                    raise ServerFailed(f"{self.name} ended: {last_words(self.log)} (more in {self.log.name})")
                if time.monotonic() > deadline:
                    raise ServerFailed(f"{self.name} was not ready in {PATIENCE_S:.0f} s (more in {self.log.name})")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """Processor time so far, including that of child processes."""
        return cpu_seconds(tree(self.pid))

    def stop(self, patience_s: float = 60.0) -> int:
        """Ask the server to end, and kill it if it does not in time. Returns the exit status, below 0 for a signal."""
        children = tree(self.pid)[1:]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        await_end(children)
        return self._process.wait()

    def kill(self) -> None:
        """End the server by SIGKILL."""
        children = tree(self.pid)[1:]
        self._process.kill()
        self._process.wait()
        await_end(children)


def our_server(work: Path, *options: str, variables: Mapping[str, str] | None = None) -> ServerProcess:
    """`twostroke serve` with these options, on a free port."""
    command = [sys.executable, "-m", "twostroke", "serve", "--port", "{port}", *options]
    return ServerProcess("twostroke", command, work, variables)


def bench_serve(url: str, *options: str) -> dict[str, Any]:
    """The figures of `twostroke bench serve` with these options. Raises ServerFailed with its last words."""
    command = [sys.executable, "-m", "twostroke", "bench", "serve", "--url", url, "--json", *options]
    done = subprocess.run(command, env=environment({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerFailed(f"bench serve: {(done.stderr.strip().splitlines() or ['no report'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _ready(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as http:
        try:
            http.request("GET", "/health")
            return http.getresponse().status == 200
        except (OSError, HTTPException):
            return False
