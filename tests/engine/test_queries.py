"""Queries that strokes return, and attention weights from them: equal to transformers', always the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.methods.watching import PROMPT, needs_native, queried
from tests.models.test_against_transformers import tokens
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.interface import ForwardOutput, RaggedBatch
from twostroke.backends.native import library
from twostroke.backends.page_memory import PageMemory
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.kv.attention import Queries, attention_mass, attention_weights
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
LONG = PROMPT * 4


@pytest.fixture(scope="module")
def native_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the native backend with normalized keys and sliding windows."""
    return write_model("gemma3", tmp_path_factory.mktemp("native"), head_dim=64)


@pytest.fixture
def native_llm(native_directory: Path) -> Iterator[TinyLLM]:
    opened: list[LLM] = []

    def open_native(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"backend": "native", "weights": "int8", "threads": 1, "kv_bytes": 16 << 20}
        chosen |= {"prefix_index": "off"} | options
        opened.append(LLM(str(native_directory), **chosen))
        return opened[-1]

    yield open_native
    for llm in opened:
        assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)


def submitted(llm: LLM, program: Callable[[], Program], **fields: Any) -> Request:
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True} | fields
    params = SamplingParams(**asked)
    return llm.engine.submit(Request(program, params, llm.tokenizer))


def run(llm: LLM, program: Callable[[], Program], **fields: Any) -> Request:
    request = submitted(llm, program, **fields)
    llm.engine.finish([request])
    return request


@pytest.mark.reference
@pytest.mark.thinned
@pytest.mark.parametrize(("length", "count"), [(90, 7), (20, 64), (1, 1), (200, 33)])
@pytest.mark.parametrize("max_step_tokens", [512, 13])
def test_weights_are_those_of_transformers(
    family: str, length: int, count: int, max_step_tokens: int, tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]
) -> None:
    """With grouped heads, sliding windows, normalized queries and scales, for each layer and head."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_directory(family), dtype=torch.float32, attn_implementation="eager"
    )
    llm = tiny_llm(family, max_step_tokens=max_step_tokens)
    ids = tokens(length, llm.config.vocab_size, seed=length)
    with torch.no_grad():
        expected = [layer[0, :, -count:] for layer in reference(torch.tensor([ids]), output_attentions=True).attentions]
    expected = [layer / layer.sum(-1, keepdim=True) for layer in expected]  # without what goes to sink logits
    made = queried(llm, ids, count)
    assert len(made.queries) == min(length, count)
    assert made.logits.shape == (0, llm.config.vocab_size)
    for mine, theirs in zip(attention_weights(made.kv, made.queries), expected, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4, rtol=0)
    mass = attention_mass(made.kv, made.queries)
    np.testing.assert_allclose(mass, torch.stack(expected).mean((0, 1)).sum(0).numpy(), atol=1e-3, rtol=0)
    assert mass.sum() == pytest.approx(min(length, count))


def test_of_a_value_with_gaps(tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]) -> None:
    """Weights are over the entries of the value, with windows by position: a mask in one softmax."""
    llm = tiny_llm("mistral")
    whole = queried(llm, LONG, 5)
    (*_, all_of_it) = attention_weights(whole.kv, whole.queries)
    (*_, some_of_it) = attention_weights(whole.kv[:3] + whole.kv[60:], whole.queries)
    kept = all_of_it[..., [0, 1, 2, *range(60, len(LONG))]]
    assert (kept[..., :3] == 0).all()  # out of the window of 24
    expected = kept / kept.sum(-1, keepdims=True)
    np.testing.assert_allclose(some_of_it, expected, atol=1e-5, rtol=0, equal_nan=False)


def test_nothing_asked_nothing_given(tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, asked = tiny_llm(), []
    forward = llm.model.compiled.forward

    def watched(batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        asked.append(batch.query_rows)
        return forward(batch, memory)

    monkeypatch.setattr(llm.model.compiled, "forward", watched)

    def program() -> Program:
        return (yield Decode((yield Prefill(PROMPT))))

    result = run(llm, program).result
    assert asked == [None] * len(asked)
    assert len(result.queries) == 0
    made = queried(llm, PROMPT, 0)
    assert len(made.queries) == 0
    assert attention_mass(made.kv, made.queries).tolist() == [0.0] * len(PROMPT)


def observed(llm: LLM, ids: list[int], window: int = 9, every: int = 4) -> Callable[[], Program]:
    """The queries that a prefill and the following runs of a few tokens return."""

    def program() -> Program:
        made: Prefilled = yield Prefill(ids, queries=window)
        kv, found = made.kv, [made.queries]
        del made
        while True:
            decoded: Decoded = yield Decode(kv, max_tokens=every, queries=every)
            found.append(decoded.queries)
            kv = decoded.kv
            if decoded.finish_reason is not None:
                return found
            del decoded

    return program


def same(one: list[Queries], other: list[Queries]) -> bool:
    return len(one) == len(other) and all(
        a.rows.shape == b.rows.shape and bool((a.rows == b.rows).all()) for a, b in zip(one, other, strict=True)
    )


@needs_native
def test_the_same_bits_under_every_schedule(native_llm: TinyLLM) -> None:
    """Batched, chunked, prefix-hit, sampled, and replayed after a preemption."""
    prompts, fields = [LONG, PROMPT, [7], LONG[:33]], {"temperature": 0.9, "seed": 1}
    plain = native_llm()
    expected = [run(plain, observed(plain, ids), **fields).result for ids in prompts]
    assert [len(one) for one in expected[0]] == [9, 3, 4, 4, 4, 4]
    assert [len(one) for one in expected[2]] == [1, 3, 4, 4, 4, 4]
    pool, longest = plain.pool, len(LONG) + 25
    few = pool.geometry.num_pages(longest, pool.page_size, longest) * pool.page_bytes
    for options in (
        {},
        {"threads": 3},
        {"max_step_tokens": 5},
        {"prefix_index": "radix"},
        {"prefix_index": "hash", "max_step_tokens": 7},
        {"kv_bytes": few},
    ):
        llm = native_llm(**options)
        requests: list[Request] = []
        for _ in range(2):
            requests = [submitted(llm, observed(llm, ids), **fields) for ids in prompts]
            llm.engine.finish(requests)
            for request, wanted in zip(requests, expected, strict=True):
                assert same(request.result, wanted), options
        assert (llm.engine.preemptions > 0) == ("kv_bytes" in options)
        if llm.model.index is not None:
            assert requests[0].cached_tokens == (len(LONG) - 9) // 16 * 16, "the window is left to be computed"


@needs_native
def test_decoding_hands_out_what_a_prefill_does(native_llm: TinyLLM) -> None:
    llm = native_llm()

    def program() -> Program:
        return (yield Decode((yield Prefill(PROMPT)), queries=6))

    result: Decoded = run(llm, program, max_tokens=31).result
    again = queried(llm, result.kv.tokens, 6)
    assert same([result.queries], [again.queries])
    assert (attention_mass(result.kv, result.queries) == attention_mass(again.kv, again.queries)).all()


@needs_native
@pytest.mark.parametrize("count", [1, 3, 50])
def test_wrong_guesses_hand_out_nothing(count: int, native_llm: TinyLLM) -> None:
    llm = native_llm()
    right = [token.id for token in llm.decode(llm.prefill(PROMPT), max_tokens=8, ignore_eos=True)]

    def program() -> Program:
        guesses = [*right[:4], right[4] ^ 1, 5, 5]
        return (yield Decode((yield Prefill(PROMPT)), guesses=guesses, max_tokens=8, queries=count))

    result: Decoded = run(llm, program).result
    assert result.tokens == right[:5]
    assert same([result.queries], [queried(llm, [*PROMPT, *right[:4]], min(count, 4)).queries])


@needs_native
def test_the_two_backends_agree(native_directory: Path) -> None:
    """Up to the rounding of int8 activations."""
    mine, theirs = (
        queried(LLM(str(native_directory), backend=backend, weights="int8", kv_bytes=16 << 20), LONG, 8)
        for backend in ("native", "reference")
    )
    assert mine.queries.windows == theirs.queries.windows
    difference = np.linalg.norm(mine.queries.rows - theirs.queries.rows) / np.linalg.norm(theirs.queries.rows)
    assert 0 < difference < 0.05


@pytest.mark.skipif("avx512" not in library.variants(), reason="no AVX-512 here to compare with")
def test_variants_agree(native_llm: TinyLLM) -> None:
    """Except for attention in bfloat16, after the first layer."""
    found: list[Queries] = []
    for variant in ("avx2", "avx512"):
        found.append(queried(native_llm(backend=f"native-{variant}"), LONG, 20).queries)
    assert np.array_equal(found[0].rows[0], found[1].rows[0])
    assert np.linalg.norm(found[0].rows - found[1].rows) < 0.02 * np.linalg.norm(found[0].rows)


def test_choices_share_what_a_prefill_hands_out(tiny_llm: TinyLLM) -> None:
    """A prefill without queries is not reused for a request with queries."""
    llm, handed_out = tiny_llm(), []

    def program() -> Program:
        kv = yield Prefill(PROMPT)
        made = yield Prefill(PROMPT, queries=3)
        handed_out.append(made.queries)
        yield Decode(kv)

    run(llm, program, n=3, temperature=1.0, seed=1)
    assert len(handed_out) == 3
    assert len(handed_out[0]) == 3
    assert handed_out[1] is handed_out[0]


def test_a_long_decode_holds_no_more_than_was_asked_for(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()

    def program() -> Program:
        yield Decode((yield Prefill(PROMPT)), queries=5)

    request = submitted(llm, program, max_tokens=60)
    held = 0
    while not request.done:
        llm.engine.step()
        for choice in request.choices:
            held = max([held, *(len(lane.queries.all()) for lane in choice.lanes)])
    assert held == 5
    assert len(request.events) == 60
