"""An engine in a process of its own: what is served does not depend on it, also when it dies."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import client_of, eventually
from tests.server.long_answers import LONG
from tests.server.wire import in_a_process
from twostroke.methods import METHODS, load_module
from twostroke.server.engine_process import remote
from twostroke.server.engine_process.in_flight import Roster
from twostroke.server.engine_process.launch import EngineProcess, SpareProcess
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.lifecycle import make_server
from twostroke.server.served_engine import ServedEngine
from twostroke.server.settings import Settings

FATAL = """
import os, signal
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill
from twostroke.fields import integer


@dataclass(frozen=True)
class Fatal(Method, name="fatal"):
    after: int = integer(0, least=0)

    def program(self, prompt):
        kv = yield Prefill(prompt)
        decoded = yield Decode(kv, max_tokens=self.after + 1)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextlib.contextmanager
def served(engine: ServedEngine, **settings: Any) -> Generator[httpx.Client]:
    with client_of(make_server(engine, Settings(model_name="tiny", grace_s=0.5, **settings), "127.0.0.1", 0)) as client:
        yield client


@contextlib.contextmanager
def engine_with(name: str, source: str, directory: Path, room: Path, **options: Any) -> Generator[RemoteEngine]:
    """An engine in a process of its own that knows a technique, by its source."""
    path = room / f"{name}.py"
    path.write_text(source)
    load_module(str(path))
    made = in_a_process(str(directory), str(path), **options)
    yield made
    made.stop()
    del METHODS[name]


@pytest.fixture(scope="module")
def engine(native_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    with engine_with("fatal", FATAL, native_directory, tmp_path_factory.mktemp("methods")) as made:
        yield made


@pytest.fixture(scope="module")
def client(engine: RemoteEngine) -> Iterator[httpx.Client]:
    with served(engine) as client:
        yield client


def kill(engine: RemoteEngine) -> None:
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def away(engine: RemoteEngine) -> Generator[None]:
    """The engine is dead, and the next one does not come meanwhile."""
    opener: Any = engine._opener  # pyright: ignore[reportPrivateUsage]
    launch, back = opener._launch, threading.Event()
    opener._launch = lambda *given: (back.wait(), launch(*given))[1]
    try:
        kill(engine)
        eventually(lambda: engine.restarting)
        yield
    finally:
        opener._launch = launch
        back.set()


def events(
    client: httpx.Client,
    path: str,
    body: dict[str, Any],
    at: int = 0,
    then: Callable[[], object] | None = None,
    most: int | None = None,
) -> Any:
    """The first events of a stream, without what differs between calls; `then` is called behind the event `at`."""
    found: list[Any] = []
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(plain(json.loads(line[6:])))
                if len(found) == at and then is not None:
                    then()
                if len(found) == most:
                    break
    return found


def plain(value: Any) -> Any:
    """JSON without ids, times and what was found in the cache."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        left_out = ("id", "created", "timings", "prompt_tokens_details")
        return {key: plain(one) for key, one in value.items() if key not in left_out}
    return value


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me of rivers and the sea."}], "max_tokens": 200}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "minLength": 40, "maxLength": 60}}},
    },
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "sampled": {"temperature": 1.2, "seed": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": 3},
    "penalties": {"temperature": 1, "seed": 1, "presence_penalty": 0.9, "repetition_penalty": 1.2, "ignore_eos": True},
    "choices": {"temperature": 1.1, "seed": 7, "n": 3, "ignore_eos": True},
    "grammar": {"temperature": 1.5, "seed": 3, "regex": "[a-f]{30}", "max_tokens": 60},
    "tools": {"temperature": 1.3, "seed": 5, "tools": [TOOL], "tool_choice": "required", "max_tokens": 120},
    "technique": {
        "temperature": 0.9,
        "seed": 2,
        "method": {"name": "drop", "window": 16, "every": 3},
        "ignore_eos": True,
    },
    "usage": {"temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_survives_its_engine(kind: str, engine: RemoteEngine, client: httpx.Client) -> None:
    """Twice: its events are those of an undisturbed run."""
    body = CHAT | BODIES[kind]
    expected = events(client, "/v1/chat/completions", body)
    before = engine.pid
    assert events(client, "/v1/chat/completions", body, min(9, len(expected) // 2), partial(kill, engine)) == expected
    eventually(lambda: engine.pid not in (None, before))


def test_text_that_is_held_back(engine: RemoteEngine, client: httpx.Client) -> None:
    """A stop string whose beginning has come when the engine dies."""
    body: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    body["stop"] = [text[20:28]]
    expected = events(client, "/v1/completions", body)
    assert expected[-1]["choices"][0]["finish_reason"] == "stop"
    assert events(client, "/v1/completions", body, 3, partial(kill, engine)) == expected


def test_whole_answers_survive(engine: RemoteEngine, client: httpx.Client) -> None:
    """Those that are not streamed, scores of prompts, embeddings; and one that has not begun."""
    body = {
        "model": "tiny",
        "prompt": ["the", "sea"],
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "prompt_logprobs": 1,
    }
    asked = [("/v1/completions", body), ("/v1/embeddings", {"model": "tiny", "input": ["a", "b"]})]
    expected = [plain(client.post(path, json=one).json()) for path, one in asked]
    found: list[Any] = [None, None]

    def ask(index: int) -> None:
        found[index] = plain(client.post(asked[index][0], json=asked[index][1]).json())

    first = threading.Thread(target=ask, args=(0,))
    first.start()
    eventually(lambda: client.get("/health").json()["in_flight"] > 0)
    kill(engine)
    ask(1)  # the engine is away
    first.join()
    assert found == expected


def test_a_request_that_ends_its_engine_is_ended_alone(engine: RemoteEngine, client: httpx.Client) -> None:
    """The neighbour's answer is that of an undisturbed run, and the engine is there afterwards."""
    body = CHAT | LONG | {"temperature": 0}
    expected = events(client, "/v1/chat/completions", body, most=40)
    fatal: list[httpx.Response] = []

    def ask() -> None:
        fatal.append(
            client.post(
                "/v1/completions", json={"prompt": "the", "method": "fatal", "max_tokens": 9, "ignore_eos": True}
            )
        )

    thread = threading.Thread(target=ask)
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        found = list[Any]()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                found.append(plain(json.loads(line[6:])))
                if len(found) == 3:
                    thread.start()
                if len(found) >= len(expected) and not thread.is_alive():
                    break
    assert found[: len(expected)] == expected
    assert fatal[0].status_code == 500
    assert fatal[0].json()["error"]["code"] == "ends_engine"
    eventually(lambda: client.get("/health").status_code == 200)


def test_contexts_and_responses_survive(engine: RemoteEngine, client: httpx.Client) -> None:
    made = client.post("/v1/contexts", json={"name": "mine", "messages": CHAT["messages"] * 4}).json()
    stored = client.post("/v1/responses", json={"input": "the", "max_output_tokens": 8, "temperature": 0}).json()
    asked = {"context": "mine", "messages": [{"role": "user", "content": "more"}], "max_tokens": 9, "temperature": 0}
    expected = plain(client.post("/v1/chat/completions", json=asked).json())
    with away(engine):
        assert client.get("/health").status_code == 503
        assert client.get("/health/live").status_code == 200
    assert client.get("/v1/contexts/mine").json()["tokens"] == made["tokens"]
    assert plain(client.post("/v1/chat/completions", json=asked).json()) == expected
    client.post("/reset_prefix_cache")  # now the context itself must bring its pages
    again = client.post("/v1/chat/completions", json=asked).json()
    assert plain(again) == expected
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["tokens"] // 16 * 16
    assert client.get(f"/v1/responses/{stored['id']}").json() == stored
    client.delete("/v1/contexts/mine")


def test_a_client_that_leaves_while_the_engine_is_away(engine: RemoteEngine, client: httpx.Client) -> None:
    body = CHAT | LONG | {"temperature": 0, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # a dropped iterator closes the connection
        next(lines)
        with away(engine):
            response.close()
            eventually(lambda: client.get("/health").json()["in_flight"] == 0)
    eventually(lambda: client.get("/health").status_code == 200)


def test_what_routes_ask_of_the_engine(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "the sea"}).json()["tokens"]
    assert sum(client.post("/attention", json={"tokens": tokens}).json()["weights"]) == pytest.approx(1, abs=1e-4)
    assert "<html" in client.post("/explain", json={"tokens": tokens, "answer": tokens}).text
    assert client.post("/reset_prefix_cache").json()["pages"] >= 0
    metrics = client.get("/metrics").text
    assert "twostroke_kv_pages{" in metrics
    assert "twostroke_engine_process_resident_memory_bytes" in metrics
    with client.stream("GET", "/watch") as watching:
        names = (line for line in watching.iter_lines() if line.startswith("event: "))
        assert [next(names) for _ in range(3)] == ["event: hello", "event: steps", "event: pages"]


def test_a_connection_is_closed_when_nothing_is_sent() -> None:
    """Else what is sent goes to whatever file has got its number: here it was the pipe of the next process's start."""
    process, order = EngineProcess(), list[str]()
    begun, go, pipe = threading.Event(), threading.Event(), process.pipe

    class Slow:
        def send_bytes(self, data: bytes) -> None:
            begun.set()
            assert go.wait(PATIENCE_S)
            order.append("sent")

        def close(self) -> None:
            order.append("closed")
            pipe.close()

    process.pipe = cast(Any, Slow())
    threads = [threading.Thread(target=process.send, args=(b"",)), threading.Thread(target=process.end, args=(0,))]
    for thread in threads:
        thread.start()
        assert begun.wait(PATIENCE_S)
    eventually(lambda: not process.alive)
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert order == ["sent", "closed"]


def test_an_engine_that_dies_again_and_again_fails(native_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.01)
    engine = in_a_process(str(native_directory))
    with served(engine) as client:
        engine._opener._launch = in_a_process_that_fails  # pyright: ignore[reportPrivateUsage]
        kill(engine)
        answer = client.post("/v1/completions", json={"prompt": "the"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        assert client.get("/health/live").status_code == 503


def in_a_process_that_fails(generation: int, kv_bytes: int | None = None) -> Any:
    raise OSError("there is no memory")


def test_suspects() -> None:
    """Of several requests that two deaths had in common, one goes on at a time; what makes a token is none."""
    roster = Roster()
    a, b, c = (roster.add(cast(Any, object()), None) for _ in range(3))
    assert roster.after_death([a.id, b.id]) == []
    assert [one.id for one in roster.to_begin()] == [a.id, b.id, c.id]
    assert roster.after_death([a.id, b.id]) == []
    assert [one.id for one in roster.to_begin()] == [a.id, c.id]
    assert roster.released() is None
    a.deaths = 0  # a token has come
    assert roster.released() is b
    ((ended, error),) = roster.after_death([a.id, b.id])
    assert ended is b
    assert "twice" in str(error)
    assert {one.id for one in roster.to_begin()} == {a.id, c.id}


def test_a_spare_process_is_taken() -> None:
    """It waits while another serves, one that has died is not taken, and it ends with the server."""
    spare = SpareProcess(delay_s=0.0)
    spare.keep()
    first = spare.pid
    process = spare.take()
    assert process.pid == first
    eventually(lambda: spare.pid not in (None, first))
    second = spare.pid
    assert second is not None
    os.kill(second, signal.SIGKILL)
    eventually(lambda: Path(f"/proc/{second}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    other = spare.take()
    assert other.pid != second
    eventually(lambda: spare.pid not in (None, second, other.pid))
    for one in (process, other, spare.take()):
        one.end(0)
