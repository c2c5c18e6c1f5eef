"""A relay between a receiver and a sender, which can cut, stop or alter what goes through it."""

import socket
import threading
from contextlib import suppress

from twostroke.cluster.wire.handle import ValueHandle


class Relay:
    """Forwards one connection. After `most` bytes from the sender it cuts it, or `stalls`; it flips the byte `flip`."""

    def __init__(self, to: ValueHandle, most: int | None = None, flip: int | None = None, stalls: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._to, self._most, self._flip, self._stalls = to, most, flip, stalls
        self.handle = ValueHandle("127.0.0.1", self._listener.getsockname()[1], to.incarnation, to.lease)
        self.forwarded = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.close()
        self._cut()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _run(self) -> None:
        self._listener.settimeout(10)
        with suppress(OSError):
            receiver = self._listener.accept()[0]
            sender = socket.create_connection(self._to.address)
            self._sockets = [receiver, sender]
            back = threading.Thread(target=self._forward, args=(receiver, sender, False))
            self._threads.append(back)
            back.start()
            self._forward(sender, receiver, True)

    def _forward(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if counted:
                    if self._flip is not None and 0 <= self._flip - self.forwarded < len(data):
                        data[self._flip - self.forwarded] ^= 1
                    if self._most is not None and self.forwarded + len(data) >= self._most:
                        target.sendall(data[: self._most - self.forwarded])
                        self.forwarded = self._most
                        if not self._stalls:
                            self._cut()
                        return
                    self.forwarded += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
