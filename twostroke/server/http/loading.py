"""While the model is loaded: every call is answered 503, so that clients know to wait, and /health/live 200."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from types import TracebackType

from twostroke.server.errors import ModelLoading
from twostroke.server.http.raw_response import raw_response

CONNECTION_TIMEOUT_S = 5  # seconds that a call may take


class LoadingResponder:
    """Answers at listening sockets, in a thread, while it is open. It leaves the sockets open for the server."""

    def __init__(self, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        self._sockets, self._tls = [sock.dup() for sock in sockets], tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="loading page", daemon=True)

    def __enter__(self) -> "LoadingResponder":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = self._loop
        started = (asyncio.start_server(_answer, sock=sock, ssl=self._tls) for sock in self._sockets)
        servers = [loop.run_until_complete(one) for one in started]
        loop.run_forever()
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks(loop)  # answers that are being sent
        loop.run_until_complete(asyncio.wait(tasks, timeout=1) if tasks else asyncio.sleep(0))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


LIVE = {"live": True, "ready": False, "draining": False, "loading": True}


def _response(head: bytes) -> bytes:
    """A process that loads is not ready, and a restart would only make it load again."""
    method, _, rest = head.partition(b" ")
    path, with_body = rest.split(b" ")[0].partition(b"?")[0], method != b"HEAD"
    if path == b"/health/live" and method in (b"GET", b"HEAD"):
        return raw_response(200, LIVE, with_body=with_body)
    error = ModelLoading()
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
