"""Workers with other weights join no cluster, and a worker that discovery has lost ends, to be started again."""

import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from benchmarks.local_cluster import ClusterProcess, LocalCluster
from tests.cluster.client import Answer, stream

pytest.importorskip("dynamo.common.backend", reason="needs NVIDIA Dynamo: make test-cluster")

MODEL = "tiny"
QUESTIONS = [f"{word} the quick brown fox" for word in ["one", "two", "three", "four"]]


@pytest.fixture
def cluster(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, MODEL) as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1", "--kv-bytes", "64MiB"]
        yield cluster


def ask(cluster: LocalCluster, question: str) -> Answer:
    message = {"role": "user", "content": question}
    return stream(cluster.url, model=MODEL, messages=[message], max_tokens=20, temperature=0, ignore_eos=True)


def written(worker: ClusterProcess) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", worker.log.read_text(errors="replace"))


def instances(cluster: LocalCluster) -> list[Any]:
    return [one for one in cluster.health()["instances"] if one["endpoint"] == "generate"]


def health(worker: ClusterProcess) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/health", timeout=10) as answer:
            return answer.status
    except HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize("other", [["--weights", "int8"], ["--weights", "bf16", "--page-size", "32"]])
def test_a_worker_of_another_identity_does_not_join(other: list[str], cluster: LocalCluster) -> None:
    worker = cluster.add("--weights", "bf16")
    cluster.ready()
    answers = [ask(cluster, question) for question in QUESTIONS]
    refused = cluster.add(*other)
    assert refused.process.wait(90) == 1
    assert "error: workers called 'tiny' are here (1) with other weights" in written(refused)
    assert health(worker) == 200
    assert len(instances(cluster)) == 1
    assert [ask(cluster, question) for question in QUESTIONS] == answers


def test_values_of_a_prefill_worker_with_another_identity_are_not_taken(cluster: LocalCluster) -> None:
    decode = cluster.add("--role", "decode", "--weights", "bf16")
    prefill = cluster.add("--role", "prefill", "--weights", "int8")
    cluster.ready()
    answers = [ask(cluster, question) for question in QUESTIONS]
    assert decode.metric("twostroke_identity_mismatches_total", what="value_received") == len(QUESTIONS)
    assert prefill.metric("twostroke_identity_mismatches_total", what="value_sent") == len(QUESTIONS)
    assert "its identity differs" in written(decode)
    assert "was refused a value" in written(prefill)
    prefill.stop()
    cluster.add("--role", "prefill", "--weights", "bf16")
    cluster.ready(forgotten=True)
    assert [ask(cluster, question) for question in QUESTIONS] == answers, "the decode worker's own, to the bit"


def test_a_worker_that_was_paused_for_too_long_is_not_ready_and_ends(cluster: LocalCluster) -> None:
    worker = cluster.add("--weights", "bf16")
    cluster.ready()
    worker.process.send_signal(signal.SIGSTOP)
    while instances(cluster):  # its lease has ended
        time.sleep(0.2)
    worker.process.send_signal(signal.SIGCONT)
    seen = [health(worker)]
    while worker.process.poll() is None:
        time.sleep(0.1)
        seen.append(health(worker))
    assert worker.process.returncode == 1
    assert 503 in seen
    assert 200 not in seen[seen.index(503) :]
    assert "discovery has lost this worker" in written(worker)
