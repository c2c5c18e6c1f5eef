"""Connections whose client never reads are ended.

What a client does not read waits in the system's buffers, and then in this process: 64 KiB, beyond which its answer is
not written on, while the engine makes its tokens. So such a client would hold a place, pages and memory for ever.
"""

import asyncio
import fcntl
import struct
import termios
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    Base = H11Protocol
else:
    Base = object
LOOKS = 4  # in the time that is allowed


class WriteDeadline(Base):
    """Aborts a connection that has taken nothing of what waits for `write_timeout_s`; its call ends as if it had left.

    A reader that is slow and takes something in that time stays.
    """

    write_timeout_s: float
    _next_look: asyncio.TimerHandle | None = None
    _waiting_bytes = 0
    _taken_at = 0.0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Look again and again until nothing waits."""
        if self._next_look is None and self.transport.get_write_buffer_size():
            self._waiting_bytes, self._taken_at = 0, self.loop.time()
            self._look()

    @property
    def _untaken_bytes(self) -> int:
        """What waits in this process, and what the system has and the client has not confirmed (Linux).

        The system takes more only when a good part of its megabytes has gone, which with a slow reader takes long.
        """
        count = struct.pack("i", 0)
        try:
            file = self.transport.get_extra_info("socket").fileno()
            (held,) = struct.unpack("i", fcntl.ioctl(file, termios.TIOCOUTQ, count))
        except OSError:
            held = 0
        return self.transport.get_write_buffer_size() + held

    def _look(self) -> None:
        self._next_look = None
        if not self.transport.get_write_buffer_size():
            return
        waiting, now = self._untaken_bytes, self.loop.time()
        if waiting != self._waiting_bytes:
            self._waiting_bytes, self._taken_at = waiting, now
        elif now - self._taken_at >= self.write_timeout_s:
            transport: Any = self.transport
            transport.abort()
            return
        self._next_look = self.loop.call_later(self.write_timeout_s / LOOKS, self._look)
