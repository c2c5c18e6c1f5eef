"""Logits agree with transformers in float32 on the same weights, whole, chunked, and token by token.

Each family's differences are at most those that docs/families.md states (`families_table` writes it).
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import TWINS, write_model
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.sampling.params import SamplingParams

TOLERANCE = 1e-3
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SHORT, LONG = (1, 17, 600), 3000  # tokens; 600 is past every window of the tiny models
LONG_SIZES = {"max_position_embeddings": 4096}


class Differences(NamedTuple):
    """The largest differences of logits that the page states, for few tokens and for many."""

    short: float
    long: float


class Stated(NamedTuple):
    """Those of a family, to transformers and to llama.cpp, and to its quantized files as a part of logits."""

    transformers: Differences
    llama_cpp: Differences
    quantized: float


def stated(page: str) -> dict[str, Stated]:
    """Those of each family in the page's table."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    numbers = {row[0].strip("`"): [float(number) for cell in row[4:8] for number in cell.split(", ")] for row in rows}
    return {
        name: Stated(Differences(*found[:2]), Differences(*found[2:4]), found[4]) for name, found in numbers.items()
    }


def all_logits(llm: LLM, ids: list[int]) -> np.ndarray:
    """[len(ids), vocab] through the engine."""

    def program() -> Program:
        return (yield Prefill(ids, logits="all"))

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request.result.logits


def tokens(count: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, vocab, count).tolist()


def assert_close(mine: np.ndarray, theirs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= tolerance
    assert (mine.argmax(-1) == theirs.argmax(-1)).all()


def expected_logits(directory: Path, ids: list[int]) -> np.ndarray:
    """Those of transformers, [len(ids), vocab]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@functools.cache
def expected_of(directory: Path, count: int, vocab: int) -> np.ndarray:
    return expected_logits(directory, tokens(count, vocab, seed=count))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("count", SHORT)
@pytest.mark.parametrize("max_step_tokens", [1024, 37])
def test_prefill(
    family: str, count: int, max_step_tokens: int, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]
) -> None:
    """Steps of 37 tokens end anywhere in pages and windows."""
    llm = tiny_llm(family, max_step_tokens=max_step_tokens)
    ids = tokens(count, llm.config.vocab_size, seed=count)
    expected = expected_of(tiny_directory(family), count, llm.config.vocab_size)
    assert_close(all_logits(llm, ids), expected, stated(PAGE.read_text())[family].transformers.short)


@pytest.mark.parametrize("name", TWINS)
def test_a_family_under_another_name(name: str, tmp_path: Path) -> None:
    """As a file of text alone, and as the text part of one that takes images too."""
    directory = write_model(name, tmp_path)
    path, ids = directory / "config.json", tokens(60, 300, seed=1)
    expected = expected_logits(directory, ids)
    assert_close(all_logits(LLM(str(directory), backend="reference", kv_bytes=16 << 20), ids), expected, 2e-4)
    path.write_text(json.dumps({"model_type": name, "text_config": json.loads(path.read_text())}))
    weights = load_file(directory / "model.safetensors")
    parts = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in weights.items()}
    save_file(parts, directory / "model.safetensors")
    assert_close(all_logits(LLM(str(directory), backend="reference", kv_bytes=16 << 20), ids), expected, 2e-4)


@pytest.mark.nightly
def test_long_prefill(family: str, tmp_path: Path) -> None:
    """Differences grow with positions where float32 angles of a scaled RoPE are rounded otherwise."""
    directory = write_model(family, tmp_path, **LONG_SIZES)
    llm = LLM(str(directory), backend="reference", kv_bytes=64 << 20)
    ids = tokens(LONG, llm.config.vocab_size, seed=LONG)
    tolerance = stated(PAGE.read_text())[family].transformers.long
    assert_close(all_logits(llm, ids), expected_logits(directory, ids), tolerance)


def test_greedy_decode(family: str, tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]) -> None:
    """Decoding 40 tokens past the window takes the tokens that transformers takes, with their log-probabilities."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(family), dtype=torch.float32)
    llm = tiny_llm(family)
    ids = tokens(20, llm.config.vocab_size, seed=3)
    made = list(llm.decode(llm.prefill(ids), max_tokens=40, ignore_eos=True, logprobs=0))
    whole = ids + [token.id for token in made]
    with torch.no_grad():
        logits = reference(torch.tensor([whole[:-1]])).logits[0, len(ids) - 1 :]
    assert logits.argmax(-1).tolist() == [token.id for token in made]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor([token.logprob for token in made]), expected, atol=1e-3, rtol=0)


def test_bfloat16(tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path]) -> None:
    """bfloat16 is as close to float32 as that of transformers, within a factor."""
    directory, llm = tiny_directory("qwen2"), tiny_llm("qwen2", dtype="bfloat16")
    ids = tokens(50, llm.config.vocab_size, seed=1)
    with torch.no_grad():
        exact, rounded = (
            transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)(torch.tensor([ids]))
            .logits[0]
            .float()
            .numpy()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert np.linalg.norm(all_logits(llm, ids) - exact) < 1.5 * np.linalg.norm(rounded - exact)
