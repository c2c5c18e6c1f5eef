"""Hidden states that strokes return: equal to transformers', the same bits always; the head makes logits of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.test_queries import run
from tests.methods.watching import PROMPT, needs_native
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.models.families import BY_NAME
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]


def asked(llm: LLM, ids: list[int], count: int | None) -> Prefilled:
    def program() -> Program:
        return (yield Prefill(ids, states=count))

    return run(llm, program).result


@pytest.fixture(scope="module")
def native_llm(tmp_path_factory: pytest.TempPathFactory) -> TinyLLM:
    """With norms after attention and MLP, experts in some layers, or neither."""
    directories: dict[str, Path] = {}

    def open_native(family: str, **options: Any) -> LLM:
        if family not in directories:
            directories[family] = write_model(family, tmp_path_factory.mktemp(family), head_dim=64)
        chosen: dict[str, Any] = {"backend": "native", "weights": "int8", "threads": 2, "kv_bytes": 16 << 20}
        return LLM(str(directories[family]), **(chosen | options))

    return open_native


@pytest.mark.thinned
@pytest.mark.parametrize("count", [1, 7, 200])
def test_states_are_those_of_transformers(
    family: str, count: int, tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]
) -> None:
    """The embedding and every layer's output; of the last layer, transformers hands out what the last norm makes."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(family), dtype=torch.float32)
    llm = tiny_llm(family, max_step_tokens=13)
    with torch.no_grad():
        made = reference(torch.tensor([PROMPT]), output_hidden_states=True)
    states = asked(llm, PROMPT, count).states
    assert states is not None
    rows = min(count, len(PROMPT))
    assert states.shape == (llm.config.num_layers + 1, rows, llm.config.hidden_size)
    # Falcon-H1 and Nemotron-H divide their layers otherwise (docs/families.md): where one of theirs begins with ours.
    stored = BY_NAME[llm.config.architecture].stored_layer
    theirs = [stored(llm.config, layer, "attn_norm") for layer in range(llm.config.num_layers)]
    begins = {layer: number for layer, number in enumerate(theirs) if number not in theirs[:layer]}
    near = 2e-3 if family == "falcon_h1" else 2e-4  # whose stream has numbers of a thousand and more
    for layer, number in begins.items():
        np.testing.assert_allclose(states[layer], made.hidden_states[number][0, -rows:].numpy(), atol=near, rtol=1e-4)
    logits = llm.model.compiled.rows_of(states[-1]).read()
    np.testing.assert_allclose(logits, made.logits[0, -rows:].numpy(), atol=2e-3, rtol=1e-3)


def test_nothing_asked_nothing_given(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()

    def program() -> Program:
        return (yield Decode((yield Prefill(PROMPT)), max_tokens=2))

    assert run(llm, program).result.states is None
    assert asked(llm, PROMPT, 0).states is None


@needs_native
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3moe"])
def test_native_states_have_the_same_bits_under_every_schedule(family: str, native_llm: TinyLLM) -> None:
    """The states of a row are the same in whatever step, and the pass that is watched computes what it would have."""
    plain = native_llm(family, prefix_index="off")
    kv = plain.prefill(PROMPT)
    assert kv.tail is not None
    found: list[np.ndarray] = []
    for chunk in (512, 13, 1):
        llm = native_llm(family, prefix_index="off", max_step_tokens=chunk)
        made = asked(llm, PROMPT, 9)
        assert made.states is not None
        found.append(made.states)
        last = llm.model.compiled.rows_of(made.states[-1, -1:])
        logits = kv.tail.logits
        assert logits is not None
        assert np.array_equal(last.read()[0], logits)
        assert np.array_equal(made.kv.entries().view(np.uint16), kv.entries().view(np.uint16))
    for other in found[1:]:
        assert np.array_equal(found[0].view(np.uint32), other.view(np.uint32))
    reference = LLM(str(plain.path.parent), weights="int8", backend="reference", kv_bytes=16 << 20)
    theirs = asked(reference, PROMPT, 9).states
    assert theirs is not None
    # The two round differently (int8 activations, bfloat16 K and V): each layer's difference is a part of the whole.
    for mine, exact in zip(found[0], theirs, strict=True):
        assert np.linalg.norm(mine - exact) < 0.05 * np.linalg.norm(exact)
    assert np.array_equal(found[0][0], theirs[0])  # the embedding is looked up, and not computed


@pytest.mark.parametrize("chunk", [512, 5])
def test_of_a_decode_without_wrong_guesses(chunk: int, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(max_step_tokens=chunk)

    def plain() -> Program:
        return (yield Decode((yield Prefill(PROMPT)), states=5, max_tokens=6))

    right: Decoded = run(llm, plain).result
    guesses = [*right.tokens[:4], (right.tokens[4] + 1) % llm.config.vocab_size, 3]

    def guessing() -> Program:
        return (yield Decode((yield Prefill(PROMPT)), guesses=guesses, states=5, max_tokens=6))

    wrong: Decoded = run(llm, guessing).result
    assert right.states is not None
    assert wrong.states is not None
    assert wrong.tokens == right.tokens[:5]
    assert right.states.shape[1] == 5
    expected = asked(llm, [*PROMPT, *right.tokens[:5]], 5).states
    assert expected is not None
    np.testing.assert_allclose(right.states, expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(wrong.states[:, -4:], expected[:, :4], atol=1e-4, rtol=1e-4)


def test_fresh_computes_what_the_index_has(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    llm.prefill(PROMPT)

    def program(fresh: bool) -> Request:
        def strokes() -> Program:
            yield Prefill(PROMPT, fresh=fresh)

        request = Request(strokes, SamplingParams(max_tokens=1), llm.tokenizer)
        llm.engine.run([request])
        return request

    assert program(False).cached_tokens > 0
    assert program(True).cached_tokens == 0
