"""Starts an engine's process, and says why one has ended.

The file imports nothing that takes long: the first process begins while the server's own imports go on.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from twostroke.server.engine_process.step_note import StepNote

if TYPE_CHECKING:
    from twostroke.server.engine_process.messages import OpenOptions

START_CODE = """
import sys
sys.path[:] = {path!r}
try:
    from twostroke.server.engine_process.main import main
    __import__({opener!r})
except ModuleNotFoundError:
    sys.exit(1)  # the server lacks it too, and says so
main({file}, {note}, {parent})
"""
BUFFER_BYTES = 4 << 20  # of the sockets: a step does not wait for a server that is busy for a moment
STOP_S = 60.0  # seconds that it may take to close the model, which writes what waits for a tier


class Launched(Protocol):
    """A process that was started, or what stands for one in tests."""

    pipe: Connection
    note: StepNote
    pid: int

    def send(self, data: bytes) -> None:
        """Raises OSError if it has ended. Any thread may call it."""
        ...

    def kill(self) -> None:
        """End it at once, which who reads from it will see."""
        ...

    def end(self, patience_s: float) -> str:
        """Wait until it has ended, and end it then. Returns how it ended, in words."""
        ...


class Launch(Protocol):
    """Starts a process, the one with this number; `kv_bytes`: what its pool takes where the options leave it open."""

    def __call__(self, generation: int, kv_bytes: int | None = None) -> Launched: ...


class EngineProcess:
    """One process. It imports what it needs, and waits for `open`."""

    def __init__(self, opener: str = __name__) -> None:
        """`opener`: the module that will open the model, to be imported now."""
        self.note = StepNote()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            files = {"file": theirs.fileno(), "note": self.note.file}
            code = START_CODE.format(path=sys.path, parent=os.getpid(), opener=opener, **files)
            # A new session, so that Ctrl-C in a terminal reaches the server alone.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(), self.note.file),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.pipe, self._sending = Connection(ours.detach()), threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def open(self, options: "OpenOptions") -> None:
        """Let it open its model."""
        with suppress(OSError):  # it has ended already, which whoever reads will see
            self.send(pickle.dumps(options))

    def send(self, data: bytes) -> None:
        with self._sending:
            self.pipe.send_bytes(data)

    def kill(self) -> None:
        self._process.kill()

    def end(self, patience_s: float) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        code = self._process.wait()
        with self._sending:  # else what another thread sends could reach a file that gets the number of this one
            self.pipe.close()
        os.close(self.note.file)
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


def launch_of(options: "OpenOptions", take: Callable[[], EngineProcess] = EngineProcess) -> Launch:
    """Starts processes with these options; `take` gives one that waits for them."""

    def launch(generation: int, kv_bytes: int | None = None) -> EngineProcess:
        arguments = dict(options.arguments)
        if options.one_pool and arguments.get("kv_bytes") is None:
            arguments["kv_bytes"] = kv_bytes
        process = take()
        process.open(replace(options, generation=generation, arguments=arguments))
        return process

    return launch
