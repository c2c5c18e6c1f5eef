"""The schedule never changes the answer: random schedules, and the bits of every log-probability and KV entry."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thinning import examples
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.cache import KVCache
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

TEXT = "In the beginning the engine read the prompt, all of it, at once; and then it wrote, a token at a time. " * 3
# Without log-probabilities tokens are found by a search, with them all logits are computed.
SAMPLINGS = {
    logprobs: SamplingParams(max_tokens=8, temperature=0.8, seed=7, ignore_eos=True, logprobs=logprobs)
    for logprobs in (None, 2)
}
METHODS = {"plain": method("plain"), "repeat": method("repeat", sinks=3), "best-of": method("best-of", candidates=2)}
Asked = tuple[int, str, int | None]  # a prompt's length, a technique, log-probabilities
ASKED = st.tuples(
    st.sampled_from([1, 15, 16, 17, 40, 70]), st.sampled_from(sorted(METHODS)), st.sampled_from([*SAMPLINGS])
)


@functools.cache
def model(index: str, pages: int, threads: int) -> LLM:
    page_bytes = 30 * 2 * 3 * 64 * 2 * 16
    return LLM("smollm2-135m", backend="native", prefix_index=index, kv_bytes=pages * page_bytes, threads=threads)


@functools.cache
def alone(asked: Asked) -> Answer:
    """The answer to a prompt alone, unchunked and cold, and the bits of its KV."""
    llm = model("off", 256, 2)
    return answers(llm, requests(llm, [asked]), SchedulerConfig(max_step_tokens=4096))[0]


def requests(llm: LLM, asked: list[Asked]) -> list[Request]:
    return [llm.request(prompt(length), SAMPLINGS[logprobs], METHODS[name]) for length, name, logprobs in asked]


def prompt(length: int) -> list[int]:
    return model("off", 256, 2).tokenizer.encode(TEXT)[:length]


@settings(max_examples=examples(6), deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=5),
    chunk=st.sampled_from([1, 7, 16, 50, 512]),
    place=st.sampled_from([("off", 24, 3), ("radix", 24, 2), ("radix", 256, 1), ("radix", 24, 1), ("radix", 256, 5)]),
)
def test_any_schedule(asked: list[Asked], chunk: int, place: tuple[str, int, int]) -> None:
    """Answers and KV do not depend on the schedule, bit for bit: ids, texts, log-probabilities, keys and values.

    Schedules: any mix of prompts and techniques, any chunks, any number of threads, cold or prefix-hit (models are
    kept), preempted or not.
    """
    llm = model(*place)
    found = answers(llm, requests(llm, asked), SchedulerConfig(max_step_tokens=chunk))
    assert found == [alone(one) for one in asked]


@settings(max_examples=examples(5), deadline=None)
@given(cuts=st.lists(st.integers(0, 69), max_size=4), chunk=st.sampled_from([1, 9, 64]))
def test_entries(cuts: list[int], chunk: int) -> None:
    """K, V and the logits after them have the same bits for any pieces in which a text is entered."""
    llm, ids = model("off", 256, 2), prompt(70)
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
