"""Keys that last while this process holds them, and are gone soon after it has ended.

They live for a short time only. A thread tells the server again and again that they stay.
"""

import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress

from twostroke.kv.tiers.remote.connection_pool import BATCH_KEYS, CALL_S, UNAVAILABLE, ConnectionPool


class KeyRefresher:
    """Such keys of one server. The thread ends with this object."""

    def __init__(self, pool: ConnectionPool, ttl_s: float, refresh_s: float) -> None:
        """Keys are told to stay every `refresh_s` seconds, for `ttl_s` seconds."""
        # what a key has left to live when it is written, and whenever it is told to stay
        self.milliseconds = round(1e3 * ttl_s)
        self._pool, self._refresh_s = pool, refresh_s
        self._keys: set[bytes] = set()
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self._ended = threading.Event()
        weakref.finalize(self, self._ended.set)

    def add(self, key: bytes) -> None:
        """Let a key last that has been written."""
        with self._lock:
            self._keys.add(key)
            if self.thread is None or not self.thread.is_alive():  # a forked process has none
                mine = weakref.ref(self), self._ended, self._refresh_s
                self.thread = threading.Thread(target=_keep_refreshing, args=mine, name="remote tier", daemon=True)
                self.thread.start()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Keys that are no longer wanted; the caller deletes them."""
        with self._lock:
            self._keys.difference_update(keys)

    def close(self) -> list[bytes]:
        """End the thread. Returns the keys that are left, for the caller to delete."""
        self._ended.set()
        with self._lock:
            keys, self._keys = sorted(self._keys), set()
        return keys

    def refresh(self) -> None:
        """Tell the server that all keys stay."""
        with self._lock:
            keys = sorted(self._keys)
        for start in range(0, len(keys), BATCH_KEYS):
            with suppress(*UNAVAILABLE), self._pool.connection(CALL_S) as connection:
                connection.replies([("PEXPIRE", key, self.milliseconds) for key in keys[start : start + BATCH_KEYS]])


def _keep_refreshing(lasting: weakref.ref[KeyRefresher], ended: threading.Event, every_s: float) -> None:
    """The thread; it does not keep the keys' object alive."""
    while not ended.wait(every_s):
        if (one := lasting()) is None:
            return
        one.refresh()
        del one
