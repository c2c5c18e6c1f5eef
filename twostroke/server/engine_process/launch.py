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
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

from twostroke.server.engine_process.step_note import StepNote

if TYPE_CHECKING:
    from twostroke.server.engine_process.messages import OpenOptions

PATH_CODE = "import sys; sys.path[:] = {path!r}\n"
START_CODE = """
try:
    from twostroke.server.engine_process.host import main
    __import__({opener!r})
except ModuleNotFoundError:
    sys.exit(1)  # the server lacks it too, and says so
main({file}, {note}, {parent})
"""
BUFFER_BYTES = 4 << 20  # of the sockets: a step does not wait for a server that is busy for a moment
SPARE_BYTES = 48 << 20  # of a process that waits: 34 MiB of its own were measured, and 20 that all such share
DELAY_S = 5.0  # after one was taken, so that the next one's imports do not slow the opening of the model
STOP_S = 60.0  # seconds that it may take to close the model, which writes what waits for a tier


class Launch(Protocol):
    """Starts a process, the one with this number; `kv_bytes`: what its pool takes where the options leave it open."""

    def __call__(self, generation: int, kv_bytes: int | None = None) -> "EngineProcess": ...


class ChildProcess:
    """A process that runs some Python, and a connection to it."""

    def __init__(self, code: str, *files: int, stdout: int | None = None, **names: object) -> None:
        """`code` has a place for `file`, its end of the connection, and for `names`; `files` are open there too."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        with theirs:
            code = (PATH_CODE + code).format(path=sys.path, file=theirs.fileno(), **names)
            # A new session, so that Ctrl-C in a terminal reaches the server alone.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(), *files),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.pipe, self._sending = Connection(ours.detach()), threading.Lock()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, data: bytes) -> None:
        """Raises OSError if it has ended. Any thread may call it."""
        with self._sending:
            self.pipe.send_bytes(data)

    def kill(self) -> None:
        """End it at once, which who reads from it will see."""
        self._process.kill()

    def end(self, patience_s: float) -> str:
        """Wait until it has ended, and end it then. Returns how it ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        code = self._process.wait()
        with self._sending:  # else what another thread sends could reach a file that gets the number of this one
            self.pipe.close()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


class EngineProcess(ChildProcess):
    """One process. It imports what it needs, and waits for `open`."""

    def __init__(self, opener: str = __name__) -> None:
        """`opener`: the module that will open the model, to be imported now."""
        self.note = StepNote()
        note = self.note.file
        super().__init__(START_CODE, note, note=note, parent=os.getpid(), opener=opener)

    def open(self, options: "OpenOptions") -> None:
        """Let it open its model."""
        with suppress(OSError):  # it has ended already, which whoever reads will see
            self.send(pickle.dumps(options))

    def end(self, patience_s: float) -> str:
        how = super().end(patience_s)
        os.close(self.note.file)
        return how


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


class SpareProcess:
    """Keeps one process that has imported everything, so that an engine that dies is away for less long.

    A process ends with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so one thread starts all of them,
    and lives as long as the server does.
    """

    def __init__(
        self, make: Callable[[], EngineProcess] = EngineProcess, count: int = 1, delay_s: float = DELAY_S
    ) -> None:
        """Start the first ones, `count` of them: so many engines are opened first."""
        self._waiting = [make() for _ in range(count)]
        self._make, self._delay_s = make, delay_s
        self._taken = threading.Semaphore(0)
        self._lock = threading.Lock()

    def keep(self) -> None:
        """From now on start another one after each that was taken."""
        threading.Thread(target=self._run, name="spare process", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process that waits, if there is one."""
        return next((one.pid for one in self._waiting), None)

    def take(self) -> EngineProcess:
        """The one that waits, or a new one if it is not there."""
        with self._lock:
            taken = self._waiting.pop() if self._waiting else None
        self._taken.release()
        if taken is not None and taken.alive:
            return taken
        if taken is not None:
            taken.end(0)
        return self._make()

    def _run(self) -> None:
        while True:
            self._taken.acquire()
            time.sleep(self._delay_s)
            if not self._waiting:
                made = self._make()
                with self._lock:
                    self._waiting.append(made)
