"""Values in garbage reference cycles: when a full pool is worth a garbage collection.

A value is a small object, and Python's collector does not see the pages that it holds. So a cycle of objects that holds
values (a session with a reference to itself, a traceback) may keep a pool full until the collector happens to run.
"""

import gc
import time

PAUSE_FACTOR = 20  # a collection that freed nothing is repeated after so many times its duration,
MAX_PAUSE_S = 1.0  # and after this at the latest: what it found alive may be garbage by then


class GarbageCollection:
    """Collections on behalf of one pool: at most a twentieth of the time of a pool that stays full."""

    def __init__(self) -> None:
        self._next = 0.0  # when the next one may run
        self.running = False  # whether one is under way

    @property
    def due(self) -> bool:
        """Whether the last collection freed pages, or is so long ago that another one costs little."""
        return not self.running and time.monotonic() >= self._next

    def run(self) -> None:
        """Collect garbage. If that frees pages, `freed_some` has to be called."""
        began, self.running = time.monotonic(), True  # a finalizer may allocate pages: one collection at a time
        try:
            gc.collect()
        finally:
            ended, self.running = time.monotonic(), False
            self._next = ended + min(PAUSE_FACTOR * (ended - began), MAX_PAUSE_S)

    def freed_some(self) -> None:
        """The last collection freed pages: the next one may run at any time."""
        self._next = 0.0
