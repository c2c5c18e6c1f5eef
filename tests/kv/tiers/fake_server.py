"""A server on loopback that takes commands of Redis' protocol and answers as a test wants."""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


@contextmanager
def fake_server(answer: Callable[[list[bytes]], bytes]) -> Generator[str]:
    """A server on loopback that answers each command with what `answer` gives; b"" closes the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(one: socket.socket) -> None:
        with suppress(OSError, ValueError), one, one.makefile("rb") as file:
            while head := file.readline():
                command = list[bytes]()
                for _ in range(int(head[1:])):
                    size = int(file.readline()[1:])
                    command.append(file.read(size + 2)[:-2])
                if not (reply := answer(command)):
                    return
                one.sendall(reply)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
