"""Weights quantized on load: the format of each matrix, the effect on answers, and separate KV identities."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.linalg import norm

from tests.models.test_against_transformers import all_logits
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.models.checkpoints.quantize import quantize
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.formats.encode import Encoder
from twostroke.models.formats.tensor import RawTensor

IDS = [5, 9, 200, 17, 33, 5, 80, 81, 3, 44] * 4
WEIGHTS = ("bf16", "int8", "int4")


@pytest.mark.parametrize("weights", WEIGHTS)
def test_matrices_change_and_the_rest_does_not(weights: str, tiny_directory: Callable[[str], Path]) -> None:
    original = open_checkpoint(str(tiny_directory("qwen2")))
    changed = quantize(original, weights)
    matrices = changed.matrices()
    for name in original.names():
        before, after = original.tensor(name), changed.tensor(name)
        if name not in matrices:
            assert after is before
            continue
        expected = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q8_0" if name == "head" else "Q4_1"}[weights]
        assert matrices[name].format == after.format == expected
        assert matrices[name].nbytes == after.nbytes < before.nbytes
        tolerance = {"bf16": 0.002, "int8": 0.01, "int4": 0.1}[weights]
        assert norm(after.dequantize() - before.dequantize()) < tolerance * norm(before.dequantize())


@pytest.mark.parametrize(("weights", "bits"), [("int3", 3), ("int2", 2)])
def test_fewer_bits_are_simulated(weights: str, bits: int, tiny_directory: Callable[[str], Path]) -> None:
    """In blocks of 4 bits, with 2**bits values per group, and an error no larger than that of a least-squares fit."""
    original = open_checkpoint(str(tiny_directory("qwen2")))
    errors = {}
    for name in ("layers.1.down", "layers.0.q"):
        before = original.tensor(name).dequantize()
        for choice in ("int4", weights):
            after = quantize(original, choice).tensor(name)
            assert after.format == "Q4_1"
            errors[choice] = float(norm(after.dequantize() - before) / norm(before))
        groups = quantize(original, weights).tensor(name).dequantize().reshape(-1, 32)
        assert max(len(np.unique(group)) for group in groups) == 1 << bits
        # A step of 2 ** -bits of a group's range has an error of its twelfth root; a fit is not worse.
        low, high = before.reshape(-1, 32).min(1), before.reshape(-1, 32).max(1)
        uniform = np.sqrt(np.square((high - low) / ((1 << bits) - 1)).mean()) / 12**0.5
        assert errors["int4"] < errors[weights] < 1.02 * float(uniform / np.sqrt(np.square(before).mean()))
    assert quantize(original, weights).weights_id != quantize(original, "int4").weights_id
    assert quantize(original, weights).tensor("head").format == "Q8_0"


def test_a_tied_embedding_is_the_head(tiny_directory: Callable[[str], Path]) -> None:
    assert quantize(open_checkpoint(str(tiny_directory("llama"))), "int4").tensor("embed").format == "Q8_0"


def test_what_is_there_already_or_would_grow_in_4_bits_stays() -> None:
    original = open_checkpoint("smollm2-135m")
    same = quantize(original, "int4")
    assert not same.encoders  # Q4_1, and the embedding in Q8_0
    assert same.weights_id == original.weights_id
    assert set(quantize(original, "int8").encoders) == set(original.matrices()) - {"embed"}
    blocks = RawTensor("embed", "Q4_0", (49152, 576), np.zeros((49152, 324), np.uint8), "file: embed")
    smaller = replace(original, stored={**original.stored, "embed": blocks})
    assert not quantize(smaller, "int4").encoders
    assert "embed" in quantize(smaller, "int8").encoders


def test_rows_that_gguf_permutes_are_permuted_still() -> None:
    original = open_checkpoint("smollm2-135m")
    name = "layers.3.q"
    assert name in original.transforms
    assert (quantize(original, "int8").tensor(name).data == Encoder("Q8_0")(original.tensor(name)).data).all()


def test_logits_are_near(family: str, tiny_llm: Callable[..., LLM]) -> None:
    """Most of them: a row with nearly equal router logits may choose another expert, and then differs wholly."""
    exact = all_logits(tiny_llm(family), IDS)
    distances = [
        float(
            np.median(norm(all_logits(tiny_llm(family, weights=weights), IDS) - exact, axis=-1) / norm(exact, axis=-1))
        )
        for weights in WEIGHTS
    ]
    # Random weights make the most of rounding: trained ones lose far less (benchmarks/quality.py).
    assert distances[0] < 0.05
    assert distances[1] < 0.1
    assert max(distances[:2]) < distances[2] < (0.75 if family == "deepseek_v3" else 0.7)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_schedules_still_agree(weights: str, tiny_llm: Callable[..., LLM]) -> None:
    whole, chunked = (all_logits(tiny_llm(weights=weights, max_step_tokens=n), IDS) for n in (512, 7))
    np.testing.assert_allclose(whole, chunked, atol=1e-3, rtol=0, equal_nan=False)


def test_values_know_the_weights_that_computed_them(tiny_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """They can be joined, as their geometry is equal, but neither is canonical for the other model."""
    llms = {weights: tiny_llm(weights=weights) for weights in ("stored", *WEIGHTS)}
    assert len({llm.model.id for llm in llms.values()}) == len(llms)
    llms["int8"].prefill(IDS).save(tmp_path / "a.kv")
    for weights, llm in llms.items():
        kv = KVCache.load(tmp_path / "a.kv", llm)
        assert kv.canonical_length(llm.model.id) == (len(IDS) if weights == "int8" else 0)


def test_nothing_is_encoded_before_it_is_asked_for(
    tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for read in ("dequantize", "chunks"):
        monkeypatch.setattr(RawTensor, read, lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(Encoder, "__call__", lambda *_: pytest.fail("a tensor was encoded"))
    checkpoint = quantize(open_checkpoint(str(tiny_directory("qwen2"))), "int4")
    assert len(checkpoint.weights_id) == 32
    with pytest.raises(InvalidRequest, match="threads"):
        LLM(str(tiny_directory("qwen2")), weights="int4", threads=0)


def test_what_cannot_be_is_said(tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="weights must be one of stored, bf16, int8, int4, int3, int2, not 'int5'"):
        LLM("no-such-model", weights="int5")
    narrow = open_checkpoint(str(tiny_directory("llama")))
    odd = RawTensor("layers.0.q", "F32", (64, 40), narrow.tensor("layers.0.q").data[:, :160], "file: q")
    monkeypatch.setitem(narrow.stored, "layers.0.q", odd)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match="multiple of 32, and file: q has 40 columns: use 'stored' or 'bf16'"):
        quantize(narrow, "int8")
