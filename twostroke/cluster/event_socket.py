"""Events on their way to Dynamo: a socket at which Dynamo's publisher, in the same process, reads them.

The methods of Dynamo 1.6.1's publisher name no tier, and take every block for one of the GPU. What it reads at a socket
may name one: the form is that of vLLM's KV events (a tagged map in MessagePack, with `medium`). The socket is a file in
a directory that nobody but this user can enter.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec  # pyright: ignore[reportMissingImports]
import zmq  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)

PREFIX = "twostroke-events-"
STARTING_S = 5.0  # age below which a folder may not be locked yet
MAX_WAITING = 100_000  # events
MAX_MESSAGES = 1000  # in the socket
MAX_EVENTS = 256  # events in a message
LOOK_S = 0.1


class EventSocket:
    """A `KVEventPublisher`. Events wait until Dynamo listens.

    If too many wait, since Dynamo hangs, they are dropped, and routers are told to forget what this worker has.
    """

    def __init__(self) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = _locked(Path(self._folder.name))  # as long as this process lives
        self.endpoint = f"ipc://{self._folder.name}/events"  # where Dynamo reads
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.XPUB)  # unlike PUB it says when somebody listens
        self._socket.setsockopt(zmq.SNDHWM, MAX_MESSAGES)
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)  # beyond that, sending fails
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.endpoint)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def stored(self, tier: str, tokens: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [_number(hash) for hash in hashes],
            "parent_block_hash": None if parent is None else _number(parent),
            "token_ids": list(tokens),
            "block_size": len(tokens) // len(hashes),
            "lora_id": None,
            "medium": tier,
        }
        self._put(event)

    def removed(self, tier: str, hashes: Sequence[bytes]) -> None:
        self._put({"type": "BlockRemoved", "block_hashes": [_number(hash) for hash in hashes], "medium": tier})

    def _put(self, event: dict[str, Any]) -> None:
        if self._events.qsize() >= MAX_WAITING:
            with suppress(Empty):
                while True:
                    self._events.get_nowait()
            log.warning("Dynamo takes no events: %d were dropped, and routers forget this worker's pages", MAX_WAITING)
            self._events.put({"type": "AllBlocksCleared"})
        self._events.put(event)

    def close(self) -> None:
        """Send nothing any more."""
        self._closed.set()
        self._events.put(None)
        self._thread.join()
        self._socket.close()
        self._context.term()
        os.close(self._lock)
        self._folder.cleanup()

    def _run(self) -> None:
        while not self._socket.poll(1000 * LOOK_S):
            if self._closed.is_set():
                return
        count = 0
        while (event := self._events.get()) is not None:
            events = [event]
            try:
                while len(events) < MAX_EVENTS and (event := self._events.get_nowait()) is not None:
                    events.append(event)
            except Empty:
                pass
            batch = msgspec.msgpack.encode([time.time(), events, 0])
            self._send([b"", count.to_bytes(8, "big"), batch])
            count += 1
            if event is None:
                return

    def _send(self, parts: list[bytes]) -> None:
        """Send a message once there is room for it; not at all if that is not before `close`."""
        while not self._closed.is_set():
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._closed.wait(LOOK_S)


def _locked(folder: Path) -> int:
    """The lock of a folder, which the system drops when this process ends. Raises OSError: another process holds it."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _sweep() -> None:
    """Delete the folders of this user's processes that have died."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and time.time() - folder.lstat().st_mtime > STARTING_S:
                os.close(_locked(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _number(hash: bytes) -> int:
    return int.from_bytes(hash, "little")
