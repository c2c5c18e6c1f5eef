"""A model's own head of multi-token prediction guesses as it is defined, and changes no token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.guesser import PlainGuesser, add_guesser, write_with_layer
from tests.methods.watching import PROMPT, needs_native, runs_of
from tests.models.checkpoints.test_families_in_gguf import CONVERTED, convert
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.methods import Plain, Speculative
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.sampling.params import SamplingParams

Tiny = Callable[..., LLM]
CHOSEN = Speculative("mtp", guesses=4, adaptive=False)


LAYERS = ("deepseek_v3", "glm4_moe_lite")  # whose head is a layer behind the last


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5moe", "qwen3_next", *LAYERS])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp(request.param)
    return (
        write_with_layer(request.param, room)
        if request.param in LAYERS
        else add_guesser(write_model(request.param, room))
    )


def opened(directory: Path, backend: str = "native", **options: Any) -> LLM:
    """A model with its head; in int8 on the native backend."""
    weights = "int8" if backend == "native" else "stored"
    chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1, "draft": "mtp", "weights": weights} | options
    return LLM(str(directory), backend=backend, **chosen)


def no_page_is_lost(llm: LLM) -> None:
    for model in llm.engine.models.values():
        assert model.pool.num_used == llm.engine.cached_pages(model.pool)


@pytest.mark.parametrize("context", [1, 6, 256])
def test_guesses_are_those_of_the_definition(directory: Path, context: int) -> None:
    llm = opened(directory, "reference")
    chosen = Speculative("mtp", guesses=4, adaptive=False, context=context)
    made, runs, facts = runs_of(llm, chosen, PROMPT, max_tokens=12)
    plain, text, first = PlainGuesser(directory), [*PROMPT, *runs[0].tokens], max(0, len(PROMPT) - context)
    assert len(runs) > 5
    tokens = [run.tokens for run in runs]
    for draft, run in zip(tokens[1::2], tokens[2::2], strict=True):
        assert draft == plain.guesses(text, first, len(draft))
        text += run
    assert text == [*PROMPT, *made]
    assert facts.guessed == sum(map(len, tokens[1::2]))
    del runs
    no_page_is_lost(llm)


def heads_logits(llm: LLM, states: np.ndarray) -> np.ndarray:
    """Logits of the head over given hidden states."""

    def program() -> Program:
        return (yield Prefill(PROMPT, model="mtp", inputs=states, logits="all"))

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request.result.logits


@needs_native
def test_the_native_head_is_near_the_reference(directory: Path) -> None:
    native = opened(directory)
    size = (len(PROMPT), native.config.hidden_size)
    states = np.random.default_rng(3).normal(size=size).astype(np.float32)
    found = heads_logits(native, states)
    expected = heads_logits(opened(directory, "reference", weights="int8"), states)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert (heads_logits(opened(directory, max_step_tokens=5), states) == found).all()
    no_page_is_lost(native)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_the_same_head_in_a_gguf_file(family: str, tmp_path: Path) -> None:
    behind = family in LAYERS
    directory = write_with_layer(family, tmp_path / "a") if behind else add_guesser(write_model(family, tmp_path / "a"))
    theirs, path = open_huggingface(directory), convert(directory, tmp_path / "a.gguf", CONVERTED[family])
    mine = replace(open_gguf(path), tokenizer_source=theirs.tokenizer_source)
    states = np.random.default_rng(3).normal(size=(len(PROMPT), 64)).astype(np.float32)
    opened_as: dict[str, Any] = {"backend": "reference", "draft": "mtp", "kv_bytes": 16 << 20}
    made = mine.guesser
    assert made is not None
    mine = replace(mine, guesser=lambda: replace(made(), tokenizer_source=theirs.tokenizer_source))
    found, expected = (heads_logits(LLM(one, **opened_as), states) for one in (mine, theirs))
    assert np.abs(found - expected).max() < 1e-4


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 6, "logprobs": 2},
    {"temperature": 1.0, "seed": 1, "top_k": 20, "n": 3, "repetition_penalty": 1.3},
    {"max_tokens": 1},
]


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: "-".join(sampling) or "greedy")
def test_bit_for_bit_the_plain_answer(directory: Path, sampling: dict[str, Any]) -> None:
    """Alone and batched, in chunks, with prefix hits and after preemptions; what was guessed is the same too."""
    fields: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True} | sampling
    prompts = [PROMPT, PROMPT[:7] * 3, [7], PROMPT * 4]

    def answers(llm: LLM, method: Any, asked: list[list[int]]) -> list[Any]:
        made = llm.generate(asked, method=method, **fields)
        no_page_is_lost(llm)
        return [([output.tokens for output in one.outputs], one.facts) for one in made]

    llm = opened(directory)
    plain = [answers(llm, Plain(), [prompt])[0] for prompt in prompts]
    alone = [answers(llm, CHOSEN, [prompt])[0] for prompt in prompts]
    assert [one[0] for one in alone] == [one[0] for one in plain]
    chunked = opened(directory, max_step_tokens=9)
    for _ in range(2):
        assert answers(chunked, CHOSEN, prompts) == alone


@needs_native
def test_preempted(directory: Path) -> None:
    prompts, llm = [PROMPT, PROMPT[:7] * 3, PROMPT * 2, PROMPT[3:]], opened(directory)
    geometry, size = llm.pool.geometry, llm.pool.page_size
    pages = geometry.answer_pages(len(PROMPT) * 2 + 60, size)

    def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
        made = llm.generate(prompts, method=CHOSEN, max_tokens=60, ignore_eos=True, temperature=0.7, seed=3)
        return [(one.outputs[0].tokens, one.facts) for one in made]

    alone = [answers(llm, [prompt])[0] for prompt in prompts]
    small = opened(directory, kv_bytes=pages * llm.pool.page_bytes, max_step_tokens=9, prefix_index="off")
    assert answers(small, prompts * 3) == alone * 3
    assert small.engine.preemptions
    no_page_is_lost(small)


def test_a_model_without_a_head_says_so(tiny_llm: Tiny) -> None:
    with pytest.raises(InvalidRequest, match="has no head of multi-token prediction that fits: leave out draft=mtp"):
        tiny_llm(draft="mtp")
    with pytest.raises(InvalidRequest, match=r"method speculative needs a mtp: open the model with one \(--draft mtp"):
        tiny_llm().generate([[5, 6]], method=CHOSEN)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_embeddings_of_its_own_are_told(tmp_path: Path, copy: str) -> None:
    """They are read once: a file whose copies differ from the model's is refused where a draft is asked for."""
    path = write_with_layer("deepseek_v3", tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.3.{copy}.weight"][0, 0] += 1
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"is no copy of .*, which a draft mtp needs") as caught:
        opened(tmp_path, "reference")
    assert "\n" not in str(caught.value)
    LLM(str(tmp_path), backend="reference", kv_bytes=16 << 20)


def test_states_must_be_those_of_the_tokens(directory: Path) -> None:
    llm = opened(directory, "reference")
    few, enough = (np.zeros((count, llm.config.hidden_size), np.float32) for count in (3, len(PROMPT)))
    for states, model in ((few, "mtp"), (None, "mtp"), (enough, None)):

        def program(states: np.ndarray | None = states, model: str | None = model) -> Program:
            yield Prefill(PROMPT, model=model, inputs=states)

        with pytest.raises(InvalidRequest, match="hidden states"):
            llm.engine.finish([llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer))])
