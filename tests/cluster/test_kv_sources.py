"""An answer that another worker has begun takes its prompt's KV from where it is predicted to come soonest."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import eventually
from twostroke.api.llm import LLM
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.cluster.kv_sources import Computing
from twostroke.cluster.roles import READY, DecodeRole, PrefillRole
from twostroke.cluster.worker_metrics import WorkerMetrics
from twostroke.engine.request import Request
from twostroke.methods import Method, Plain, method
from twostroke.sampling.params import SamplingParams

PROMPT = [7, 9, 11, 13] * 25
CUT = 5


def slow(context: int, count: int) -> float:
    return float(count)


def quick(context: int, count: int) -> float:
    return count * 1e-6


@pytest.fixture
def open_llm(tiny_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    return lambda **options: tiny_llm("qwen3", weights="bf16", **options)


class Peer:
    """A prefill worker, and the answer of one process."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.role = llm, PrefillRole(llm)

    def whole(self, asked: DynamoRequest) -> list[int]:
        return self._run(asked.request(self.llm))

    def handed(self, asked: DynamoRequest) -> dict[str, Any]:
        request, outgoing = self.role.request(asked)
        self._run(request)
        return self.role.handed(asked, outgoing)

    def _run(self, request: Request) -> list[int]:
        self.llm.engine.run([request])
        request.raise_error()
        return [token.id for token in request.events]


@pytest.fixture
def peer(open_llm: Callable[..., LLM]) -> Iterator[Peer]:
    made = Peer(open_llm())
    with closing(made.role):
        yield made


def asked(chosen: Method | None = None) -> DynamoRequest:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    return DynamoRequest(PROMPT, [], params, chosen or Plain())


def source(llm: LLM, peer: Peer, one: DynamoRequest, computing: Computing, wire: float, **handed: Any) -> str:
    """Where a worker that takes over gets the KV from; its tokens are those of one process."""
    whole = peer.whole(one)
    with closing(DecodeRole(llm, computing=computing)) as role:
        role.wire.bytes_per_s = wire
        one = replace(one, given=whole[:CUT])
        request = role.request(one, peer.handed(one) | handed)
        one.continued(request)
        llm.engine.run([request])
        request.raise_error()
        assert [token.id for token in request.events] == whole[CUT:]
        [(found, count)] = role.taken_over.items()
        assert count == 1
    eventually(lambda: peer.role.idle)  # the peer is told that its value is wanted no longer
    return found


@pytest.mark.parametrize(
    ("computing", "wire", "handed", "expected"),
    [
        (slow, 1e9, {}, "peer"),
        (slow, 1e9, {READY: 1e6}, "computed"),
        (slow, 1.0, {}, "computed"),
        (quick, 1e9, {}, "computed"),
    ],
)
def test_what_is_predicted_to_be_quicker(
    computing: Computing, wire: float, handed: dict[str, Any], expected: str, open_llm: Callable[..., LLM], peer: Peer
) -> None:
    assert source(open_llm(), peer, asked(), computing, wire, **handed) == expected


def test_pages_of_the_pool_need_no_wire(open_llm: Callable[..., LLM], peer: Peer) -> None:
    llm = open_llm()
    llm.generate([PROMPT], max_tokens=1)
    assert source(llm, peer, asked(), lambda context, count: 1e-5 * count, 1e5) == "pool"


def test_pages_of_the_disk_are_weighed_too(open_llm: Callable[..., LLM], peer: Peer, tmp_path: Path) -> None:
    llms = [open_llm(kv_disk=str(tmp_path / "disk")) for _ in range(2)]
    for llm in llms:
        assert llm.model.backing_stores is not None
        llm.model.backing_stores.computing = slow
    llms[0].generate([PROMPT], max_tokens=1)
    assert llms[0].engine.tiers.flush()
    assert source(llms[1], peer, asked(), slow, 1.0) == "disk"


def test_a_technique_takes_what_its_prefill_worker_has(open_llm: Callable[..., LLM], peer: Peer) -> None:
    assert source(open_llm(), peer, asked(method("repeat")), quick, 1.0) == "peer"


def test_metrics_tell_what_was_chosen(open_llm: Callable[..., LLM]) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    with closing(DecodeRole(open_llm(), computing=slow)) as role:
        WorkerMetrics(None, role, lambda: {"migration": 3}, registry)
        role.taken_over["disk"] += 2
        assert b'twostroke_taken_over_total{source="disk"} 2.0' in generate_latest(registry)
        assert b'twostroke_identity_mismatches_total{what="migration"} 3.0' in generate_latest(registry)
        assert b'twostroke_identity_mismatches_total{what="value_received"} 0.0' in generate_latest(registry)
