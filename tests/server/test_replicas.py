"""Several processes of one model behind one door: the answers of one, prefixes found again, and deaths survived."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import long_answers
from tests.server.conftest import eventually
from tests.server.test_engine_process import BODIES, CHAT, away, events, kill, plain, served
from tests.server.wire import in_a_process, launch
from twostroke.server.engine_process import remote
from twostroke.server.engine_process.launch import EngineProcess
from twostroke.server.engine_process.replicas import ReplicatedEngine

PATH = "/v1/chat/completions"
LONG = "Tell me of rivers and of the sea, and of all the hills between them. " * 4


@pytest.fixture(scope="module")
def engine(native_directory: Path) -> Iterator[ReplicatedEngine]:
    made = ReplicatedEngine([launch(str(native_directory), tells_pages=True)] * 2)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def client(engine: ReplicatedEngine) -> Iterator[httpx.Client]:
    with served(engine, vllm_metrics=True) as client:
        yield client


@pytest.fixture(scope="module")
def expected(native_directory: Path) -> dict[str, Any]:
    """The events of one engine."""
    one = in_a_process(str(native_directory))
    with served(one) as client:
        return {kind: events(client, PATH, CHAT | body) for kind, body in BODIES.items() if kind != "technique"}


def chat(client: httpx.Client, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
    answer = client.post(PATH, json=body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def of_each(client: httpx.Client, name: str) -> list[float]:
    """A number of `/metrics`, of both replicas."""
    found = re.findall(rf'^twostroke_{name}{{replica="(\d)"}} (\S+)$', client.get("/metrics").text, re.MULTILINE)
    assert [replica for replica, _ in found] == ["0", "1"]
    return [float(value) for _, value in found]


@contextlib.contextmanager
def stopped(engine: ReplicatedEngine) -> Generator[None]:
    """Its processes stand still."""
    pids = [one.pid for one in engine.parts if one.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_streams_at_once_are_those_of_one_engine(
    client: httpx.Client, engine: ReplicatedEngine, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And both replicas have work."""
    before = of_each(client, "prefix_tokens_queried_total")
    found: dict[str, Any] = {}
    submitted, submit = list[Any](), engine.submit
    monkeypatch.setattr(engine, "submit", lambda *given: (submit(*given), submitted.append(given)))

    def ask(kind: str) -> None:
        found[kind] = sorted(events(client, PATH, CHAT | BODIES[kind]), key=_choice)

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in expected]
    with stopped(engine):  # no answer is over before all have a replica
        for one in threads:
            one.start()
        eventually(lambda: len(submitted) == len(expected))
    for one in threads:
        one.join()
    assert found == {kind: sorted(one, key=_choice) for kind, one in expected.items()}
    after = of_each(client, "prefix_tokens_queried_total")
    assert all(new > old for new, old in zip(after, before, strict=True))


def _choice(event: dict[str, Any]) -> int:
    return event["choices"][0]["index"] if event["choices"] else -1


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_conversation_finds_its_pages(client: httpx.Client, salt: str | None) -> None:
    """Several of them in turn, each at the replica that has it; a salt is no hindrance."""
    salted = {} if salt is None else {"cache_salt": salt}
    texts = [f"{i}. {LONG}" for i in range(4)]
    first = [chat(client, text, **salted) for text in texts]
    again = [chat(client, text, **salted) for text in texts]
    assert [plain(one) for one in again] == [plain(one) for one in first]
    assert all(cached(one) >= 64 for one in again)


def test_a_death_disturbs_no_other(client: httpx.Client, engine: ReplicatedEngine, expected: dict[str, Any]) -> None:
    """Streams of both go on, new calls are taken meanwhile, and the next process is used again."""
    found: list[Any] = [None, None]
    victim = engine.parts[0]

    def ask(index: int) -> None:
        found[index] = events(client, PATH, CHAT | BODIES["greedy"])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    with away(victim):
        health = client.get("/health")
        assert (health.status_code, health.json()["restarting"]) == (200, False)
        assert [one["restarting"] for one in health.json()["replicas"]] == [True, False]
        chat(client, LONG)  # the other has it
    for one in threads:
        one.join()
    assert found == [expected["greedy"]] * 2
    eventually(lambda: not victim.restarting)
    before = of_each(client, "prefix_tokens_queried_total")[0]
    for i in range(3):
        chat(client, f"New and {i} " * 20)
    assert of_each(client, "prefix_tokens_queried_total")[0] > before


def test_contexts_live_at_a_replica(client: httpx.Client, engine: ReplicatedEngine) -> None:
    """They are found there, also after the prefix index was emptied, and computed again after a death."""
    for i in range(3):
        made = client.post("/v1/contexts", json={"name": f"c{i}", "prompt": f"{i} {LONG}"}).json()
        assert made["tokens"] > 64, made
    asked: list[dict[str, Any]] = [
        {"context": f"c{i}", "prompt": "more", "max_tokens": 6, "temperature": 0} for i in range(3)
    ]
    answers = [client.post("/v1/completions", json=one).json() for one in asked]
    assert all(cached(one) >= 64 for one in answers)
    assert client.post("/reset_prefix_cache").json()["pages"] > 8
    assert {one["tier"] for one in client.get("/v1/contexts").json()["data"]} == {"host"}
    again = [client.post("/v1/completions", json=one).json() for one in asked]
    assert all(cached(one) >= 64 for one in again)
    for one in engine.parts:
        before = one.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        eventually(lambda one=one, before=before: one.pid not in (None, before))
    last = [client.post("/v1/completions", json=one).json() for one in asked]
    assert [plain(one)["choices"] for one in answers] == [plain(one)["choices"] for one in again]
    assert [plain(one)["choices"] for one in answers] == [plain(one)["choices"] for one in last]
    for one in asked:
        client.delete(f"/v1/contexts/{one['context']}")


def test_what_belongs_to_all(client: httpx.Client) -> None:
    chat(client, LONG)
    assert client.post("/reset_prefix_cache").json()["pages"] > 0
    assert client.post("/reset_prefix_cache").json()["pages"] == 0
    assert len(client.get("/slots").json()) == client.get("/props").json()["total_slots"]
    assert client.get("/load").json() == {"server_load": 0}
    assert all(f'vllm:kv_cache_usage_perc{{engine="{i}"' in client.get("/metrics").text for i in range(2))
    tokens = client.post("/tokenize", json={"prompt": "the sea"}).json()["tokens"]
    for _ in range(3):
        assert sum(client.post("/attention", json={"tokens": tokens}).json()["weights"]) == pytest.approx(1, abs=1e-4)
    with client.stream("GET", "/watch?replica=1") as watching:
        assert next(watching.iter_lines()) == "event: hello"
    refused = client.get("/watch?replica=2")
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "replica")


def test_one_that_is_lost_for_good_hands_its_requests_on(
    native_directory: Path,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Streams go on at the other one with the same events; once that is lost too, they end with one line."""
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    broken = threading.Event()
    start = launch(str(native_directory), tells_pages=True)

    def fragile(generation: int, kv_bytes: int | None = None) -> EngineProcess:
        if broken.is_set():
            raise OSError("no memory")
        return start(generation, kv_bytes)

    engine = ReplicatedEngine([fragile] * 2)
    found: dict[str, Any] = {}

    def ask(kind: str) -> None:
        found[kind] = sorted(events(client, PATH, CHAT | BODIES[kind]), key=_choice)

    with served(engine) as client:
        long = CHAT | BODIES["sampled"] | long_answers.LONG
        undisturbed = events(client, PATH, long, most=40)
        eventually(lambda: client.get("/health").json()["in_flight"] == 0)
        before = of_each(client, "prefix_tokens_queried_total")
        lost: list[int] = []  # the one that has the stream
        threads = [threading.Thread(target=ask, args=(kind,)) for kind in ("greedy", "choices")]

        def lose() -> None:
            lost.append(int(of_each(client, "prefix_tokens_queried_total")[1] > before[1]))
            for thread in threads:
                thread.start()
            broken.set()
            kill(engine.parts[lost[0]])

        assert events(client, PATH, long, 3, lose, most=40) == undisturbed
        left = 1 - lost[0]
        for thread in threads:
            thread.join()
        assert found == {kind: sorted(expected[kind], key=_choice) for kind in found}
        assert f"goes on at replica {left}, since" in caplog.text
        assert "died 5 times in a row" in caplog.text
        health = client.get("/health")
        assert (health.status_code, [one["live"] for one in health.json()["replicas"]]) == (200, [left == 0, left == 1])
        refused = client.get(f"/watch?replica={lost[0]}")
        assert (refused.status_code, "died 5 times" in refused.text) == (503, True)
        with client.stream("GET", "/watch") as watching:
            lines = watching.iter_lines()
            assert (next(lines), f'"replica":{left}' in next(lines)) == ("event: hello", True)
        with client.stream("POST", PATH, json=long | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            kill(engine.parts[left])
            assert "died 5 times in a row: start it again" in "".join(lines)
        assert client.post(PATH, json=CHAT).status_code == 503
    engine.stop()
