"""Values whose heads hold other entries: transformers computes the same from them, and no schedule changes a bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers

from tests.engine.any_schedule import PROMPT, AnySchedule
from tests.engine.test_kv_bits import CODED, KINDS
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

needs_native = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
ANY = {dtype: AnySchedule(KINDS["plain"], dtype) for dtype in ("bfloat16", *CODED)}
PARAMS = SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)
NEXT = PROMPT[7:12]


def chosen(llm: LLM, length: int, count: int, seed: int = 0) -> np.ndarray:
    """Rising indices, others for each layer and head."""
    random, geometry = np.random.default_rng(seed), llm.pool.geometry
    heads = geometry.kv_heads or 0
    rows = [np.sort(random.permutation(length)[:count]) for _ in range(len(geometry.kv_layers) * heads)]
    return np.reshape(rows, (-1, heads, count))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
@torch.inference_mode()
def test_what_transformers_computes(
    tiny_llm: Callable[..., LLM], tiny_directory: Callable[[str], Path], family: str
) -> None:
    """Its cache has an array for each head, and attends to all of it."""
    llm, cache = tiny_llm(family), cast(Any, transformers.DynamicCache())
    kv, model = llm.prefill(PROMPT), transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(family))
    indices = chosen(llm, len(PROMPT), 60)
    model(torch.tensor([PROMPT]), past_key_values=cache)
    for layer, own in enumerate(cache.layers):
        at = torch.from_numpy(indices[layer])[None, :, :, None]
        own.keys = own.keys.take_along_dim(at, 2)
        own.values = own.values.take_along_dim(at, 2)
    gathered, expected = kv.gather(indices), np.zeros(0)
    for i, token in enumerate(NEXT):
        made = model(
            torch.tensor([[token]]),
            past_key_values=cache,
            position_ids=torch.tensor([[gathered.next_position + i]]),
        )
        expected = made.logits[0, -1].numpy()
    longer = llm.prefill(NEXT, after=gathered)
    assert longer.tail is not None
    assert longer.tail.logits is not None
    assert np.abs(longer.tail.logits - expected).max() <= 1e-4 * np.abs(expected).max()
    plain = llm.prefill(NEXT, after=kv[-60:]).tail
    assert plain is not None
    assert plain.logits is not None
    assert np.abs(plain.logits - expected).max() > 0.01 * np.abs(expected).max()  # other entries count


@needs_native
def test_the_same_entries_for_all_heads_are_a_cut() -> None:
    """Where pages agree, so do all bits."""
    llm = ANY["bfloat16"].model()
    kv = llm.prefill(PROMPT[:80])
    cut, rows = kv[:16] + kv[48:], np.concatenate([np.arange(16), np.arange(48, 80)])
    gathered = kv.gather(np.broadcast_to(rows, (len(llm.pool.geometry.kv_layers), 2, len(rows))))
    assert gathered.entries().tobytes() == cut.entries().tobytes()
    assert list(llm.decode(gathered, params=PARAMS)) == list(llm.decode(cut, params=PARAMS))


def gathering(llm: LLM, length: int, count: int) -> Callable[[], Program]:
    """A program that keeps some entries of each head, those of the last tokens, and a passage from elsewhere."""
    indices = chosen(llm, length - 4, count, seed=count)

    def program() -> Program:
        kv: KVCache = yield Prefill(PROMPT[:length])
        kept = kv[:-4].gather(indices) + kv[-4:]
        passage: KVCache = yield Prefill(PROMPT[150:180])
        kept += passage[10:].at(kept.next_position + 3)
        kv = yield Prefill(NEXT, after=kept[5:])
        yield Decode(kv)  # the request's result would hold pages

    return program


def ask(llm: LLM, programs: list[Callable[[], Program]], chunk: int, steps: int = 0) -> list[Answer]:
    requests = [Request(program, PARAMS, llm.tokenizer) for program in programs]
    return answers(llm, requests, SchedulerConfig(max_step_tokens=chunk), steps)


def check_schedules(any_schedule: AnySchedule, programs: list[Callable[[], Program]], few: int) -> None:
    """Programs, of which the first and the last are alike, have the bits of each alone; in `few` pages some wait."""
    alone = [ask(any_schedule.model(), [program], 4096)[0] for program in programs]
    assert alone[0] == alone[-1] != alone[1]
    preempted = 0
    for chunk, index, pages, threads in (
        (4096, "off", 1000, 1), (1, "radix", 1000, 2), (7, "radix", few, 2), (16, "radix", few, 1)
    ):  # fmt: skip
        llm = any_schedule.model(index, pages, threads)
        before = llm.engine.preemptions
        assert ask(llm, programs, chunk, steps=2) == alone
        preempted += llm.engine.preemptions - before
        assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
    assert preempted


@needs_native
@pytest.mark.parametrize("dtype", ANY)
def test_the_same_bits_under_every_schedule(dtype: str) -> None:
    """Alone, batched, in chunks, with a prefix index, preempted where pages are few."""
    programs = [gathering(ANY[dtype].model(), *one) for one in ((120, 50), (77, 31), (60, 16), (120, 50))]
    check_schedules(ANY[dtype], programs, few=24)


@needs_native
@pytest.mark.parametrize("dtype", ANY)
def test_a_gathered_value_decodes_alike_wherever_it_was(dtype: str, tmp_path: Path) -> None:
    llm = ANY[dtype].model()
    kv = llm.prefill(PROMPT)
    indices = chosen(llm, len(kv) - 1, 70)
    kept = kv[:-1].gather(indices) + kv[-1:]
    expected = list(llm.decode(kept, params=PARAMS))
    kept.save(tmp_path / "kv")
    fork = kv.to("host")[:-1].gather(indices) + kv[-1:]
    for value in (KVCache.load(tmp_path / "kv", llm), kept.to("host"), kept[:40] + kept[40:], fork):
        assert list(llm.decode(value, params=PARAMS)) == expected
    with pytest.raises(KVError, match="the last entry cannot be computed again"):
        list(llm.decode(kv.gather(chosen(llm, len(kv) - 1, 70)), params=PARAMS))


@needs_native
def test_entries_that_were_written_decode_as_those_that_were_gathered() -> None:
    llm = ANY["bfloat16"].model()
    kv = llm.prefill(PROMPT)
    indices = chosen(llm, len(kv) - 1, 70)
    made = kv[:-1].gather(indices)
    keys, values = made.entries().transpose(1, 0, 3, 2, 4)
    written = KVCache.of_entries(llm, keys, values, indices, made.tokens)
    assert list(llm.decode(written + kv[-1:], params=PARAMS)) == list(llm.decode(made + kv[-1:], params=PARAMS))
