"""Of the threads that wait for something, one steps at a time, and the others wait for what it brings."""

import threading
from collections.abc import Callable

from twostroke.system.interrupts import Postponed

Step = Callable[[Callable[[], bool]], bool]  # steps unless the function returns True; returns whether there was work


class Turns:
    """Waiting, and news for those who wait."""

    def __init__(self) -> None:
        self._news = threading.Condition()  # guards what follows
        self._stepping = False  # whether one of the threads that wait steps
        self._changes = 0  # number of events that may give a step something to do

    def tell(self) -> None:
        """Something has happened that may give a step something to do, or end a wait."""
        with self._news:
            self._changes += 1
            self._news.notify_all()

    def wait(self, ready: Callable[[], bool], step: Step, pause: Callable[[], float | None]) -> None:
        """Step until `ready()`, or wait while another thread steps.

        After a step without work it waits for news, at most `pause()` seconds.
        """
        while not ready():
            seen = self._changes
            worked = self._stepped(ready, step)
            if worked is None:
                with self._news:
                    while self._stepping and not ready():
                        self._news.wait()
            elif not worked and (seconds := pause()) != 0:
                with self._news:
                    if seen == self._changes and not ready():
                        self._news.wait(seconds)

    def _stepped(self, ready: Callable[[], bool], step: Step) -> bool | None:
        """Whether there was work; None if another of the waiting threads steps."""
        with Postponed():  # `_stepping` must not stay set
            with self._news:
                if self._stepping:
                    return None
                self._stepping = True
            try:
                return step(ready)
            finally:
                with self._news:
                    self._stepping = False
                    self._news.notify_all()
