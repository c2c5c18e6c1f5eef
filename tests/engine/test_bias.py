"""A bias of entries, by layer and head: what transformers computes with it, and what no schedule or file changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.any_schedule import PROMPT, AnySchedule
from tests.engine.test_entries_by_head import NEXT, PARAMS, check_schedules, chosen
from tests.engine.test_kv_bits import CODED, KINDS, needs_native
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import KVError
from twostroke.kv.attention import attention_weights
from twostroke.kv.cache import KVCache

ANY = {dtype: AnySchedule(KINDS["plain"], dtype) for dtype in ("bfloat16", *CODED)}


def random_bias(llm: LLM, length: int, seed: int = 0, hidden: float = 0.3) -> np.ndarray:
    """Numbers from -2 to 2, and a share of entries that heads do not see."""
    random, geometry = np.random.default_rng(seed), llm.pool.geometry
    bias = random.uniform(-2, 2, (len(geometry.kv_layers), geometry.kv_heads or 0, length)).astype(np.float32)
    return np.where(random.random(bias.shape) < hidden, np.float32(-np.inf), bias)


def logits_behind(llm: LLM, kv: KVCache, tokens: list[int] = NEXT) -> np.ndarray:
    tail = llm.prefill(tokens, after=kv).tail
    assert tail is not None
    assert tail.logits is not None
    return tail.logits


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_what_transformers_computes(
    tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path], family: str
) -> None:
    """Its mask is a sum to scores, for each head, and the same in all layers."""
    llm = tiny_llm(family)
    kv = llm.prefill(PROMPT)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(family), attn_implementation="eager")
    cache: Any = transformers.DynamicCache()
    model(torch.tensor([PROMPT]), past_key_values=cache)
    bias = random_bias(llm, len(PROMPT))
    bias[:] = bias[:1]
    total, heads = len(PROMPT) + len(NEXT), llm.config.num_heads
    mask = torch.zeros((1, heads, len(NEXT), total))
    mask[0, :, :, : len(PROMPT)] = torch.from_numpy(bias[0]).repeat_interleave(heads // len(bias[0]), 0)[:, None]
    mask[..., len(PROMPT) :] = torch.full((len(NEXT), len(NEXT)), -torch.inf).triu(1)
    positions = torch.arange(len(PROMPT), total)[None]
    made = model(torch.tensor([NEXT]), past_key_values=cache, attention_mask=mask, position_ids=positions)
    expected = made.logits[0, -1].numpy()
    assert distance(logits_behind(llm, kv.with_bias(bias)), expected) < 1e-5
    assert distance(logits_behind(llm, kv), expected) > 1e-3


@needs_native
@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("tokens", [NEXT, NEXT[:1], NEXT * 20])
def test_the_kernels_compute_what_the_reference_does(dtype: str, tokens: list[int]) -> None:
    options: dict[str, Any] = {"kv_dtype": dtype, "weights": "bf16", "kv_bytes": 8 << 20}
    path = ANY[dtype].directory()
    with LLM(path, backend="native", **options) as llm, LLM(path, backend="reference", **options) as reference:
        kv = llm.prefill(PROMPT)
        biased = kv.with_bias(random_bias(llm, len(kv)))
        expected = logits_behind(reference, biased.copy_to(reference.pool), tokens)
        assert distance(logits_behind(llm, biased, tokens), expected) < 0.06  # without a bias up to 0.03
        assert distance(logits_behind(llm, kv, tokens), expected) > 0.5


@needs_native
@pytest.mark.parametrize("dtype", ANY)
@pytest.mark.parametrize("tokens", [NEXT[:1], NEXT * 8])
def test_a_split_of_which_a_head_sees_nothing_adds_nothing(dtype: str, tokens: list[int]) -> None:
    """Kernels leave it out. They read one with scores that are merely too low, and then its weights are 0."""
    prompt = PROMPT * 5
    found: list[np.ndarray] = []
    for threads, low in ((1, -np.inf), (1, -1e29), (2, -np.inf)):
        llm = ANY[dtype].model(threads=threads)
        kv = llm.prefill(prompt)
        bias = random_bias(llm, len(prompt), hidden=0)
        for head in range(bias.shape[1]):
            bias[head % 2, head, : 256 * (head + 1)] = low
            bias[1, head, 128:512] = low
        found.append(logits_behind(llm, kv.with_bias(bias), tokens))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_hidden_entries_are_as_if_cut_and_log_two_counts_twice(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("llama")
    kv = llm.prefill(PROMPT)
    none = np.zeros(random_bias(llm, len(kv)).shape, np.float32)
    hidden, twice = none.copy(), none.copy()
    hidden[:, :, 5:17] = -np.inf
    assert distance(logits_behind(llm, kv.with_bias(hidden)), logits_behind(llm, kv[:5] + kv[17:])) < 1e-5
    twice[:, :, 40] = np.log(2)
    keys, values = kv.entries().transpose(1, 0, 3, 2, 4)
    again = np.sort([*range(len(kv)), 40])
    positions = np.arange(len(again))
    doubled = KVCache.of_entries(llm, keys[:, :, again], values[:, :, again], positions).resumed_at(len(kv))
    found = logits_behind(llm, kv.with_bias(twice))
    assert distance(found, logits_behind(llm, doubled)) < 1e-5
    assert distance(found, logits_behind(llm, kv)) > 1e-4
    assert np.array_equal(logits_behind(llm, kv.with_bias(none)), logits_behind(llm, kv))


def biasing(llm: LLM, length: int, seed: int) -> Callable[[], Program]:
    """A program that cuts, joins, gathers and moves entries with a bias, and goes on behind them."""
    bias = random_bias(llm, length - 4, seed)
    indices = chosen(llm, length, length - 9, seed)

    def program() -> Program:
        kv: KVCache = yield Prefill(PROMPT[:length])
        kv = (kv[:-4].with_bias(bias) + kv[-4:]).gather(indices)[3:]
        kv += kv[20:30].at(kv.next_position + 5)
        kv = yield Prefill(NEXT, after=kv)
        yield Decode(kv)  # the request's result would hold pages

    return program


@needs_native
@pytest.mark.parametrize("dtype", ANY)
def test_the_same_bits_under_every_schedule(dtype: str) -> None:
    """Alone, batched beside requests without a bias, in chunks, with a prefix index, preempted where pages are few."""

    def plain() -> Program:
        yield Decode((yield Prefill(PROMPT[:50])))

    programs = [biasing(ANY[dtype].model(), *one) for one in ((120, 1), (77, 2), (60, 3), (120, 1))]
    programs.insert(2, plain)
    check_schedules(ANY[dtype], programs, few=30)


@needs_native
def test_a_bias_is_kept(tmp_path: Path) -> None:
    llm = ANY["bfloat16"].model()
    kv = llm.prefill(PROMPT)
    bias = random_bias(llm, len(kv) - 1)
    kept = kv[:-1].with_bias(bias) + kv[-1:]
    expected = list(llm.decode(kept, params=PARAMS))
    whole = np.concatenate([bias, np.zeros((*bias.shape[:2], 1), np.float32)], 2)
    kept.save(tmp_path / "kv")
    for value in (KVCache.load(tmp_path / "kv", llm), kept.to("host"), kept[:40] + kept[40:], kept.copy_to(llm.pool)):
        assert value.bias is not None
        assert np.array_equal(value.bias, whole)
        assert list(llm.decode(value, params=PARAMS)) == expected
    longer = llm.prefill(NEXT, after=kept)
    assert longer.bias is not None
    assert np.array_equal(longer.bias[:, :, : len(kept)], whole)
    assert not longer.bias[:, :, len(kept) :].any()
    assert longer.canonical_length(llm.model.id) == 0
    assert kv.bias is None
    indices = chosen(llm, len(kept), 50)
    gathered = kept.gather(indices).bias
    assert gathered is not None
    assert np.array_equal(gathered, np.take_along_axis(whole, indices, 2))


def test_explanations_know_a_bias(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("llama")
    kv = llm.prefill(PROMPT)
    bias = random_bias(llm, len(kv))

    def program() -> Program:
        return (yield Prefill(NEXT, after=kv.with_bias(bias), queries=2))

    request = Request(program, PARAMS, llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    made = request.result
    heads = llm.config.num_heads // (llm.pool.geometry.kv_heads or 1)
    for layer, weights in enumerate(attention_weights(made.kv, made.queries)):
        unseen = np.repeat(np.isneginf(bias[layer]), heads, 0)
        assert (weights[:, :, : len(kv)][unseen[:, None].repeat(2, 1)] == 0).all()
        assert np.allclose(weights.sum(-1), 1, atol=1e-5)


def test_what_is_no_bias_is_one_line(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm("llama")
    kv = llm.prefill(PROMPT)
    bias = random_bias(llm, len(kv))
    for wrong, words in (
        (bias[:, :, 1:], "a bias is floats of shape"),
        (np.zeros(bias.shape, int), "a bias is floats of shape"),
        (np.full(bias.shape, np.nan), r"a finite number \(float32\), or -inf"),
        (np.full(bias.shape, np.inf), r"a finite number \(float32\), or -inf"),
        (np.full(bias.shape, 1e300), r"a finite number \(float32\), or -inf"),
    ):
        with pytest.raises(KVError, match=words):
            kv.with_bias(wrong)
    windowed = tiny_llm("gemma3").prefill(PROMPT)
    with pytest.raises(KVError, match="window"):
        windowed.with_bias(bias)


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", *CODED])
def test_ranks_add_the_same_bias(dtype: str) -> None:
    """Beside a sequence without one, in a step of several sequences."""

    def tokens(llm: LLM) -> list[list[int]]:
        plain = llm.prefill(PROMPT[:20])
        biased = plain.with_bias(random_bias(llm, 20, hidden=0.1))
        requests = [
            Request(lambda kv=kv: decoded(kv), PARAMS, llm.tokenizer) for kv in (plain, biased, llm.prefill(PROMPT))
        ]
        llm.engine.run(requests)
        return [request.result.tokens for request in requests]

    def decoded(kv: KVCache) -> Program:
        return (yield Decode(kv))

    path = ANY[dtype].directory()
    seen = []
    for tp in (1, 2, 3):
        with LLM(path, backend="native", threads=1, kv_bytes=8 << 20, tp=tp, kv_dtype=dtype) as llm:
            seen.append(tokens(llm))
    assert seen[0] == seen[1] == seen[2]


def test_ranks_of_the_reference_refuse_a_bias_in_one_line() -> None:
    with LLM(ANY["bfloat16"].directory(), backend="reference", threads=1, kv_bytes=8 << 20, tp=2) as llm:
        kv = llm.prefill(PROMPT[:20])
        with pytest.raises(KVError, match="adds no bias to scores: use the native backend"):
            llm.prefill(NEXT, after=kv.with_bias(random_bias(llm, 20)))
        assert len(list(llm.decode(kv, params=PARAMS))) == 20
