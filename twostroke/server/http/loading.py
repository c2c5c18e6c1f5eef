"""While the model is loaded: every call is answered 503, so that clients know to wait, and /health/live 200."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from types import TracebackType

from twostroke.server.errors import ApiError
from twostroke.server.http.responses import raw_response

CONNECTION_TIMEOUT_S = 5  # seconds that a call may take
END_TIMEOUT_S = 1  # for calls that have come when the model is loaded


class LoadingResponder:
    """Answers at listening sockets, in a thread, while it is open. It leaves the sockets open for the server."""

    def __init__(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        self._sockets, self._tls = [sock.dup() for sock in sockets], tls
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="loading page", daemon=True)

    def __enter__(self) -> "LoadingResponder":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        started = (asyncio.start_server(self._connected, sock=sock, ssl=self._tls) for sock in self._sockets)
        servers = [loop.run_until_complete(one) for one in started]
        loop.run_forever()
        loop.run_until_complete(self._end(servers))
        loop.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = self._loop.create_task(_answer(reader, writer))
        task.add_done_callback(lambda _: self._writers.discard(writer))

    async def _end(self, servers: Sequence[asyncio.Server]) -> None:
        """Answer whom the loop has accepted, for a second at most, and leave no connection that nobody would read."""
        for sock in self._sockets:
            # Accepts no more. A server that is closed would drop, and not close, what has just been accepted.
            self._loop.remove_reader(sock)
        this = asyncio.current_task()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while tasks := asyncio.all_tasks() - {this}:  # the one that accepts begins the one that answers
                    await asyncio.wait(tasks)
        for server in servers:
            server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in (left := asyncio.all_tasks() - {this}):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for _ in range(2):  # transports close their sockets in a turn of the loop
            await asyncio.sleep(0)


LIVE = {"live": True, "ready": False, "draining": False, "loading": True}


def _response(head: bytes) -> bytes:
    """A process that loads is not ready, and a restart would only make it load again."""
    method, _, rest = head.partition(b" ")
    path, with_body = rest.split(b" ")[0].partition(b"?")[0], method != b"HEAD"
    if path == b"/health/live" and method in (b"GET", b"HEAD"):
        return raw_response(200, LIVE, with_body=with_body)
    message = "the model is being loaded: try again in 2 s"
    error = ApiError(503, message, code="loading", headers={"retry-after": "2"})
    return raw_response(error.status, error.body(), error.headers, with_body=with_body)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # A task that ends as cancelled makes asyncio's streams log a traceback (Python 3.11).
    gone = OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError
    with contextlib.suppress(*gone):
        async with asyncio.timeout(CONNECTION_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(head))
            await writer.drain()
            if writer.can_write_eof():  # not with TLS
                writer.write_eof()
            while await reader.read(1 << 16):  # closed with bytes unread, a connection loses the answer
                pass
    writer.close()
