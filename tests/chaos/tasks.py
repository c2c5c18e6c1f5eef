"""Threads of which one runs at a time, on a virtual clock: code that waits runs unchanged, and a seed replays.

A thread gives the turn back where it waits (`park`), and only there. The queue of events decides who is next.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from twostroke.simulation.events import Events

STUCK_S = 120.0  # seconds of real time after which a turn that is not given back is a deadlock


class Killed(BaseException):
    """Raised where a thread of a dead process waits."""


class Process:
    """What dies at once, or stands still.

    Attributes:
        dead: nothing of it runs any more. stopped: nothing of it runs for now (SIGSTOP).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = self.stopped = False
        self.tasks: dict[Task, None] = {}
        self.held: list[Callable[[], None]] = []  # turns that it would have had while it was stopped


class Task:
    """One thread's job."""

    def __init__(self, process: Process, job: Callable[[], object]) -> None:
        self.process, self.job = process, job
        self.turn = 0  # which of its waits it is in
        self.done = False
        self.locks = 0  # conditions that it holds: it must not wait for anything else meanwhile
        self.waiting_for_end: list[Task] = []
        self.thread: _Thread | None = None


class _Thread:
    """A thread that takes one task after another."""

    def __init__(self, run: Callable[[_Thread], None]) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.task: Task | None = None
        self.thread = threading.Thread(target=run, args=(self,), name="wire task", daemon=True)
        self.thread.start()


class Tasks:
    """The scheduler. Attributes: current: the task that runs; None between events."""

    def __init__(self, events: Events) -> None:
        self.events = events
        self.current: Task | None = None
        self._back = threading.Lock()
        self._back.acquire()
        self._idle: list[_Thread] = []
        self._all: list[_Thread] = []
        self._error: BaseException | None = None

    def start(self, process: Process, job: Callable[[], object]) -> Task:
        task = Task(process, job)
        process.tasks[task] = None
        self.events.at(self.events.now, partial(self._resume, task, 0))
        return task

    def park(self, until: float | None = None) -> None:
        """Wait for `wake`, or for a moment; None: for `wake` alone."""
        task = self.current
        assert task is not None
        assert not task.locks, "it waits, and holds a lock"
        if task.process.dead:
            raise Killed
        if until is not None and not task.process.stopped and self.events.skip_to(until):
            return  # nothing else happens before: no other thread has to have its turn
        task.turn += 1
        if until is not None:
            self.events.at(until, partial(self._resume, task, task.turn))
        thread = task.thread
        assert thread is not None
        self._back.release()
        thread.gate.acquire()
        if task.process.dead:
            raise Killed

    def sleep(self, seconds: float) -> None:
        until = self.events.now + seconds
        while self.events.now < until:
            self.park(until)

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        self.events.at(self.events.now, partial(self._resume, task, task.turn))

    def join(self, task: Task, limit_s: float | None) -> bool:
        """Wait for the end of a task. Returns whether it has ended."""
        until = None if limit_s is None else self.events.now + limit_s
        while not task.done and (until is None or self.events.now < until):
            assert self.current is not None
            task.waiting_for_end.append(self.current)
            self.park(until)
        return task.done

    def kill(self, process: Process) -> None:
        """`kill -9`. What its threads do while they end reaches nobody."""
        process.dead, process.stopped = True, False
        for task in list(process.tasks):
            self.wake(task)

    def stop(self, process: Process) -> None:
        process.stopped = True

    def go_on(self, process: Process) -> None:
        process.stopped = False
        held, process.held = process.held, []
        for turn in held:
            self.events.at(self.events.now, turn)

    @property
    def alive(self) -> bool:
        """Whether a task has not ended."""
        return len(self._idle) < len(self._all)

    def close(self) -> None:
        """End the threads. No task may be left."""
        for thread in self._all:
            thread.task = None
            thread.gate.release()
            thread.thread.join(10)

    def _resume(self, task: Task, turn: int) -> None:
        if task.done or turn != task.turn:
            return
        if task.process.stopped:
            task.process.held.append(partial(self._resume, task, turn))
            return
        if task.thread is None:
            task.thread = self._idle.pop() if self._idle else self._new_thread()
            task.thread.task = task
        self.current = task
        task.thread.gate.release()
        if not self._back.acquire(timeout=STUCK_S):
            raise AssertionError("a thread waits for what is not part of the simulation")
        self.current = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _new_thread(self) -> _Thread:
        self._all.append(_Thread(self._run))
        return self._all[-1]

    def _run(self, thread: _Thread) -> None:
        while True:
            thread.gate.acquire()
            task = thread.task
            if task is None:
                return
            try:
                if not task.process.dead:
                    task.job()
            except Killed:
                pass
            except BaseException as error:
                self._error = error
            task.done, task.job, task.thread = True, _nothing, None
            task.process.tasks.pop(task, None)
            for other in task.waiting_for_end:
                self.wake(other)
            thread.task = None
            self._idle.append(thread)
            del task
            self._back.release()


def _nothing() -> None:
    pass


class Condition:
    """`threading.Condition` among tasks."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting: list[Task] = []

    def __enter__(self) -> None:
        if (task := self._tasks.current) is not None:
            task.locks += 1

    def __exit__(self, *_: object) -> None:
        if (task := self._tasks.current) is not None:
            task.locks -= 1

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None, /) -> bool:
        task, now = self._tasks.current, self._tasks.events.now
        assert task is not None
        until = None if timeout is None else now + timeout
        while not predicate():
            if until is not None and self._tasks.events.now >= until:
                return False
            self._waiting.append(task)
            task.locks -= 1
            try:
                self._tasks.park(until)
            finally:
                task.locks += 1
        return True

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._tasks.wake(task)


class Workers:
    """At most `count` tasks, which take jobs in order."""

    def __init__(self, tasks: Tasks, process: Process, count: int) -> None:
        self._tasks, self._process, self._count = tasks, process, count
        self._jobs: deque[Callable[[], object]] = deque()
        self._running: list[Task] = []
        self._closed = False

    def submit(self, job: Callable[[], object]) -> None:
        if self._closed or self._process.dead:
            return
        self._jobs.append(job)
        self._running = [task for task in self._running if not task.done]
        if len(self._running) < self._count:
            self._running.append(self._tasks.start(self._process, self._work))

    def close(self, limit_s: float) -> bool:
        self._closed = True
        self._jobs.clear()
        ended = [self._tasks.join(task, limit_s) for task in self._running if task is not self._tasks.current]
        return all(ended)

    def _work(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            job()
            del job
