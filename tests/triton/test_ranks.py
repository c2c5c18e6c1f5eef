"""The GPU backend in several ranks has the bits of one: in the interpreter over gloo, or on one GPU over the host.

On a machine with fewer GPUs than ranks all use one (`collectives.ONE_GPU`), and tensors go through the
host in place of NCCL.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.ranks.scenario import bits, differences, finite
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends import torch_ranks
from twostroke.backends.ranks import collectives
from twostroke.backends.ranks.sharding import Shard
from twostroke.backends.triton.backend import TritonBackend
from twostroke.backends.triton.linear import DenseMatrix, Linear, UnpackBuffer
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import RankLost
from twostroke.kv.cache import KVCache
from twostroke.models.dropout import Dropout
from twostroke.sampling.params import SamplingParams

Open = Callable[..., LLM]
PROMPT = [(7 * i * i + 3 * i) % 379 + 2 for i in range(17)]
# 3 KV heads, 3 units of hidden values and of an MLP's outputs, 2 chunks of the vocabulary: few divide.
TINY: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 1100,
}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention"]},
    "gemma2": {"sliding_window": 6, "layer_types": ["sliding_attention"]},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},  # of three ranks one has no head
    "qwen3moe": {
        "mlp_only_layers": [],
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },  # of two ranks one has all outputs of first products
}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Open:
    monkeypatch.setattr(torch_ranks, "FOLLOWER", "tests.triton.follower")

    def open_model(path: Path, tp: int, **options: Any) -> LLM:
        monkeypatch.setattr(collectives, "ONE_GPU", device.type == "cuda" and torch.cuda.device_count() < tp)
        chosen: dict[str, Any] = {"kv_bytes": 4 << 20, "threads": 1} | options
        return LLM(str(path), backend="triton", device=str(device), tp=tp, **chosen)

    return open_model


def record(llm: LLM, packed: bool) -> dict[str, Any]:
    """Bits and tokens: cold, and in chunks beside others with a step in flight, sampled, scored, and looked into."""
    if packed:  # the interpreter takes long
        return {"cold": bits(llm.prefill(PROMPT[:5]))}
    seen: dict[str, Any] = {"cold": bits(llm.prefill(PROMPT))}
    llm.engine.config = SchedulerConfig(max_step_tokens=16, in_flight=True)
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    scored = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.8, repetition_penalty=1.1, logprobs=2, seed=6)

    def looked_into() -> Program:
        return (yield Prefill(PROMPT[3:7], states=2, queries=2))

    def dropped() -> Program:
        return (yield Prefill(PROMPT[:4], dropout=Dropout(0.3, seed=4)))

    requests = [
        llm.request(PROMPT, greedy),  # found in the prefix index
        llm.request(PROMPT[2:8], scored),
        *(Request(program, greedy, llm.tokenizer) for program in (looked_into, dropped)),
    ]
    llm.engine.run(requests)
    for name, request in zip(("greedy", "scored"), requests, strict=False):
        seen[name] = [(token.id, token.logprob, token.top_logprobs) for token in request.events]
        assert len(seen[name]) == 2
    inside = requests[2].result
    seen["states"], seen["queries"] = inside.states.tobytes(), inside.queries.rows.tobytes()
    seen["dropout"] = bits(requests[3].result)
    return seen


@pytest.mark.parametrize(
    ("family", "weights", "degrees"),
    [
        ("llama", "stored", (3,)),
        pytest.param("gemma3", "stored", (2,), marks=pytest.mark.nightly),  # windows are gpt_oss's too
        pytest.param("qwen3moe", "stored", (2,), marks=pytest.mark.nightly),  # experts are gpt_oss's too
        ("gpt_oss", "stored", (2,)),
        pytest.param("granite", "stored", (2,), marks=pytest.mark.nightly),
        pytest.param("olmo2", "stored", (2,), marks=pytest.mark.nightly),  # its norms join the heads of all ranks
        pytest.param("gemma2", "stored", (2,), marks=pytest.mark.nightly),
        ("qwen2", "int4", (3,)),
        ("qwen3moe", "int8", (2,)),
    ],
)
def test_families(family: str, weights: str, degrees: tuple[int, ...], opened: Open, tmp_path: Path) -> None:
    """Heads and outputs that do not divide, and ranks without any of some."""
    path = write_model(family, tmp_path, **(TINY | CHANGES.get(family, {})))
    seen: list[dict[str, Any]] = []
    for tp in (1, *degrees):
        with opened(path, tp, weights=weights) as llm:
            assert llm.backend.label == ("triton" if tp == 1 else f"triton in {tp} ranks")
            seen.append(record(llm, weights != "stored"))
    assert finite(seen[0])
    assert [differences(seen[0], other) for other in seen[1:]] == [[] for _ in degrees]


def test_values(opened: Open, tmp_path: Path) -> None:
    """Saved by two ranks and loaded by one process, and the other way; read and written as whole pages."""
    path = write_model("llama", tmp_path, num_hidden_layers=1)
    with opened(path, 1) as one, opened(path, 2) as two:
        for llm, other in ((one, two), (two, one)):
            value = llm.prefill(PROMPT)
            value.save(tmp_path / "a.kv")
            there = KVCache.load(tmp_path / "a.kv", other)
            assert there.canonical_length(other.model.id) == len(PROMPT)
            assert there.entries().tobytes() == value.entries().tobytes()
            again = other.prefill(PROMPT)
            again.save(tmp_path / "b.kv")
            assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()
            part, like = there[:9] + there.to("host").to("pool")[11:], value[:9] + value[11:]
            assert part.entries().tobytes() == like.entries().tobytes()
            assert (part.keys(0) == like.keys(0)).all()


def test_a_rank_that_ends(opened: Open, tmp_path: Path) -> None:
    path = write_model("llama", tmp_path, num_hidden_layers=1)
    with opened(path, 2) as llm:
        assert isinstance(llm.backend, TritonBackend)
        assert llm.backend.ranks is not None
        assert llm.backend.ranks.followers is not None
        stream = llm.stream("the quick", max_tokens=1000, ignore_eos=True)
        next(stream)
        os.kill(llm.backend.ranks.followers.pids[0], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^[^\n]* of 2 has ended[^\n]*: open the model again$"):
            list(stream)
        assert isinstance(llm.engine.failure, RankLost)


# (outputs, inputs) of products, with the segments that one GPU cuts their sums into, and the columns of each.
SEGMENTS = {
    "llama-3.1-8b": {"qkv": (6144, 4096, 2, 2048), "o": (4096, 4096, 4, 1024), "down": (4096, 14336, 4, 3584)},
    "qwen2.5-1.5b": {"qkv": (2048, 1536, 4, 384), "o": (1536, 1536, 4, 384), "down": (1536, 8960, 8, 1152)},
    "qwen2.5-0.5b": {"qkv": (1152, 896, 4, 256), "o": (896, 896, 4, 256), "down": (896, 4864, 8, 640)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048, 4, 512), "o": (2048, 4096, 8, 512)},
}


@pytest.mark.parametrize("model", list(SEGMENTS))
def test_segments_do_not_depend_on_the_degree(model: str) -> None:
    """On one GPU they are what was measured (docs/gpu.md); a rank has those of the whole product."""
    for outputs, inputs, segments, length in SEGMENTS[model].values():
        for degree in (1, 2, 3, 8):
            for rank in range(degree):
                rows = len(Shard(rank, degree).of(outputs, 32))
                matrix = DenseMatrix(rows, inputs, torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta"))
                linear = Linear([matrix], UnpackBuffer("meta"), of=outputs)
                assert (linear.segments, linear.length) == (segments, length), (degree, rank)
                if degree == 1:
                    assert Linear([matrix], UnpackBuffer("meta")).segments == segments


def test_shares_of_a_product(device: torch.device) -> None:
    """Parts that ranks compute are columns of the whole product's, for few tokens and for many."""
    generator = np.random.default_rng(0)
    w, x = (torch.from_numpy(generator.standard_normal((n, 448)).astype(np.float32)).bfloat16() for n in (160, 256))
    w, x = w.to(device), x.to(device)
    for tokens in (3, 70):
        made: list[torch.Tensor] = []
        for degree in (1, 3):
            parts: list[torch.Tensor] = []
            for rank in range(degree):
                own = Shard(rank, degree).of(len(w), 32)
                linear = Linear(
                    [DenseMatrix(len(own), 448, w[own.start : own.stop])], UnpackBuffer(str(device)), of=len(w)
                )
                assert linear.segments == 2
                out = torch.full((2 * 256 * len(own),), torch.nan, device=device)
                linear(x, out, tokens)
                parts.append(linear.made(out, tokens))
            made.append(torch.cat(parts, 2))
        assert torch.equal(*made)
