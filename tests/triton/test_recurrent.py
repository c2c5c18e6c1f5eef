"""Layers with a state: chunks, resumptions, neighbours, cuts and forks change no bit.

In the interpreter the products around them are made row by row, since tiles of other sizes round in other places there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.triton.linear import DenseMatrix, GatedLinear, Linear, Matrix
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

LENGTH = 70  # past a chunk's end, at 64
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 40,
    },
    "granite4-hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "full_attention"],
        "num_local_experts": 0,
        "mamba_n_groups": 1,
        "mamba_d_state": 24,
        "mamba_d_head": 96,
    },
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
Opened = Callable[[int], LLM]


@pytest.fixture(scope="module", params=SIZES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with a state and one of attention."""
    family: str = request.param
    return write_model(family, tmp_path_factory.mktemp(family) / "model", **SIZES[family])


@pytest.fixture
def opened(directory: Path, device: torch.device) -> Opened:
    """Opens it with so many tokens in a step."""
    options: dict[str, Any] = {"backend": "triton", "device": str(device), "kv_bytes": 16 << 20}
    return lambda tokens: LLM(str(directory), max_step_tokens=tokens, prefix_index="off", **options)


@pytest.fixture
def by_row(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that have the same bits for any number of tokens; on a GPU the kernels have them."""

    def product(matrix: Matrix, x: torch.Tensor, tokens: int) -> torch.Tensor:
        assert isinstance(matrix, DenseMatrix)
        wide = matrix.matrix.double()
        return torch.stack([wide @ row for row in x[:tokens].double()], -2).float()

    def linear(self: Linear, x: torch.Tensor, out: torch.Tensor, tokens: int, add: bool = False) -> None:
        parts = self.made(out, tokens)
        made = torch.cat([product(piece, x, tokens) for piece in self.pieces], -1)
        parts[0] = parts[0] + made if add else made
        parts[1:] = 0

    def gated(self: GatedLinear, x: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        gate, up = product(self.pair, x, tokens)
        out[:tokens] = torch.nn.functional.silu(gate) * up

    if device.type == "cpu":
        monkeypatch.setattr(Linear, "__call__", linear)
        monkeypatch.setattr(GatedLinear, "__call__", gated)


def ids(count: int) -> list[int]:
    return [3 + i * 37 % 370 for i in range(count)]


def bits(kv: KVCache) -> list[bytes]:
    """Rows, inputs, states and logits."""
    assert kv.tail is not None
    assert kv.tail.logits is not None
    states = kv.states()
    assert states is not None
    return [kv.entries().tobytes(), *(state.tobytes() for state in states.values()), kv.tail.logits.tobytes()]


@pytest.mark.usefixtures("by_row")
def test_any_schedule(opened: Opened) -> None:
    """In one step, in steps that part a chunk, and behind a cut, which goes on within a chunk and across its end."""
    llm = opened(512)
    whole = llm.prefill(ids(LENGTH))
    expected = bits(whole)
    assert bits(opened(23).prefill(ids(LENGTH))) == expected
    for start in (66, 60):
        assert bits(llm.prefill(ids(LENGTH)[start:], whole[:start])) == expected, start


@pytest.mark.usefixtures("by_row")
def test_beside_others(opened: Opened) -> None:
    """Decoding across a chunk's end beside a prompt in chunks; a fork's tokens are its own."""
    llm = opened(24)
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)
    prompts = [ids(63), ids(26)[::-1]]
    alone = [llm.generate([prompt], params)[0].tokens for prompt in prompts]
    assert [answer.tokens for answer in llm.generate(prompts, params)] == alone
    value = llm.prefill(prompts[0])
    left, right = (bits(llm.prefill([token, 9], value)) for token in (5, 6))
    assert left != right
    assert bits(llm.prefill([5, 9], value)) == left


def test_the_formulas(opened: Opened, directory: Path) -> None:
    """Rows and states are the reference's up to bfloat16's rounding, behind a snapshot too."""
    mine = opened(50).prefill(ids(LENGTH))
    theirs = LLM(str(directory), backend="reference", threads=1, kv_bytes=16 << 20).prefill(ids(LENGTH))
    assert mine.tail is not None
    assert theirs.tail is not None
    assert distance(mine.entries(), theirs.entries()) < 0.03
    assert distance(mine.tail.logits, theirs.tail.logits) < 0.05
    (state,), (expected,) = ((kv.states() or {}).values() for kv in (mine, theirs))
    assert distance(state, expected) < 0.05


def distance(mine: np.ndarray | None, theirs: np.ndarray | None) -> float:
    assert mine is not None
    assert theirs is not None
    return float(np.linalg.norm(np.nan_to_num(mine - theirs)) / np.linalg.norm(np.nan_to_num(theirs)))
