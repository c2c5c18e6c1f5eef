"""Ctrl-C at every moment of the main thread: no lock stays held, and no thread is left waiting."""

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.kv.tiers.memory_store import MemoryStore
from tests.kv.values import make_pool
from tests.moments import at_each_moment
from tests.patience import PATIENCE_S
from twostroke.api.llm import LLM
from twostroke.engine.concurrency import FairLock, LeaderFollower
from twostroke.engine.output import Token
from twostroke.kv.pages import POOL
from twostroke.kv.tiers.disk.ledger import Account, Ledger
from twostroke.kv.tiers.names import Namespace
from twostroke.kv.tiers.private_pages import PrivatePages
from twostroke.kv.tiers.remote.connection_pool import ConnectionPool
from twostroke.sampling.params import SamplingParams
from twostroke.system import interrupts
from twostroke.system.daemon_threads import DaemonThreads


def in_a_thread(act: Callable[[], object], limit_s: float = 2.0) -> None:
    """Another thread can do it too."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "a lock stays held"


def soon(*answers: bool) -> Callable[[], bool]:
    """Gives these answers, and then True."""
    left = iter(answers)
    return lambda: next(left, True)


@pytest.fixture
def turns() -> LeaderFollower:
    return LeaderFollower()


def take_a_turn(turns: LeaderFollower) -> None:
    stepped: list[bool] = []
    turns.notify()
    turns.wait(lambda: bool(stepped), lambda ready: not stepped.append(True), lambda: None)


def test_every_moment_is_found() -> None:
    """With a Condition, a Ctrl-C can leave the lock held: this is what the other tests are about."""
    news, held = threading.Condition(threading.Lock()), 0

    def check() -> None:
        nonlocal held
        if not news._lock.acquire(blocking=False):  # pyright: ignore
            held += 1
        news._lock.release()  # pyright: ignore

    def enter() -> None:
        with news:
            pass

    assert at_each_moment(enter, check) > 3
    assert held == 2  # after it was taken, before it was given back


def test_turns(turns: LeaderFollower) -> None:
    def check() -> None:
        assert not turns.stepping
        in_a_thread(lambda: take_a_turn(turns))

    assert at_each_moment(turns.notify, check) > 5
    assert at_each_moment(lambda: turns.wait(soon(False), lambda _: bool(os.getpid()), lambda: 0), check) > 5
    assert at_each_moment(lambda: turns.wait(soon(False, False), lambda _: False, lambda: 1e-4), check) > 5


def test_a_second_ctrl_c_ends_a_step_and_not_the_turns(turns: LeaderFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)

    def check() -> None:
        assert not turns.stepping
        in_a_thread(lambda: take_a_turn(turns))

    def wait() -> None:
        turns.wait(soon(False), lambda _: bool(os.getpid()), lambda: 0)

    assert at_each_moment(wait, check, presses=2) > 5


def test_waiting_while_another_thread_steps(turns: LeaderFollower) -> None:
    def act() -> None:
        turns.stepping = True
        try:
            turns.wait(soon(False), lambda _: True, lambda: None)
        finally:
            turns.stepping = False

    assert at_each_moment(act, lambda: in_a_thread(lambda: take_a_turn(turns))) > 5


def test_fair_lock() -> None:
    lock, done = FairLock(), list[int]()

    def take() -> None:
        with lock:
            lock.defer(lambda: done.append(1))

    def check() -> None:
        in_a_thread(take)

    assert at_each_moment(take, check) > 10
    assert at_each_moment(lambda: lock.defer(lambda: done.append(2)), check) > 5
    assert not lock.deferred


def test_values_that_are_dropped() -> None:
    pool = make_pool(num_pages=4)
    (page,) = pool.allocate(1)

    def drop() -> None:
        pool.drop(np.array([page]), POOL)

    def check() -> None:
        in_a_thread(lambda: pool.claim(page, 1, 1))
        pool.settle()
        assert pool.num_references(page) in (0, 1)  # 1 if nothing was done
        if not pool.num_references(page):
            assert pool.allocate(1) == [page]

    assert at_each_moment(drop, check) > 10
    pool.release(np.array([page]))


def test_workers() -> None:
    workers, done = DaemonThreads("test", 1), list[int]()

    def act() -> None:
        workers.submit(lambda: done.append(1))
        workers.settle(1.0)

    def check() -> None:
        ran = threading.Event()
        workers.submit(ran.set)
        assert ran.wait(PATIENCE_S)

    assert at_each_moment(act, lambda: in_a_thread(check, 4)) > 10
    assert workers.close(PATIENCE_S)


class Idle:
    """A connection that is never used."""

    idle = trusted = True
    waiting = False

    def begin(self, deadline: float) -> None: ...

    def close(self) -> None: ...


def test_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = ConnectionPool("redis://127.0.0.1:1")
    endpoint.idle = cast(Any, [Idle() for _ in range(1000)])

    def act() -> None:
        with endpoint.connection(1.0):
            pass

    def check() -> None:
        assert not endpoint.in_use
        in_a_thread(act)

    assert at_each_moment(act, check) > 10
    assert at_each_moment(endpoint.close, lambda: in_a_thread(endpoint.close)) > 5


def test_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", lambda: 0)

    def act() -> None:
        with ledger.locked() as account:
            account.wrote(1)

    def check() -> None:
        in_a_thread(act)

    assert at_each_moment(act, check) > 10
    assert isinstance(ledger.peek(), Account)
    ledger.close()


def test_private_pages() -> None:
    private = PrivatePages(MemoryStore(), Namespace("", "", "geometry", "plain", 4, 8))

    def act() -> None:
        private.forget(private.keep(memoryview(b"12345678")))
        private.settle(1.0)

    def check() -> None:
        assert private.thread is not None
        settled: list[bool] = []
        in_a_thread(lambda: settled.append(private.settle(PATIENCE_S)))
        assert settled == [True]

    act()
    assert at_each_moment(act, check) > 5


def test_a_stream(tiny_llm: Callable[..., LLM]) -> None:
    """A Ctrl-C that ends the iterator ends its request."""
    engine = (llm := tiny_llm()).engine
    streams = list[Generator[Token]]()

    def begin() -> None:
        request = engine.submit(llm.request([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True)))
        while len(request.events) < 4:
            engine.step()
        streams.append(stream := cast(Generator[Token], engine.tokens(request)))
        next(stream)

    def take() -> None:
        for _ in range(3):
            next(streams[-1])

    def check() -> None:
        open = inspect.getgeneratorstate(stream := streams.pop()) == inspect.GEN_SUSPENDED
        assert engine.num_running == open
        stream.close()
        begin()

    begin()
    assert at_each_moment(take, check) > 5
    streams.pop().close()
    assert not engine.num_running


def test_signals_at_random_moments() -> None:
    """The same with true signals, and threads that wait for each other."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.press_ctrl_c", "turns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
