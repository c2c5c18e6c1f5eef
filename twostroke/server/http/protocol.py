"""HTTP/1.1 connections that do not wait for ever, and end in order when a client sends what is no HTTP.

uvicorn limits how long a connection may be idle behind a response, and nothing else: it waits without limit for the
first request, for the rest of headers that have begun, and for clients that do not read. Bodies are the middleware's to
limit.
"""

import asyncio
import contextlib
import fcntl
import struct
import termios
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from twostroke.server.errors import ApiError
from twostroke.server.http.responses import raw_response

if TYPE_CHECKING:
    Base = H11Protocol
else:
    Base = object
LOOKS = 4  # at what a client has not taken, in the time that is allowed


class _HeaderDeadline(Base):
    """Closes a connection whose next request's headers take too long; answers 408 if some of them have come."""

    header_timeout_s: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect(begun=False)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._forget()
        elif not self.transport.is_closing():
            self._expect(begun=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self, begun: bool) -> None:
        """The time runs from the first byte, or from the connection's beginning."""
        if self._deadline is None:
            self._begun = begun
            self._deadline = self.loop.call_later(self.header_timeout_s, self._expired)
        self._begun |= begun

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        if self.transport.is_closing():
            return
        # The rest of a body whose response has been sent is no request that could be answered.
        cycle: Any = self.cycle
        if self._begun and (cycle is None or not cycle.more_body):
            message = f"the headers did not come within {self.header_timeout_s:g} s"
            error = ApiError(408, message, code="header_timeout")
            self.transport.write(raw_response(error.status, error.body()))
        self.transport.close()


class _MalformedRequest(Base):
    """Ends a connection on which something else than HTTP came; answers 400 if nothing is being answered.

    uvicorn answers in any case, and the call whose body is malformed then answers too: an error within h11, in the
    server's log, or bytes in the middle of an answer.
    """

    _malformed = False

    def send_400_response(self, msg: str) -> None:
        cycle: Any = self.cycle  # None before the first request
        if self.transport.is_closing():
            return
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._malformed = True  # it came behind whole calls, which are answered first
            return
        if cycle is None or not (cycle.more_body and cycle.response_started):
            error = ApiError(400, "this is no HTTP/1.1, or the body is not as its headers say", code="invalid_http")
            self.transport.write(raw_response(error.status, error.body()))
        if cycle is not None:
            cycle.disconnected = True  # whoever serves the call learns it now, and what they send is dropped
            cycle.message_event.set()
        self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._malformed:
            self.send_400_response("")


class _WriteDeadline(Base):
    """Aborts a connection that has taken nothing of what waits for `write_timeout_s`; its call ends as if it had left.

    What a client does not read waits in the system's buffers, and then in this process: 64 KiB, beyond which its answer
    is not written on, while the engine makes its tokens. So such a client would hold a place and memory for ever.

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


def protocol_class(header_timeout_s: float, write_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, the quicker one if its parser is installed, with the time limits and ends in order."""
    kind: Any = H11Protocol
    with contextlib.suppress(ImportError):
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as kind
    limits = {"header_timeout_s": header_timeout_s, "write_timeout_s": write_timeout_s}
    return type("InTime", (_HeaderDeadline, _MalformedRequest, _WriteDeadline, kind), limits)
