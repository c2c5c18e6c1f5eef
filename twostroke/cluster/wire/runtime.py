"""What the wire needs of the machine: time, threads and connections. Whatever waits in the wire, waits here.

A simulation puts its own in their place: the same protocol then runs on a virtual clock, over a network that fails.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from twostroke.system.daemon_threads import DaemonThreads

Address = tuple[str, int]


class ConditionLike(Protocol):
    """The part of `threading.Condition` that the wire uses."""

    def __enter__(self) -> Any: ...

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> Any: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None, /) -> bool: ...

    def notify_all(self) -> None: ...


class JobThreads(Protocol):
    """The part of `DaemonThreads` that the wire uses."""

    def submit(self, job: Callable[[], object]) -> None: ...

    def close(self, limit_s: float) -> bool: ...


class ThreadLike(Protocol):
    """The part of `threading.Thread` that the wire uses."""

    def join(self, timeout: float | None = None) -> None: ...


class Runtime(Protocol):
    """Connections and listeners are sockets, or behave like them."""

    cores: int | None  # for which threads are started that make digests (`page_digests`); None: those of the machine
    # a random name that all processes of the machine find, until it is started again; None if there is none
    machine: str | None

    def now(self) -> float:
        """Seconds on a clock that never goes backwards."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def condition(self) -> ConditionLike: ...

    def workers(self, name: str, count: int) -> JobThreads:
        """At most `count` threads, which take jobs in order."""
        ...

    def start(self, name: str, job: Callable[[], object]) -> ThreadLike: ...

    def connect(self, address: Address, limit_s: float) -> socket.socket:
        """Raises OSError."""
        ...

    def listen(self, address: Address) -> socket.socket:
        """Raises OSError."""
        ...

    def readable(self, connection: socket.socket) -> bool:
        """Whether bytes, or the end of the connection, are there to be received. Never waits."""
        ...


class SystemRuntime:
    """This machine; implements `Runtime`."""

    cores: int | None = None

    def __init__(self) -> None:
        self.machine: str | None = None
        with suppress(OSError):
            self.machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def workers(self, name: str, count: int) -> DaemonThreads:
        return DaemonThreads(name, count)

    def start(self, name: str, job: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=job, name=name, daemon=True)
        thread.start()
        return thread

    def connect(self, address: Address, limit_s: float) -> socket.socket:
        return socket.create_connection(address, limit_s)

    def listen(self, address: Address) -> socket.socket:
        return socket.create_server(address)

    def readable(self, connection: socket.socket) -> bool:
        try:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):  # it was closed
            return True


SYSTEM = SystemRuntime()
