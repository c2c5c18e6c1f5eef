"""What comes into a directory of pages and leaves it, for Dynamo's KV-aware router.

A page on disk can be served by every worker that has the directory, whoever wrote it and when: so a worker tells of all
of them, also after a restart. It looks at the directory, since other processes write and delete there as well.
"""

import logging
import threading
import time

import numpy as np

from twostroke.cluster.index_events import DISK, KVEventPublisher, block_hash
from twostroke.kv.tiers.disk.directory_watch import DirectoryWatch

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
