"""What one token attends to: the weights of transformers, from a text, from a value, and from a part of one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.methods.watching import PROMPT
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.study.explain.attention import attention_of, attention_request

TinyLLM = Callable[..., LLM]


@pytest.mark.parametrize("position", [None, 0, 11])
def test_weights_are_those_of_transformers(
    family: str, position: int | None, tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_directory(family), dtype=torch.float32, attn_implementation="eager"
    )
    llm = tiny_llm(family)
    last = len(PROMPT) - 1 if position is None else position
    with torch.no_grad():
        made = reference(torch.tensor([PROMPT]), output_attentions=True).attentions
    expected = torch.stack([layer[0, :, last, : last + 1] for layer in made if layer is not None]).numpy()
    expected /= expected.sum(-1, keepdims=True)  # without what goes to sink logits
    for prompt in (PROMPT, llm.prefill(PROMPT)):
        found = attention_of(llm, prompt, position)
        assert found.tokens == PROMPT[: last + 1]
        assert found.positions == list(range(last + 1))
        np.testing.assert_allclose(found.weights, expected, atol=1e-4, rtol=0)
    assert found.layers == tuple(llm.config.attention_layers)
    layer = found.layers[-1]
    assert np.array_equal(found.mean(layer, 2), found.weights[-1, 2])
    np.testing.assert_allclose(found.mean(), expected.mean((0, 1)), atol=1e-4, rtol=0)
    np.testing.assert_allclose(found.mean(head=1), expected[:, 1].mean(0), atol=1e-4, rtol=0)
    most = found.most(3, layer=layer)
    assert [weight for _, weight in most] == sorted(found.mean(layer).tolist(), reverse=True)[:3]


def test_of_a_value_with_a_gap(tiny_llm: TinyLLM) -> None:
    """The last entry of a value without its middle, computed again where it was."""
    llm = tiny_llm()
    whole = llm.prefill(PROMPT)
    value = whole[:4] + whole[10:]
    found = attention_of(llm, value)
    assert found.positions == value.positions
    assert found.tokens == value.tokens
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)


def test_only_the_entry_itself_is_computed(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(page_size=1)
    llm.prefill(PROMPT)
    request = attention_request(llm, PROMPT, 9)
    llm.engine.run([request])
    assert (request.prefilled_tokens, request.cached_tokens) == (10, 9)


def test_errors(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    for position in (-1, len(PROMPT)):
        with pytest.raises(InvalidRequest, match="position must be from 0 to 18"):
            attention_request(llm, PROMPT, position)
    with pytest.raises(InvalidRequest, match="empty"):
        attention_request(llm, [])
    found = attention_of(llm, PROMPT)
    with pytest.raises(InvalidRequest, match="layer must be from 0 to 2"):
        found.mean(3)
    with pytest.raises(InvalidRequest, match="head must be from 0 to 3"):
        found.mean(0, 4)
    with pytest.raises(
        InvalidRequest, match="layer 1 is recurrent and attends to nothing: layers with attention are 2"
    ):
        attention_of(tiny_llm("qwen3_5"), PROMPT).mean(1)
