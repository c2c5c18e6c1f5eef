"""Threads that share one engine: a lock in order of arrival, and leader/follower stepping."""

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from twostroke.errors import InvalidRequest
from twostroke.system.interrupts import DeferredInterrupts, Monitor

# Steps unless the function returns True. Returns whether there was work.
StepUnless = Callable[[Callable[[], bool]], bool]


class FairLock:
    """A lock that is handed on in order of arrival, so a thread that steps again and again keeps nobody out.

    `with lock:` waits for it. Ctrl-C waits until the lock is released. `defer` never waits: its action runs when the
    lock is next released, or at once if it is free. Finalizers use it, since they may run anywhere, also in the thread
    that holds the lock.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self.deferred: deque[Callable[[], None]] = deque()
        self._postponed: DeferredInterrupts | None = None  # of the thread that holds the lock

    def __enter__(self) -> None:
        """Wait for the lock. Raises InvalidRequest in the thread that holds it: a program must not call its engine."""
        me = threading.get_ident()
        if self._owner == me:
            raise InvalidRequest("a program cannot call the model that runs it: yield Prefill, Decode or Emit")
        postponed = DeferredInterrupts()
        postponed.__enter__()
        try:
            self._take(me)
            self._postponed = postponed
        except BaseException:
            postponed.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        postponed, self._postponed = self._postponed, None
        try:
            try:
                self._run_deferred()
            finally:
                with self._mutex:
                    self._hand_on()
            self._flush()
        finally:
            if postponed is not None:
                postponed.__exit__(kind, error, trace)

    def _take(self, me: int) -> None:
        with self._mutex:
            if self._owner is None:
                self._owner = me
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((me, gate))
        try:
            gate.acquire()  # released by the thread that hands the lock on
        except BaseException:  # a later Ctrl-C
            self._give_up(me, gate)
            raise

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def defer(self, action: Callable[[], None]) -> None:
        """Run an action under the lock, without waiting for it."""
        with DeferredInterrupts():
            self.deferred.append(action)
            self._flush()

    def _give_up(self, me: int, gate: threading.Lock) -> None:
        with self._mutex:
            try:
                self._waiting.remove((me, gate))
            except ValueError:  # it was handed over already
                self._hand_on()
        self._flush()

    def _hand_on(self) -> None:
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            gate.release()
        else:
            self._owner = None

    def _flush(self) -> None:
        """Run what is deferred if the lock is free; its holder does so when releasing it."""
        while self.deferred and self._mutex.acquire(blocking=False):
            try:
                free = self._owner is None
                if free:
                    self._owner = threading.get_ident()
            finally:
                self._mutex.release()
            if not free:
                return
            try:
                self._run_deferred()
            finally:
                with self._mutex:
                    self._hand_on()

    def _run_deferred(self) -> None:
        while self.deferred:
            self.deferred.popleft()()


class LeaderFollower:
    """One of the threads that wait drives the engine for all; the others wait for what it brings."""

    def __init__(self) -> None:
        self._news = Monitor()  # guards what follows
        self.stepping = False  # whether one of the threads that wait steps
        self._changes = 0  # number of events that may give a step something to do

    def notify(self) -> None:
        """Wake the threads that wait: a step may have something to do, or a wait may be over."""
        with DeferredInterrupts(), self._news.lock:
            self._changes += 1
            self._news.notify_all()

    def wait(self, ready: Callable[[], bool], step: StepUnless, pause: Callable[[], float | None]) -> None:
        """Step until `ready()`, or wait while another thread steps.

        After a step without work it waits for news, at most `pause()` seconds.
        """
        while not ready():
            seen = self._changes
            worked = self._stepped(ready, step)
            if worked is None:
                self._news.wait_for(lambda: not self.stepping or ready())
            elif not worked and (seconds := pause()) != 0:
                self._news.wait_unless(lambda seen=seen: seen != self._changes or ready(), seconds)

    def _stepped(self, ready: Callable[[], bool], step: StepUnless) -> bool | None:
        """Step, and return whether there was work; None if another of the waiting threads steps."""
        with DeferredInterrupts() as postponed:
            mine = False
            try:
                with self._news.lock:
                    if self.stepping:
                        return None
                    self.stepping = mine = True
                return step(ready)
            finally:
                postponed.final = True  # `_stepping` must not stay set
                if mine:
                    with self._news.lock:
                        self.stepping = False
                        self._news.notify_all()
