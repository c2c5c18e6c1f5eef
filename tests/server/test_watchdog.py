"""An engine's process that hangs is killed, and streams go on; one that is slow is left alone."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import eventually
from tests.server.test_engine_process import CHAT, engine_with, events, served
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.engine_process.watchdog import Watchdog, major_faults

HANGING = """
import threading
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill


@dataclass(frozen=True)
class Hanging(Method, name="hanging"):
    def program(self, prompt):
        kv = yield Prefill(prompt)
        threading.Event().wait()
        yield Decode(kv)
"""
GREEDY = CHAT | {"temperature": 0, "ignore_eos": True}


class World:
    """A clock, and a process that may read from disk."""

    def __init__(self, limit_s: float) -> None:
        self.now, self.faults, self.step_at = 0.0, 0, 0.0
        self.dog = Watchdog(limit_s, lambda: self.now, lambda pid: self.faults)

    def passes(self, seconds: float, *, faults: int = 0, steps: bool = False) -> bool:
        """Let time pass, with a look every so often. Returns whether the process was found to hang."""
        found, end = False, self.now + seconds
        while self.now < end:
            self.now += self.dog.look_s
            self.faults += faults
            self.step_at = self.now if steps else self.step_at
            found |= self.dog.hangs(1, self.now - self.step_at)
        return found


def test_what_a_hang_is() -> None:
    """Neither a long step, nor a machine that stood still, nor one that swaps."""
    world = World(100)
    assert not world.passes(1000, steps=True)
    assert not world.passes(90), "a long step"
    assert not world.passes(10, steps=True)
    world.now += 10_000  # everything was frozen, this process too
    assert not world.passes(90)
    assert not world.passes(1000, faults=3), "it reads its pages back"
    assert world.passes(60)
    assert not World(0).passes(10_000)


def test_a_death_begins_the_count_anew() -> None:
    world = World(100)
    assert world.passes(140)
    assert not world.passes(50), "the next process is given its time"


def test_faults_are_read() -> None:
    assert major_faults(os.getpid()) >= 0
    assert major_faults(2**22 + 1) == 0


@pytest.fixture(scope="module")
def engine(native_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    room = tmp_path_factory.mktemp("methods")
    with engine_with("hanging", HANGING, native_directory, room, watchdog_s=1.0) as made:
        yield made


@pytest.fixture(scope="module")
def client(engine: RemoteEngine) -> Iterator[httpx.Client]:
    with served(engine) as client:
        yield client


def test_a_stream_survives_a_process_that_stands_still(engine: RemoteEngine, client: httpx.Client) -> None:
    expected = events(client, "/v1/chat/completions", GREEDY)
    before = engine.pid
    assert before is not None
    threading.Timer(0.02, os.kill, (before, signal.SIGSTOP)).start()
    assert events(client, "/v1/chat/completions", GREEDY) == expected
    eventually(lambda: engine.pid not in (None, before))
    assert events(client, "/v1/chat/completions", GREEDY) == expected


def test_a_step_that_hangs(engine: RemoteEngine, client: httpx.Client) -> None:
    """The request in it is ended alone, after two processes; its neighbour goes on."""
    expected = events(client, "/v1/chat/completions", GREEDY)
    found: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "the", "method": "hanging", "max_tokens": 3}
        found.append(client.post("/v1/completions", json=body))

    thread = threading.Thread(target=ask)
    thread.start()
    assert events(client, "/v1/chat/completions", GREEDY) == expected
    thread.join()
    assert (found[0].status_code, found[0].json()["error"]["code"]) == (500, "ends_engine")
