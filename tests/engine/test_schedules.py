"""The schedule never changes the answer: random schedules, and the bits of every log-probability and KV entry."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.engine.sampling import SamplingParams
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.track import Token
from twostroke.kernels import library
from twostroke.kv.cache import KVCache
from twostroke.llm import LLM
from twostroke.methods import method

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

TEXT = "In the beginning the engine read the prompt, all of it, at once; and then it wrote, a token at a time. " * 3
SAMPLING = SamplingParams(max_tokens=8, temperature=0.8, seed=7, ignore_eos=True)
LENGTHS = st.sampled_from([1, 15, 16, 17, 40, 70])
METHODS = {"plain": method("plain"), "repeat": method("repeat", sinks=3), "best-of": method("best-of", candidates=2)}


@functools.cache
def model(index: str, pages: int) -> LLM:
    page_bytes = 30 * 2 * 3 * 64 * 2 * 16
    return LLM("smollm2-135m", backend="native", prefix_index=index, kv_bytes=pages * page_bytes)


@functools.cache
def alone(length: int, name: str) -> list[Token]:
    """The answer to a prompt by itself, unchunked and cold."""
    llm = model("off", 256)
    llm.engine.config = SchedulerConfig(max_step_tokens=4096)
    return llm.generate([prompt(length)], method=METHODS[name], params=SAMPLING)[0].tokens


def prompt(length: int) -> list[int]:
    return model("off", 256).tokenizer.encode(TEXT)[:length]


@settings(max_examples=8, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 15, 16, 17, 40, 70]), st.sampled_from(sorted(METHODS))), min_size=1, max_size=5
    ),
    chunk=st.sampled_from([1, 7, 16, 50, 512]),
    index=st.sampled_from(["off", "radix", "hash"]),
    pages=st.sampled_from([24, 256]),
)
def test_any_schedule(requests: list[tuple[int, str]], chunk: int, index: str, pages: int) -> None:
    """Any mix of prompts and techniques, in any chunks, cold or prefix-hit (models are kept), preempted or not."""
    llm = model(index, pages)
    llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
    submitted = [llm.engine.submit(llm.request(prompt(length), SAMPLING, METHODS[name])) for length, name in requests]
    llm.engine.finish(submitted)
    for request, (length, name) in zip(submitted, requests, strict=True):
        assert list(request.events) == alone(length, name)  # ids, texts and log-probabilities, to the last bit


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 69), max_size=4), chunk=st.sampled_from([1, 9, 64]))
def test_entries(cuts: list[int], chunk: int) -> None:
    """K, V and the logits behind them are the same bits whatever pieces a text was entered in."""
    llm, ids = model("off", 256), prompt(70)
    llm.engine.config = SchedulerConfig(max_step_tokens=4096)
    whole = llm.prefill(ids)
    llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
    pieces = KVCache.empty(llm.pool)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 70], strict=True):
        if start < stop:
            pieces = llm.prefill(ids[start:stop], after=pieces)
    assert (pieces.entries() == whole.entries()).all()
    assert pieces.tail is not None
    assert whole.tail is not None
    assert (pieces.tail.logits == whole.tail.logits).all()  # pyright: ignore[reportOptionalMemberAccess]
