"""Of the threads that wait for something, one steps at a time, and the others wait for what it brings."""

from collections.abc import Callable

from twostroke.system.interrupts import DeferredInterrupts
from twostroke.system.monitor import Monitor

Step = Callable[[Callable[[], bool]], bool]  # steps unless the function returns True; returns whether there was work


class LeaderFollower:
    """Waiting, and news for those who wait."""

    def __init__(self) -> None:
        self._news = Monitor()  # guards what follows
        self._stepping = False  # whether one of the threads that wait steps
        self._changes = 0  # number of events that may give a step something to do

    def notify(self) -> None:
        """Something has happened that may give a step something to do, or end a wait."""
        with DeferredInterrupts(), self._news.lock:
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
                self._news.wait_for(lambda: not self._stepping or ready())
            elif not worked and (seconds := pause()) != 0:
                self._news.wait_unless(lambda seen=seen: seen != self._changes or ready(), seconds)

    def _stepped(self, ready: Callable[[], bool], step: Step) -> bool | None:
        """Whether there was work; None if another of the waiting threads steps."""
        with DeferredInterrupts() as postponed:
            mine = False
            try:
                with self._news.lock:
                    if self._stepping:
                        return None
                    self._stepping = mine = True
                return step(ready)
            finally:
                postponed.final = True  # `_stepping` must not stay set
                if mine:
                    with self._news.lock:
                        self._stepping = False
                        self._news.notify_all()
