"""One connection to a server that speaks Redis' protocol, with a deadline for all that a call does on it.

The package `redis` opens it: addresses, TLS, passwords. Commands and replies then go over it here, because its timeouts
are for each piece that comes, not for the whole call, and because pages are read into the memory where they belong.
Protocol: RESP2, https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

import io
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis import RedisError

STALL_S = 1.0  # nothing comes or goes for this long: the server hangs
PATIENCE_S = 0.2  # a shorter silence says nothing about the server, even if the call's time is over
PIECE_BYTES = 256 << 10  # sent at once
BUFFER_BYTES = 64 << 10
MAX_VALUE_BYTES = 512 << 20  # of one value: the servers' own limit
MAX_DEPTH = 2  # arrays in arrays, as SCAN replies
Command = tuple[bytes | str | int, ...]


class ServerUnavailable(Exception):
    """The server cannot be reached, does not answer, or answers nonsense."""


class CallTimedOut(Exception):
    """The call's time is over, which is not known to be the server's fault."""

    def __init__(self, heard: bool = False) -> None:
        super().__init__("the time is over")
        self.heard = heard  # whether it did answer


class ErrorReply(Exception):
    """The server's error reply to one command."""

    def __init__(self, text: str, before: int = 0) -> None:
        super().__init__(text)
        self.before = before  # how many of the pages to be written were there before it

    @property
    def full(self) -> bool:
        """Whether there is no memory to write."""
        return str(self).startswith("OOM")


class DeadlineSocket(io.RawIOBase):
    """A socket's bytes in and out, each with the time that the call has left. It stands for the socket in `redis`."""

    def __init__(self, sock: Any, deadline: float) -> None:
        super().__init__()
        self._sock = sock
        self.begin(deadline)

    def begin(self, deadline: float) -> None:
        self.deadline, self.heard, self._moved = deadline, False, time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since anything came or went in this call."""
        return time.monotonic() - self._moved

    def readable(self) -> bool:
        return True

    def recv(self, size: int) -> bytes:
        self._limit()
        return self._sock.recv(size)

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        self._limit()
        return self._sock.recv_into(buffer, size)

    def readinto(self, buffer: Any) -> int:
        count = self.recv_into(buffer)
        self.heard, self._moved = True, time.monotonic()
        return count

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            self._limit()
            view = view[self._sock.send(view[:PIECE_BYTES]) :]
            self._moved = time.monotonic()

    def settimeout(self, value: float | None) -> None:
        """The deadline decides."""

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()
        super().close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time is over")
        self._sock.settimeout(min(left, STALL_S))


def with_deadline(connection_class: Any) -> Any:
    """A class of connections whose bytes go through a `DeadlineSocket` with the deadline of the instance."""

    class WithDeadline(connection_class):
        deadline: float
        stream: DeadlineSocket

        def _connect(self) -> DeadlineSocket:
            self.stream = DeadlineSocket(super()._connect(), self.deadline)
            return self.stream

    return WithDeadline


class RedisConnection:
    """A connection. One thread at a time uses it; after ServerUnavailable or CallTimedOut it is closed.

    Attributes:
        waiting: replies that have not been read.
        trusted: whether it may be used again; who finds a wrong reply sets it.
    """

    def __init__(self, connection: Any, deadline: float) -> None:
        """Connect and log in, by a class made by `with_deadline`. Raises ServerUnavailable or CallTimedOut."""
        self.waiting, self.trusted = 0, True
        self._connection, began = connection, time.monotonic()
        connection.deadline = deadline
        try:
            connection.connect()
        except (RedisError, OSError, ValueError) as error:
            connection.disconnect()
            if time.monotonic() >= deadline and deadline - began < PATIENCE_S:
                raise CallTimedOut from None
            raise ServerUnavailable(str(error)) from None
        self._stream: DeadlineSocket = connection.stream
        self._reader = io.BufferedReader(self._stream, BUFFER_BYTES)

    @property
    def idle(self) -> bool:
        """Whether the server has neither closed it nor sent anything unasked."""
        try:
            return not self.waiting and not select.select([self._stream], [], [], 0)[0]
        except (OSError, ValueError):
            return False

    def begin(self, deadline: float) -> None:
        """A call begins, which must end by `deadline` (`time.monotonic`)."""
        self._stream.begin(deadline)

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands at once. Raises ServerUnavailable or CallTimedOut."""
        try:
            for part in self._connection.pack_commands(commands):
                self._stream.sendall(part)
        except OSError as error:
            raise self._broken(error) from None
        self.waiting += len(commands)

    def reply(self) -> Any:
        """The next reply: int, bytes, None, list of these, or ErrorReply. Raises ServerUnavailable or CallTimedOut."""
        try:
            found = self._reply()
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        self.waiting -= 1
        return found

    def replies(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, and all their replies."""
        self.send(commands)
        return [self.reply() for _ in commands]

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """Replies of a server that can answer: an error reply, as while it loads, is ServerUnavailable."""
        try:
            return accepted(self.replies(commands))
        except ErrorReply as refused:
            self.close()
            raise ServerUnavailable(str(refused)) from None

    def value(self, parts_of: Callable[[int], Sequence[memoryview]]) -> Sequence[memoryview] | None:
        """The next reply, which is a value, into the parts for its size, in turn.

        Returns the parts, or None if there is no value. Without parts nothing is read, and the line is of no more use.
        Raises ServerUnavailable or CallTimedOut.
        """
        try:
            kind, rest = self._head()
            if kind == b"-":
                raise ValueError(rest.decode(errors="replace"))
            if kind != b"$":
                raise ValueError("a reply is not a value")
            size = int(rest)
            parts = parts_of(size) if size >= 0 else None
            if parts is not None:
                if not parts:
                    return parts
                for part in parts:
                    self._fill(part)
                self._end()
        except (OSError, ValueError) as error:
            raise self._broken(error) from None
        self.waiting -= 1
        return parts

    def close(self) -> None:
        self._connection.disconnect()

    def _broken(self, error: Exception) -> ServerUnavailable | CallTimedOut:
        stream = self._stream
        self.close()
        if isinstance(error, TimeoutError) and stream.silent_s < PATIENCE_S:
            return CallTimedOut(stream.heard)
        return ServerUnavailable(str(error) or type(error).__name__)

    def _head(self) -> tuple[bytes, bytes]:
        """The kind of a reply, and the rest of its first line."""
        line = self._reader.readline(BUFFER_BYTES)
        if not line:
            raise ConnectionError("the server has closed the connection")
        if not line.endswith(b"\r\n"):
            raise ValueError("a reply is not of Redis' protocol")
        return line[:1], line[1:-2]

    def _reply(self, depth: int = 0) -> Any:
        kind, rest = self._head()
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*" and depth < MAX_DEPTH:
            return [self._reply(depth + 1) for _ in range(int(rest))]
        if kind != b"$" or (size := int(rest)) > MAX_VALUE_BYTES:
            raise ValueError("a reply is not of Redis' protocol")
        if size < 0:
            return None
        data = bytearray(size)
        self._fill(memoryview(data))
        self._end()
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        if view and self._reader.readinto(view) != len(view):
            raise ConnectionError("the server has closed the connection")

    def _end(self) -> None:
        if self._reader.read(2) != b"\r\n":
            raise ValueError("a value does not end where it should")


def accepted(replies: list[Any]) -> list[Any]:
    """Replies of which none is an error. Raises ErrorReply."""
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise reply
    return replies
