"""Threads' work on one thread and a virtual clock: code that waits runs unchanged, and a seed replays.

A task is a greenlet, which has a stack of its own. It gives the turn back where it waits (`park`), and only there. The
queue of events decides who is next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import greenlet

from twostroke.study.simulate.virtual_time import EventQueue


class Killed(BaseException):
    """Raised where a task of a dead process waits."""


class Process:
    """What dies at once, or stands still.

    Attributes:
        dead: nothing of it runs any more. stopped: nothing of it runs for now (SIGSTOP).
        locks: reentrant locks of its code (`RLock`), none of which may be held where a task waits: as all tasks share a
            thread, they would not keep each other out.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = self.stopped = False
        self.tasks: dict[Task, None] = {}
        self.locks: list[Any] = []
        self.held: list[Callable[[], None]] = []  # turns that it would have had while it was stopped


class Task:
    """One thread's job."""

    def __init__(self, process: Process, job: Callable[[], object]) -> None:
        self.process, self.job = process, job
        self.turn = 0  # which of its waits it is in
        self.woken = -1  # the wait for which an end is planned
        self.done = False
        self.locks = 0  # conditions that it holds: it must not wait for anything else meanwhile
        self.waiting_for_end: list[Task] = []
        self.stack: greenlet.greenlet | None = None


class Tasks:
    """The scheduler. Attributes: current: the task that runs; None between events. alive: tasks that have not ended."""

    def __init__(self, events: EventQueue) -> None:
        self.events = events
        self.current: Task | None = None
        self.alive = 0
        self._events = greenlet.getcurrent()  # where events run

    def start(self, process: Process, job: Callable[[], object]) -> Task:
        task = Task(process, job)
        process.tasks[task] = None
        self.wake(task)
        return task

    def park(self, until: float | None = None) -> None:
        """Wait for `wake`, or for a moment; None: for `wake` alone."""
        task = self.current
        assert task is not None
        process = task.process
        assert not task.locks, "it waits, and holds a lock"
        if process.dead:
            raise Killed
        assert not any(lock._is_owned() for lock in process.locks), "it waits, and holds a lock"
        if until is not None and not process.stopped and _skipped_to(self.events, until):
            return  # nothing else happens before: no other task has to have its turn
        task.turn += 1
        if until is not None:
            self.events.at(until, partial(self._resume, task, task.turn))
        self._events.switch()
        if process.dead:
            raise Killed

    def sleep(self, seconds: float) -> None:
        until = self.events.now + seconds
        while self.events.now < until:
            self.park(until)

    def wake(self, task: Task) -> None:
        """Let a task that waits go on."""
        if task.woken != task.turn:
            task.woken = task.turn
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
        """`kill -9`. What its tasks do while they end reaches nobody."""
        process.dead, process.stopped = True, False
        process.held.clear()
        for task in list(process.tasks):
            task.woken = -1
            self.wake(task)

    def stop(self, process: Process) -> None:
        process.stopped = True

    def go_on(self, process: Process) -> None:
        process.stopped = False
        held, process.held = process.held, []
        for turn in held:
            self.events.at(self.events.now, turn)

    def _resume(self, task: Task, turn: int) -> None:
        if task.done or turn != task.turn:
            return
        if task.process.stopped:
            task.process.held.append(partial(self._resume, task, turn))
            return
        if task.stack is None:
            task.stack = greenlet.greenlet(self._run)
            self.alive += 1
        self.current = task
        try:
            task.stack.switch(task)  # what a task raises is raised here
        finally:
            self.current = None

    def _run(self, task: Task) -> None:
        try:
            if not task.process.dead:
                task.job()
        except Killed:
            pass
        finally:
            task.done, task.job = True, _nothing
            task.process.tasks.pop(task, None)
            for other in task.waiting_for_end:
                self.wake(other)
            self.alive -= 1


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


def _skipped_to(events: EventQueue, moment: float) -> bool:
    """Let time pass until a moment if nothing is planned before or then. Returns whether it has."""
    if moment >= events.next_time:
        return False
    events.now = max(events.now, moment)
    events.count += 1
    return True
