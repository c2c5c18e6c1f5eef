"""A real server of Redis' protocol on loopback, and a proxy before it that can be slow, silent, or drop connections."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.ports import kept_port

BINARY = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A context manager. The server keeps nothing on disk, so a restart has lost everything."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self.folder, self.options, self.tls = folder, options, tls
        self._port = kept_port()
        self.port = 0  # once it was started
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def __enter__(self) -> "RedisServer":
        self.port = self._port.__enter__()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._port.__exit__(None, None, None)

    def start(self) -> None:
        assert BINARY is not None
        port = ["--port", "0", "--tls-port", str(self.port)] if self.tls else ["--port", str(self.port)]
        command = [BINARY, *port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self.options], stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server did not start: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self, on: bool = True) -> None:
        """Stop it, so that it accepts bytes and answers none; or let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if on else signal.SIGCONT)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as one:
            if self.tls:
                return True
            one.settimeout(PATIENCE_S)
            one.sendall(b"PING\r\n")
            return one.recv(1) in (b"+", b"-")
        return False


class Proxy:
    """Passes bytes on to a server's port. A context manager.

    Attributes:
        bytes_per_s: of what the server sends; None: no limit.
        silent: bytes are taken and not passed on.
        cut_after: connections are dropped once the server has sent this many bytes; None: never.
        connections: number of them so far.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.bytes_per_s: float | None = None
        self.silent = False
        self.cut_after: int | None = None
        self.connections = 0
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """End all connections."""
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open = []

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._to), PATIENCE_S)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open += [client, server]
            for source, target, back in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass, args=(source, target, back), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, back: bool) -> None:
        passed = 0
        with suppress(OSError), source:
            while data := source.recv(1 << 14 if back and self.bytes_per_s else 1 << 18):
                if self.silent:
                    continue
                if back and self.bytes_per_s is not None:
                    self._ended.wait(len(data) / self.bytes_per_s)
                if back and self.cut_after is not None:
                    data = data[: max(0, self.cut_after - passed)]
                passed += len(data)
                target.sendall(data)
                if back and self.cut_after is not None and passed >= self.cut_after:
                    break
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
