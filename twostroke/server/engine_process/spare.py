"""A process that has imported everything and waits for a model, so that an engine that dies is away for less long."""

import threading
import time
from collections.abc import Callable

from twostroke.server.engine_process.launch import EngineProcess

SPARE_BYTES = 48 << 20  # of a process that waits: 34 MiB of its own were measured, and 20 that all such share
DELAY_S = 5.0  # after one was taken, so that the next one's imports do not slow the opening of the model


class SpareProcess:
    """Keeps one process ready.

    A process ends with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), so one thread starts all of them,
    and lives as long as the server does.
    """

    def __init__(
        self, make: Callable[[], EngineProcess] = EngineProcess, count: int = 1, delay_s: float = DELAY_S
    ) -> None:
        """Start the first ones, `count` of them: so many engines are opened first."""
        self._waiting = [make() for _ in range(count)]
        self._make, self._delay_s = make, delay_s
        self._taken = threading.Semaphore(0)
        self._lock = threading.Lock()

    def keep(self) -> None:
        """From now on start another one after each that was taken."""
        threading.Thread(target=self._run, name="spare process", daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The process that waits, if there is one."""
        return next((one.pid for one in self._waiting), None)

    def take(self) -> EngineProcess:
        """The one that waits, or a new one if it is not there."""
        with self._lock:
            taken = self._waiting.pop() if self._waiting else None
        self._taken.release()
        if taken is not None and taken.alive:
            return taken
        if taken is not None:
            taken.end(0)
        return self._make()

    def _run(self) -> None:
        while True:
            self._taken.acquire()
            time.sleep(self._delay_s)
            if not self._waiting:
                made = self._make()
                with self._lock:
                    self._waiting.append(made)
