"""Prefill and decode workers apart, and faults at every place: no request hangs, no page is lost, tokens do not change.

What a fault may change is told in FAULTS: most change nothing that a client sees.
"""

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.local_cluster import ClusterProcess, LocalCluster
from tests.cluster.client import Answer, stream

pytest.importorskip("dynamo.common.backend", reason="needs NVIDIA Dynamo: make test-cluster")

MODEL = "tiny"
SETTLE_S = 40.0  # a lease and a stall, after which nobody may hold a page
GRAMMAR = {"guided_decoding": {"regex": "([a-z ]{0,20}[0-9.,;]{1,9}){20,40}"}}
QUESTION: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 30}],
    "max_tokens": 250,
    "ignore_eos": True,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "grammar": {"temperature": 1.0, "seed": 2, "nvext": {"annotations": [f"twostroke:{json.dumps(GRAMMAR)}"]}},
    "n2": {"temperature": 1.0, "seed": 5, "nvext": {"annotations": ['twostroke:{"n": 2}']}},
}


class Split:
    """A cluster of two prefill workers and two decode workers; what has died is replaced."""

    def __init__(self, cluster: LocalCluster, undisturbed: dict[str, Answer]) -> None:
        self.cluster, self.undisturbed = cluster, undisturbed
        self.prefill: list[ClusterProcess] = []
        self.decode: list[ClusterProcess] = []

    def mend(self) -> None:
        running = self.cluster.running
        self.prefill = [one for one in self.prefill if one in running]
        self.decode = [one for one in self.decode if one in running]
        while len(self.prefill) < 2:  # Dynamo serves nothing while there is none
            self.prefill.append(self.cluster.add("--role", "prefill"))
        while len(self.decode) < 2:
            self.decode.append(self.cluster.add("--role", "decode"))
        self.cluster.ready()

    def having(self, id: str, among: list[ClusterProcess]) -> ClusterProcess:
        """The one of these workers that has a request."""
        request = id.partition("-")[2]
        return next(one for one in among if request in one.log.read_text(errors="replace"))

    def ask(self, at: int = 0, act: Callable[[str], None] | None = None, **body: Any) -> Answer:
        return stream(self.cluster.url, at, act, **(QUESTION | body))

    def fresh(self) -> dict[str, Any]:
        """A prompt that no prefix index has."""
        text = f"{time.monotonic_ns()} {QUESTION['messages'][0]['content']}"
        return {"messages": [{"role": "user", "content": text}]}

    def held(self) -> dict[str, float]:
        """What workers hold for somebody."""
        found: dict[str, float] = {}
        for worker in (*self.prefill, *self.decode):
            found[f"{worker.name} pages"] = worker.metric("twostroke_kv_pages", state="used")
            for state in ("running", "waiting", "arriving"):
                found[f"{worker.name} {state}"] = worker.metric("twostroke_requests", state=state)
        found |= {f"{worker.name} offered": worker.metric("twostroke_offered_values") for worker in self.prefill}
        found |= {f"{worker.name} quarantined": worker.metric("twostroke_quarantined_pages") for worker in self.decode}
        return {name: count for name, count in found.items() if count}

    def await_settled(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        while held := self.held():
            assert time.monotonic() < deadline, held
            time.sleep(0.2)


@pytest.fixture(scope="module")
def split(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    # The front end knows a dead worker for 10 s, and may try it; here they die faster than that.
    with LocalCluster(tmp_path_factory.mktemp("chaos"), MODEL, migration_limit=10) as cluster:
        cluster.options = ["--model", str(tiny_directory("qwen3")), "--threads", "1", "--kv-bytes", "64MiB"]
        cluster.options += ["--max-step-tokens", "32"]  # a prefill of many steps
        split = Split(cluster, {})
        split.mend()
        for name, sampling in SAMPLINGS.items():
            split.undisturbed[name] = split.ask(**sampling)
            assert split.undisturbed[name].finish, split.undisturbed[name].error
        yield split


@pytest.fixture(autouse=True)
def nothing_stays(split: Split) -> Iterator[None]:
    split.mend()
    yield
    split.mend()
    split.await_settled()


@pytest.fixture(params=list(SAMPLINGS))
def sampling(request: pytest.FixtureRequest) -> str:
    return request.param


def while_prefilling(split: Split, sampling: str, act: Callable[[ClusterProcess], None], after_s: float) -> Answer:
    """The answer if something is done to the prefill worker, so many seconds after the request has reached it."""
    before = {worker: worker.log.stat().st_size for worker in split.prefill}

    def watch() -> None:
        while not over.is_set():
            for worker in split.prefill:
                with worker.log.open("rb") as log:
                    log.seek(before[worker])
                    if b"request received" in log.read():
                        time.sleep(after_s)
                        act(worker)
                        return
            time.sleep(0.001)

    over, watching = threading.Event(), threading.Thread(target=watch)
    watching.start()
    try:
        return split.ask(**SAMPLINGS[sampling])
    finally:
        over.set()
        watching.join()


def unchanged(split: Split, sampling: str, answer: Answer) -> bool:
    """Whether the answer is the undisturbed one."""
    return answer == split.undisturbed[sampling]


def test_a_prefill_worker_is_dead(split: Split, sampling: str) -> None:
    split.prefill[0].kill()
    for _ in split.prefill:  # one of them goes to the dead one first
        assert unchanged(split, sampling, split.ask(**SAMPLINGS[sampling]))


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.1])
def test_a_prefill_worker_dies_on_the_way(split: Split, sampling: str, after_s: float) -> None:
    assert unchanged(split, sampling, while_prefilling(split, sampling, ClusterProcess.kill, after_s))


def test_a_prefill_worker_dies_after_the_transfer(split: Split, sampling: str) -> None:
    answer = split.ask(5, lambda id: split.having(id, split.prefill).kill(), **SAMPLINGS[sampling])
    assert unchanged(split, sampling, answer)


def test_a_decode_worker_dies(split: Split, sampling: str) -> None:
    answer = split.ask(20, lambda id: split.having(id, split.decode).kill(), **SAMPLINGS[sampling])
    assert unchanged(split, sampling, answer)
    [other] = [one for one in split.decode if one in split.cluster.running]
    chosen = re.findall(r"taken over with KV from (\w+)", other.log.read_text(errors="replace"))
    assert sum(other.metric("twostroke_taken_over_total", source=one) for one in set(chosen)) == len(chosen) > 0


def test_a_prefill_worker_stalls(split: Split, sampling: str) -> None:
    """It stands still for longer than a sign of life may take: the decode worker prefills, and takes nothing late."""
    stalled: list[ClusterProcess] = []

    def stall(worker: ClusterProcess) -> None:
        worker.process.send_signal(signal.SIGSTOP)
        stalled.append(worker)

    try:
        answer = while_prefilling(split, sampling, stall, 0.03)
    finally:
        for worker in stalled:
            worker.process.send_signal(signal.SIGCONT)
    assert unchanged(split, sampling, answer)
    split.await_settled()
    for worker in stalled:  # Dynamo has forgotten it, and it does not register again
        worker.kill()


def test_the_client_goes_away(split: Split, sampling: str) -> None:
    class Gone(Exception):
        pass

    def leave(_: str) -> None:
        raise Gone

    with contextlib.suppress(Gone):
        split.ask(3, leave, **SAMPLINGS[sampling])


def test_the_front_end_dies(split: Split, sampling: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the connection ends
        split.ask(3, lambda _: split.cluster.restart_front_end(), **SAMPLINGS[sampling])
    split.cluster.ready()
    assert split.ask(**SAMPLINGS[sampling]) == split.undisturbed[sampling]


def test_a_worker_that_ends_gives_its_requests_away(split: Split) -> None:
    ending = (split.prefill[0], split.decode[0])
    for worker in ending:
        worker.process.send_signal(signal.SIGTERM)
    for _ in range(2):
        assert split.ask(**SAMPLINGS["sampled"]) == split.undisturbed["sampled"]
    assert [worker.process.wait(40) for worker in ending] == [0, 0]
