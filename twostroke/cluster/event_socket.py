"""Events on their way to Dynamo: a socket at which Dynamo's publisher, in the same process, reads them.

The methods of Dynamo 1.6.1's publisher name no tier, and take every block for one of the GPU. What it reads at a socket
may name one: the form is that of vLLM's KV events (a tagged map in MessagePack, with `medium`). The socket is a file in
a directory that nobody but this user can enter.
"""

import tempfile
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import msgspec  # pyright: ignore[reportMissingImports]
import zmq  # pyright: ignore[reportMissingImports]

MAX_EVENTS = 256  # events in a message
LOOK_S = 0.1


class EventSocket:
    """A `Publisher`. What is told before Dynamo listens waits for it; nothing is dropped.

    Attributes:
        endpoint: where Dynamo reads.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="twostroke-events-")
        self.endpoint = f"ipc://{self._folder.name}/events"
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.XPUB)  # unlike PUB it says when somebody listens
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no bound, so it drops nothing
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
        self._events.put(event)

    def removed(self, tier: str, hashes: Sequence[bytes]) -> None:
        self._events.put({"type": "BlockRemoved", "block_hashes": [_number(hash) for hash in hashes], "medium": tier})

    def close(self) -> None:
        """Send nothing any more."""
        self._closed.set()
        self._events.put(None)
        self._thread.join()
        self._socket.close()
        self._context.term()
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
            self._socket.send_multipart([b"", count.to_bytes(8, "big"), batch])
            count += 1
            if event is None:
                return


def _number(hash: bytes) -> int:
    return int.from_bytes(hash, "little")
