"""K and V of 8 and 4 bits in the Triton backend, and biases of entries."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_bias import logits_behind, random_bias
from tests.engine.test_kv_bits import CODED, KINDS
from tests.triton.test_backend import distance, ids
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.models.kv_formats import kv_format
from twostroke.sampling.params import SamplingParams

Open = Callable[..., LLM]
# K of 8 bits is in k8v4 too, beside V of 4.
MIXED = [pytest.param("int8", marks=pytest.mark.nightly), "k8v4"]
FORMATS = ["bfloat16", *MIXED]


@pytest.fixture
def opened(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Open:
    """Opens a model with heads of 64, or one with a window."""

    def open_kind(kv_dtype: str = "bfloat16", kind: str = "plain", **options: Any) -> LLM:
        path = KINDS[kind](tmp_path_factory.mktemp(kind))
        chosen: dict[str, Any] = {
            "backend": "triton",
            "device": str(device),
            "kv_bytes": 8 << 20,
            "weights": "bf16",
        } | options
        return LLM(str(path), kv_dtype=kv_dtype, **chosen)

    return open_kind


@pytest.mark.parametrize("dtype", CODED)
def test_what_is_stored_is_what_the_format_says(dtype: str, opened: Open) -> None:
    """Of the first layer, whose inputs do not depend on what is stored: to the bit."""
    numbers, found = opened().prefill(ids(18)), opened(dtype).prefill(ids(18))
    form = kv_format(dtype)
    expected = form.decode(form.encode(numbers.entries()[0].astype(np.float32)))
    assert np.array_equal(found.entries()[0], expected)
    assert found.nbytes * 256 == numbers.nbytes * form.head_bytes(64)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["plain", "windowed"])
@pytest.mark.parametrize("dtype", CODED)
def test_the_kernels_compute_what_the_reference_does(kind: str, dtype: str, opened: Open) -> None:
    """Over the reference's entries, of one tile and of several, which many programs share: as exact as in bfloat16."""
    llm, reference = opened(dtype, kind), opened(dtype, kind, backend="reference", device="cpu")
    for count, tokens in ((20, [7]), (150, [7]), (150, [7, 5, 9])):
        known = reference.prefill(ids(count))
        found, expected = (
            logits_behind(one, kv, tokens) for one, kv in ((llm, known.copy_to(llm.pool)), (reference, known))
        )
        assert distance(found, expected) < 0.02


@pytest.mark.parametrize("dtype", MIXED)
def test_no_schedule_changes_an_answer(dtype: str, opened: Open) -> None:
    alone, together = opened(dtype), opened(dtype, max_step_tokens=7)
    prompts = [ids(11), ids(18)[::-1]]
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    expected = [alone.generate([prompt], params)[0].tokens for prompt in prompts]
    assert [answer.tokens for answer in together.generate(prompts, params)] == expected


@pytest.mark.parametrize("dtype", FORMATS)
def test_biases_of_entries(dtype: str, opened: Open) -> None:
    llm, reference = opened(dtype), opened(dtype, backend="reference", device="cpu")
    for count, tokens in ((150, [7]), (20, [7, 5, 9])):
        known = reference.prefill(ids(count))
        bias, there = random_bias(llm, count), known.copy_to(llm.pool)
        expected = logits_behind(reference, known.with_bias(bias), tokens)
        assert distance(logits_behind(llm, there.with_bias(bias), tokens), expected) < 0.06
        plain = logits_behind(llm, there, tokens)
        assert distance(plain, expected) > 0.2  # they do something
        assert np.array_equal(logits_behind(llm, there.with_bias(np.zeros_like(bias)), tokens), plain)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_neighbours_bias_changes_nothing(dtype: str, opened: Open) -> None:
    llm = opened(dtype)
    plain, other = llm.prefill(ids(18)), llm.prefill(ids(7))
    biased = other.with_bias(random_bias(llm, 7))
    params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2)

    def answers(*values: Any) -> list[Any]:
        requests = [llm.decode_request(kv, params) for kv in values]
        llm.engine.finish([llm.engine.submit(request) for request in requests])
        return [[(one.id, one.logprob) for one in request.result.sampled] for request in requests]

    assert answers(biased, plain) == [*answers(biased), *answers(plain)]


def test_what_it_refuses(opened: Open) -> None:
    with pytest.raises(InvalidRequest, match="it stores K and V in bfloat16 or int8 or k8v4, not in float32"):
        opened("float32")
