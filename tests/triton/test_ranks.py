"""The GPU backend in several ranks has the bits of one: in the interpreter over gloo, or on one GPU over the host.

On a machine with a GPU all ranks use it (`links.ONE_GPU`), and a tensor goes through the host instead of NCCL.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks.scenario import UNEVEN, bits, differences, finite
from tests.tiny import write_model
from twostroke.backends import torch_ranks
from twostroke.backends.triton.backend import TritonBackend
from twostroke.backends.triton.linear import Dense, Linear, Scratch
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import RankLost
from twostroke.kv.cache import KVCache
from twostroke.llm import LLM
from twostroke.models.dropout import Dropout
from twostroke.ranks import links
from twostroke.ranks.shares import Share
from twostroke.sampling.params import SamplingParams

Open = Callable[..., LLM]
PROMPT = [(7 * i * i + 3 * i) % 379 + 2 for i in range(24)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Open:
    monkeypatch.setattr(torch_ranks, "FOLLOWER", "tests.triton.follower")
    monkeypatch.setattr(links, "ONE_GPU", device.type == "cuda")

    def open_model(path: Path, tp: int, **options: Any) -> LLM:
        chosen: dict[str, Any] = {"kv_bytes": 4 << 20, "threads": 1} | options
        return LLM(str(path), backend="triton", device=str(device), tp=tp, **chosen)

    return open_model


def record(llm: LLM) -> dict[str, Any]:
    """Bits and tokens, by what was asked: cold, in chunks beside others, with a step in flight, and looked into."""
    seen: dict[str, Any] = {"cold": bits(llm.prefill(PROMPT))}
    llm.engine.config = SchedulerConfig(max_step_tokens=9, in_flight=True)
    prompts = [PROMPT[5:16], PROMPT]  # the last is found in the prefix index
    for name, params in {
        "greedy": SamplingParams(max_tokens=3, ignore_eos=True),
        "scored": SamplingParams(
            max_tokens=2, ignore_eos=True, temperature=0.7, top_p=0.9, repetition_penalty=1.1, logprobs=2, seed=6
        ),
    }.items():
        answers = llm.generate(prompts, params)
        seen[name] = [[(token.id, token.logprob, token.top_logprobs) for token in one.tokens] for one in answers]

    def dropped() -> Program:
        return (yield Prefill(PROMPT[:5], dropout=Dropout(0.3, seed=4)))

    def looked_into() -> Program:
        return (yield Prefill(PROMPT[9:17], states=3, queries=2))

    requests = [Request(program, SamplingParams(), llm.tokenizer) for program in (dropped, looked_into)]
    llm.engine.run(requests)
    seen["dropout"], inside = bits(requests[0].result), requests[1].result
    seen["states"], seen["inside"] = inside.states.tobytes(), inside.queries.rows.tobytes()
    return seen


@pytest.mark.parametrize(
    ("family", "weights"),
    [("llama", "stored"), ("gemma3", "stored"), ("qwen3moe", "stored"), ("qwen2", "int4"), ("qwen3moe", "int8")],
)
def test_families(family: str, weights: str, opened: Open, tmp_path: Path) -> None:
    """At 1, 2 and 3 ranks: heads that do not divide, and with three ranks one without KV heads."""
    sizes: dict[str, Any] = UNEVEN | {"num_hidden_layers": 2, "layer_types": None, "head_dim": 32}
    if family == "gemma3":
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    if weights != "stored":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_model(family, tmp_path, **{name: value for name, value in sizes.items() if value is not None})
    seen: list[dict[str, Any]] = []
    for tp in (1, 2, 3):
        with opened(path, tp, weights=weights) as llm:
            assert llm.backend.label == ("triton" if tp == 1 else f"triton in {tp} ranks")
            seen.append(record(llm))
    assert finite(seen[0])
    assert [differences(seen[0], other) for other in seen[1:]] == [[], []]


def test_values(opened: Open, tmp_path: Path) -> None:
    """Saved by two ranks and loaded by one process, and the other way; read and written as whole pages."""
    path = write_model("llama", tmp_path, num_hidden_layers=2)
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
            assert (part.keys(1) == like.keys(1)).all()


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
                rows = len(Share(rank, degree).of(outputs, 32))
                matrix = Dense(rows, inputs, torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta"))
                linear = Linear([matrix], Scratch("meta"), of=outputs)
                assert (linear.segments, linear.length) == (segments, length), (degree, rank)
                if degree == 1:
                    assert Linear([matrix], Scratch("meta")).segments == segments


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
                own = Share(rank, degree).of(len(w), 32)
                linear = Linear([Dense(len(own), 448, w[own.start : own.stop])], Scratch(str(device)), of=len(w))
                assert linear.segments == 2
                out = torch.full((2 * 256 * len(own),), torch.nan, device=device)
                linear(x, out, tokens)
                parts.append(linear.made(out, tokens))
            made.append(torch.cat(parts, 2))
        assert torch.equal(*made)
