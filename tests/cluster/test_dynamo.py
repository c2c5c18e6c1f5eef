"""Workers behind Dynamo's front end, as processes on loopback, and `kill -9` in the middle of their streams."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_cluster import ClusterFailed, LocalCluster
from tests.cluster.client import Answer, stream

pytest.importorskip("dynamo.common.backend", reason="needs NVIDIA Dynamo: make test-cluster")

MODEL = "tiny"
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 60} for name in ("name", "town", "street", "note")},
    "required": ["name", "town", "street", "note"],
    "additionalProperties": False,
}
REGEX = "([a-z ]{1,9}[0-9]){20,30}"
QUESTION: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the quick brown fox"}],
    "max_tokens": 500,
    "ignore_eos": True,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalized": {
        "temperature": 0.7,
        "seed": 3,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "logprobs": {"temperature": 0.7, "seed": 3, "logprobs": True, "top_logprobs": 2},
    "min_tokens": {"temperature": 1.0, "seed": 9, "min_tokens": 400, "ignore_eos": False},
    "schema": {
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": False,
        "nvext": {"annotations": [f"twostroke:{json.dumps({'guided_decoding': {'json': SCHEMA}})}"]},
    },
    "n": {"temperature": 1.0, "seed": 5, "nvext": {"annotations": ['twostroke:{"n": 3}']}},
    "n_and_stop": {
        "temperature": 1.0,
        "seed": 5,
        "stop": ["qu", "z", "W"],
        "ignore_eos": False,
        "min_tokens": 20,
        "nvext": {"annotations": ['twostroke:{"n": 3}']},
    },
    "n_and_regex": {
        "temperature": 1.0,
        "seed": 6,
        "ignore_eos": False,
        "nvext": {"annotations": [f"twostroke:{json.dumps({'n': 2, 'guided_decoding': {'regex': REGEX}})}"]},
    },
    "method": {"temperature": 0, "nvext": {"annotations": ['twostroke:{"method": {"name": "repeat", "times": 3}}']}},
}


@pytest.fixture(scope="module")
def cluster(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), MODEL) as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1", "--kv-bytes", "64MiB"]
        two_workers(cluster)
        yield cluster


def two_workers(cluster: LocalCluster) -> None:
    for _ in range(2 - len(cluster.running)):
        cluster.add()
    cluster.ready(forgotten=True)  # a retry may be sent to a dead worker, and there are three


def ask(cluster: LocalCluster, **body: Any) -> Answer:
    return stream(cluster.url, **(QUESTION | body))


def killed(cluster: LocalCluster, at: int, **body: Any) -> Answer:
    """The answer if the worker that makes it is killed after `at` chunks."""
    two_workers(cluster)
    return stream(cluster.url, at, lambda id: cluster.serving(id).kill(), **(QUESTION | body))


@pytest.mark.parametrize("case", CASES)
def test_a_stream_survives_its_worker(case: str, cluster: LocalCluster) -> None:
    two_workers(cluster)
    whole = ask(cluster, **CASES[case])
    assert whole.finish, whole.error
    assert killed(cluster, 20, **CASES[case]) == whole


def test_choices_are_those_of_the_request_that_does_not_migrate(cluster: LocalCluster) -> None:
    two_workers(cluster)
    stated = {"temperature": 1.0, "seed": 5, "max_tokens": 40}
    known, asked = ask(cluster, n=3, **stated), ask(cluster, **(CASES["n"] | stated))
    assert asked == known
    assert len(asked.text) == 3


def test_a_stop_string_is_found_where_its_beginning_came_from_another_worker(cluster: LocalCluster) -> None:
    sampled = {"temperature": 1.0, "seed": 7, "ignore_eos": False}  # with it, Dynamo drops stop strings
    two_workers(cluster)
    text = ask(cluster, **sampled).text[0]
    pieces = (text[i : i + 5] for i in range(len(text) // 4, len(text) - 5))
    stop = next(piece for piece in pieces if piece.isprintable() and "\ufffd" not in piece)
    whole = ask(cluster, stop=[stop], **sampled)
    assert whole.finish == {0: "stop"}
    assert whole.text[0] == text[: text.index(stop)]
    assert killed(cluster, 20, stop=[stop], **sampled) == whole


def test_two_workers_may_die(cluster: LocalCluster) -> None:
    two_workers(cluster)
    cluster.add()
    cluster.ready()
    deaths: list[str] = []

    def kill(id: str) -> None:
        worker = cluster.serving(id)
        deaths.append(worker.name)
        worker.kill()

    def kill_two(id: str) -> None:
        kill(id)
        wait_for_another(cluster, id, deaths)
        kill(id)

    whole = ask(cluster, temperature=1.0, seed=5)
    assert stream(cluster.url, 10, kill_two, **(QUESTION | {"temperature": 1.0, "seed": 5})) == whole
    assert len(set(deaths)) == 2


def wait_for_another(cluster: LocalCluster, id: str, dead: list[str]) -> None:
    for _ in range(500):
        with contextlib.suppress(ClusterFailed):
            if cluster.serving(id).name not in dead:
                return
        time.sleep(0.01)


def test_a_worker_that_ends_gives_its_requests_away(cluster: LocalCluster) -> None:
    two_workers(cluster)
    body = {"temperature": 1.0, "seed": 8, "max_tokens": 1900}
    whole = ask(cluster, **body)
    ended: list[Any] = []

    def end(id: str) -> None:
        worker = cluster.serving(id)
        worker.process.send_signal(signal.SIGTERM)
        ended.append(worker)

    assert stream(cluster.url, 5, end, **(QUESTION | body)) == whole
    assert ended[0].process.wait(30) == 0


def test_the_front_end_may_restart(cluster: LocalCluster) -> None:
    two_workers(cluster)
    whole = ask(cluster, temperature=0)
    cluster.restart_front_end()
    cluster.ready()
    assert ask(cluster, temperature=0) == whole


def test_choices_and_refusals(cluster: LocalCluster) -> None:
    two_workers(cluster)
    both = ask(cluster, n=2, temperature=1.0, seed=1, max_tokens=30, logprobs=True)
    assert {choice: len(tokens) for choice, tokens in both.logprobs.items()} == {0: 30, 1: 30}
    assert list(both.finish.values()) == ["length"], "Dynamo ends a stream at the first reason"
    refused = ask(cluster, nvext={"annotations": ['twostroke:{"method": "repaet"}']})
    assert refused.error is not None
    assert "repaet" in refused.error


def test_everything_listens_on_loopback(cluster: LocalCluster) -> None:
    two_workers(cluster)
    ours = {member.process.pid for member in (cluster.front_end, *cluster.running)}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in ours)]
    assert len(found) >= len(ours)
    assert all(address.startswith("127.0.0.1:") for address in found), found
