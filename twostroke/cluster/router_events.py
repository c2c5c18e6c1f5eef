"""All that Dynamo's KV-aware router is told of one model: its prefix index, and the pages on disk below it.

A block is a page. The router knows it by a hash that is chained, so that it stands for all tokens up to its end. Pages
in the host count as those in the pool: they come back within a step. A page on disk can be served by every worker that
has the directory, whoever wrote it and when: so a worker tells of all of them, also after a restart, and looks at the
directory, since other processes write and delete there as well.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from twostroke.api.llm import LLM
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.tiers.disk import DiskStore
from twostroke.kv.tiers.disk.directory_watch import DirectoryWatch
from twostroke.system.extras import requires_extra

POOL, DISK = "GPU", "DISK"  # where blocks are, in Dynamo's words: "GPU" is what an engine computes from


class KVEventPublisher(Protocol):
    """Takes events in their order, from any thread. Its methods queue an event and return."""

    def stored(self, tier: str, tokens: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        """Consecutive blocks of one prompt are in a tier now, all of the same number of tokens.

        `parent`: the block before them; None: they begin the prompt.
        """
        ...

    def removed(self, tier: str, hashes: Sequence[bytes]) -> None: ...


class IndexEvents:
    """Follows an index from the moment that it is made, and tells a publisher.

    The index calls it under the pool's lock, so events are in the order in which pages came and went.
    """

    def __init__(self, index: PrefixIndex, publisher: KVEventPublisher) -> None:
        self._index, self._publisher, self._size = index, publisher, index.pool.page_size
        self._hashes: dict[int, bytes] = {}  # of each indexed page
        with index.pool.lock:
            index.on_insert.append(self._entering)
            index.on_remove.append(self._leaving)

    def close(self) -> None:
        """Tell nothing any more."""
        with self._index.pool.lock:
            self._index.on_insert.remove(self._entering)
            self._index.on_remove.remove(self._leaving)

    def _entering(self, tokens: np.ndarray, pages: Sequence[int]) -> None:
        """Tell of those pages of a prompt, from its first on, that were not known."""
        first = next((i for i, page in enumerate(pages) if page not in self._hashes), len(pages))
        if first == len(pages):
            return
        parent = self._hashes[pages[first - 1]] if first else None
        tokens = tokens[first * self._size : len(pages) * self._size]
        added = list[bytes]()
        for page, start in zip(pages[first:], range(0, len(tokens), self._size), strict=True):
            block = tokens[start : start + self._size].astype("<i4").tobytes()
            added.append(block_hash(added[-1] if added else parent, block))
            self._hashes[page] = added[-1]
        self._publisher.stored(POOL, tokens.tolist(), added, parent)

    def _leaving(self, pages: Sequence[int]) -> None:
        gone = [self._hashes.pop(page) for page in pages if page in self._hashes]
        if gone:
            self._publisher.removed(POOL, gone)


def block_hash(parent: bytes | None, tokens: bytes) -> bytes:
    """The 8 bytes that stand for a block's tokens (int32, little endian) and all before them, in every tier."""
    return hashlib.blake2b((parent or b"") + tokens, digest_size=8).digest()


log = logging.getLogger(__name__)

LOOK_S = 0.5  # seconds between looks; at least REST times what a look takes
REST = 20


class DiskEvents:
    """Follows a directory on a thread of its own, and tells a publisher."""

    def __init__(self, watch: DirectoryWatch, publisher: KVEventPublisher) -> None:
        self._watch, self._publisher = watch, publisher
        self._hashes: dict[bytes, bytes] = {}  # of what was told, by key
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk events", daemon=True)

    def start(self) -> None:
        """Look again and again, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Tell of what has changed. Raises OSError."""
        came, gone = self._watch.changes()
        if gone:
            self._publisher.removed(DISK, [self._hashes.pop(name.key) for name in gone])
        for name in came:
            parent = self._hashes[name.parent] if name.number else None
            self._hashes[name.key] = block_hash(parent, name.tokens)
            tokens = np.frombuffer(name.tokens, "<i4").tolist()
            self._publisher.stored(DISK, tokens, [self._hashes[name.key]], parent)
        if came or gone:
            log.info("routers are told of %d pages on disk", len(self._hashes))

    def _run(self) -> None:
        rest = 0.0
        while not self._closed.wait(rest):
            began = time.monotonic()
            try:
                self.look()
            except Exception:
                log.exception("the pages on disk could not be told")
            rest = max(LOOK_S, REST * (time.monotonic() - began))


class RouterEvents:
    """From now on, until `close`."""

    def __init__(self, llm: LLM) -> None:
        """The model needs a prefix index."""
        with requires_extra("dynamo", "telling a router"):
            from twostroke.cluster.event_socket import EventSocket

        model = llm.model
        assert model.index is not None
        self._feed = EventSocket()
        self.endpoint = self._feed.endpoint  # where Dynamo reads it
        self._following: list[IndexEvents | DiskEvents] = [IndexEvents(model.index, self._feed)]
        if model.backing_stores is not None and isinstance(store := model.backing_stores.tiers.disk, DiskStore):
            on_disk = DiskEvents(store.watch(model.backing_stores.namespace), self._feed)
            on_disk.start()
            self._following.append(on_disk)

    def close(self) -> None:
        for one in self._following:
            one.close()
        self._feed.close()
