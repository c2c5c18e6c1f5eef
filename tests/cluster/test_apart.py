"""Techniques over two workers, and a router that knows their prefixes, behind Dynamo's front end."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_cluster import ClusterProcess, LocalCluster
from tests.cluster.client import Answer, stream
from twostroke.api.llm import LLM
from twostroke.methods import method

pytest.importorskip("dynamo.common.backend", reason="needs NVIDIA Dynamo: make test-cluster")

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "the quick brown fox " * 60}]
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4}
LIMITS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def ask(
    cluster: LocalCluster,
    technique: dict[str, Any],
    at: int = 0,
    act: Callable[[str], None] | None = None,
    **sampling: Any,
) -> Answer:
    annotation = f"twostroke:{json.dumps({'method': technique})}"
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "nvext": {"annotations": [annotation]}}
    return stream(cluster.url, at, act, **body, **LIMITS, **sampling)


def in_one_process(llm: LLM, technique: dict[str, Any], **sampling: Any) -> str:
    return llm.chat(MESSAGES, method=method(**technique), **LIMITS, **sampling).text


def crossed(worker: ClusterProcess) -> list[tuple[int, int]]:
    """(entries, bytes) of each value that came to a decode worker."""
    lines = re.findall(r"a value of (\d+) entries came: (\d+) bytes", worker.log.read_text(errors="replace"))
    return [(int(entries), int(size)) for entries, size in lines]


def test_the_teacher_is_in_one_process_and_the_student_in_another(
    tiny_directory: Callable[[str], Path], tiny_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    directory = str(tiny_directory("qwen3"))
    both = tiny_llm("qwen3", weights="bf16", student="int8")
    with LocalCluster(tmp_path, MODEL) as cluster:
        cluster.options = ["--model", directory, "--threads", "1", "--kv-bytes", "64MiB"]
        cluster.add("--role", "prefill", "--weights", "bf16")
        students = [cluster.add("--role", "decode", "--as-student", "--weights", "int8") for _ in range(2)]
        cluster.ready()
        for technique in (
            {"name": "overfill"},
            {"name": "overfill", "recompute": True},
            {"name": "refresh", "every": 8},
            {"name": "refresh", "when": "entropy", "every": 4, "threshold": 4.0},
        ):
            for sampling in (GREEDY, SAMPLED):
                assert ask(cluster, technique, **sampling).text == {0: in_one_process(both, technique, **sampling)}
        assert len([*crossed(students[0]), *crossed(students[1])]) == 8
        technique = {"name": "refresh", "every": 8}
        survived = ask(cluster, technique, 20, lambda id: cluster.serving(id).kill(), **SAMPLED)
        assert len(cluster.running) == 2
        assert survived.text == {0: in_one_process(both, technique, **SAMPLED)}
        refused = ask(cluster, {"name": "repeat"})
        assert refused.error is not None
        assert "student" in refused.error


def test_repetition_sends_its_last_copy_alone(
    tiny_directory: Callable[[str], Path], tiny_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = tiny_llm("qwen3", weights="bf16")
    with LocalCluster(tmp_path, MODEL) as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1", "--kv-bytes", "64MiB"]
        cluster.add("--role", "prefill")
        decode = cluster.add("--role", "decode")
        cluster.ready()
        for technique in ({"name": "plain"}, {"name": "repeat"}, {"name": "repeat", "times": 4}):
            assert ask(cluster, technique, **SAMPLED).text == {0: in_one_process(llm, technique, **SAMPLED)}
        (entries, plain), (twice_entries, twice), (often_entries, often) = crossed(decode)
        assert entries == twice_entries == often_entries
        page = llm.pool.page_bytes
        assert twice <= plain + page, "a copy may begin within a page"
        assert often <= plain + page


def test_a_router_knows_where_a_prefix_is(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    def asked(question: str) -> int:
        """How many blocks of the prompt the router knows at the worker."""
        messages = [{"role": "user", "content": question}]
        assert stream(cluster.url, model=MODEL, messages=messages, max_tokens=2).error is None
        log = re.sub(r"\x1b\[[0-9;]*m", "", cluster.front_end.log.read_text(errors="replace"))
        return int(re.findall(r"overlap_blocks=(\d+)", log)[-1])

    with LocalCluster(tmp_path, MODEL, router="kv", events="zmq") as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1"]
        cluster.options += ["--kv-bytes", "512KiB"]  # some 50 pages: older prompts leave the index
        cluster.add()
        cluster.ready()
        prompts = [f"{letter * 7} " * 20 for letter in "abcdef"]
        assert asked(prompts[0]) == 0
        assert asked(prompts[0]) > 5
        for prompt in prompts[1:]:
            asked(prompt)
        assert asked(prompts[0]) <= 1, "it was told of pages that have left"


def test_a_question_goes_where_its_document_is_on_disk(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """Two workers are started again, each above a directory of its own: nothing is in their pools."""

    def known() -> list[int]:
        """The blocks on the chosen worker's disk, of each request so far."""
        log = re.sub(r"\x1b\[[0-9;]*m", "", cluster.front_end.log.read_text(errors="replace"))
        return [int(blocks) for blocks in re.findall(r"disk_blocks=(\d+)", log)]

    def answered(prompt: str) -> tuple[ClusterProcess, int]:
        """Which worker has answered, and how many blocks on its disk the router knew of."""
        ids: list[str] = []
        before = len(known())
        messages = [{"role": "user", "content": prompt}]
        assert stream(cluster.url, 1, ids.append, model=MODEL, messages=messages, max_tokens=2).error is None
        while len(known()) == before:  # the log comes a little later than the answer
            time.sleep(0.05)
        return cluster.serving(ids[0]), known()[-1]

    def start(directory: str) -> ClusterProcess:
        return cluster.add("--kv-disk", str(tmp_path / directory), "--kv-disk-bytes", "20MiB")

    documents = [f"{letter * 7} " * 30 for letter in "abcdef"]
    with LocalCluster(tmp_path, MODEL, router="kv", events="zmq") as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1", "--kv-bytes", "4MiB"]
        for directory, own in (("one", documents[::2]), ("two", documents[1::2])):
            worker = start(directory)
            cluster.ready(forgotten=True)
            for document in own * 2:  # what is asked twice goes to the disk
                answered(document)
            files = -1
            while files != (files := sum(1 for _ in (tmp_path / directory).rglob("*"))):  # it writes behind answers
                time.sleep(0.5)
            worker.kill()
        workers = [start("one"), start("two")]
        cluster.ready(forgotten=True)
        while not all("routers are told" in worker.log.read_text(errors="replace") for worker in workers):
            time.sleep(0.1)
        time.sleep(3.0)  # and it is on its way
        for i, document in enumerate(documents):
            worker, blocks = answered(f"{document} What is it?")
            assert worker is workers[i % 2], i
            assert blocks > 5
