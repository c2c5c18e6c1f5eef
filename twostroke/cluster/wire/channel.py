"""One connection between a sender and a receiver: authenticated messages, and bytes that go straight to pages.

    message          length (uint32, little endian), JSON, and a keyed BLAKE2b of the JSON and the message's number
    bytes            as many as the message before them says, without a copy in Python; digests in it prove them

Nothing is encrypted.
"""

import hashlib
import hmac
import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from twostroke.cluster.wire import secret as secrets
from twostroke.cluster.wire.runtime import SYSTEM, Address, Runtime
from twostroke.errors import KVError

CONNECT_S = 5.0  # seconds for a connection and its handshake
MAX_JSON_BYTES = 256 << 20  # bytes; a header of some million entries
WAIT_S = 0.2  # seconds of one wait for bytes: a limit that stays the same is set once
MAC_BYTES = 16
BUFFERS = 256  # that one call of the system gets at once
SOCKET_BYTES = 4 << 20  # of the system's buffers, asked for
LIFE = (  # a machine that is gone, or cut off, is noticed in 25 s
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),
)
_LENGTH = struct.Struct("<I")

MISMATCH = "the value is of a model with other weights, or of another kernels' variant: its identity differs"

Message = dict[str, Any]


class WireError(KVError):
    """A transfer failed: the other side is gone, does not answer, or says something that is not right."""


class IdentityMismatch(WireError):
    """The value is of a model with another identity: other weights, or another kernels' variant."""


class Channel:
    """Messages in both directions, for one thread. Any other may only end it: `shut`."""

    def __init__(self, connection: socket.socket, keys: secrets.ChannelKeys, runtime: Runtime = SYSTEM) -> None:
        self._socket, self._keys, self._runtime = connection, keys, runtime
        self._sent = self._received = 0
        self._seconds = 0.0
        host, port = connection.getpeername()[:2]
        self.peer = f"{host}:{port}"  # the other side's address, for messages
        # the machine's name (`Runtime`) if the other side has the same address, so that nothing leaves it
        self.machine = runtime.machine if connection.getsockname()[0] == host else None

    @classmethod
    def connect(
        cls, address: Address, known: secrets.Secrets, limit_s: float = CONNECT_S, runtime: Runtime = SYSTEM
    ) -> Self:
        """Connect to a sender. Raises WireError."""
        try:
            connection = runtime.connect(address, limit_s)
        except OSError as error:
            raise WireError(f"{address[0]}:{address[1]} cannot be reached: {error.strerror or error}") from None
        return cls._opened(connection, secrets.connect, known, limit_s, runtime)

    @classmethod
    def accept(cls, connection: socket.socket, known: secrets.Secrets, runtime: Runtime = SYSTEM) -> Self:
        """The other side of `connect`. Raises WireError."""
        return cls._opened(connection, secrets.accept, known, CONNECT_S, runtime)

    @classmethod
    def _opened(
        cls, connection: socket.socket, shake: Any, known: secrets.Secrets, limit_s: float, runtime: Runtime
    ) -> Self:
        try:
            connection.settimeout(limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in LIFE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
            return cls(connection, shake(connection, known, limit_s, runtime.now), runtime)
        except (OSError, KVError) as error:
            connection.close()
            raise WireError(str(error)) from None

    def send(self, kind: str, views: Sequence[memoryview] = (), limit_s: float = 30.0, **fields: Any) -> None:
        """Send a message, and bytes behind it. Raises WireError."""
        text = json.dumps({"kind": kind, **fields}).encode()
        mac = _mac(self._keys.outwards, self._sent, text)
        self._sent += 1
        try:
            self._limit(limit_s)
            self._send_all([memoryview(_LENGTH.pack(len(text)) + text + mac), *views])
        except OSError as error:
            raise self._failed(error) from None

    def _limit(self, seconds: float) -> None:
        """Of the next call of the system. Setting it is one too, and lets other threads run."""
        if seconds != self._seconds:
            self._socket.settimeout(seconds)
            self._seconds = seconds

    def _send_all(self, views: Sequence[memoryview]) -> None:
        left = [view.cast("B") for view in views if view.nbytes]
        while left:
            sent = self._socket.sendmsg(left[:BUFFERS])
            left = _behind(left, sent)

    def receive(self, limit_s: float) -> Message:
        """The next message. Raises WireError."""
        until = self._runtime.now() + limit_s
        length = bytearray(_LENGTH.size)
        self._fill_all([memoryview(length)], until)
        (size,) = _LENGTH.unpack(length)
        if size > MAX_JSON_BYTES:
            raise WireError(f"{self.peer}: a message of {size:,} bytes is too long")
        text = bytearray(size + MAC_BYTES)
        self._fill_all([memoryview(text)], until)
        if not hmac.compare_digest(_mac(self._keys.inwards, self._received, text[:-MAC_BYTES]), text[-MAC_BYTES:]):
            raise WireError(f"{self.peer}: a message was altered on its way")
        self._received += 1
        return json.loads(text[:-MAC_BYTES])

    def fill(self, views: Sequence[memoryview], limit_s: float) -> None:
        """Receive bytes into memory. Raises WireError."""
        self._fill_all(views, self._runtime.now() + limit_s)

    def _fill_all(self, views: Sequence[memoryview], until: float) -> None:
        left = [view.cast("B") for view in views if view.nbytes]
        while left:
            if (seconds := until - self._runtime.now()) <= 0:
                raise WireError(f"{self.peer} does not answer")
            try:
                self._limit(min(WAIT_S, seconds))
                count = self._socket.recvmsg_into(left[:BUFFERS])[0]
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:  # of `settimeout`
                    continue
                raise self._failed(error) from None
            if not count:
                raise WireError(f"{self.peer} has closed the connection")
            left = _behind(left, count)

    @property
    def readable(self) -> bool:
        """Whether a message, or the end of the connection, is there to be received."""
        return self._runtime.readable(self._socket)

    def shut(self) -> None:
        """End the connection. The other side, and a thread that waits here, learn of it at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and let go of it. Only the thread that receives calls it."""
        self.shut()
        self._socket.close()

    def _failed(self, error: OSError) -> WireError:
        if isinstance(error, TimeoutError):
            return WireError(f"{self.peer} does not answer")
        return WireError(f"{self.peer}: the connection failed: {error.strerror or error}")


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of some views after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _mac(key: bytes, number: int, text: bytes | bytearray) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + text, key=key, digest_size=MAC_BYTES).digest()
