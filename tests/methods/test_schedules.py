"""Every technique under random schedules, natively: the same tokens, log-probabilities and KV, to the bit."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.methods.watching import PROMPT, needs_native
from tests.thinning import examples
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.methods import METHODS, Method, Passages, method
from twostroke.sampling.params import SamplingParams

# Without log-probabilities tokens are found by a search, with them all logits are computed.
SAMPLINGS = {
    logprobs: SamplingParams(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True, logprobs=logprobs)
    for logprobs in (None, 2)
}
TECHNIQUES: list[Method] = [
    *(method(name) for name in sorted(METHODS)),
    method("repeat", times=3, sinks=2, offset="wrong"),
    method("refresh", every=3, window=2),
    method("refresh", when="entropy", threshold=6.8, every=2),
    method("refresh", when="budget", budget=300, every=1),
    method("refresh", when="probe", every=3, threshold=0.9),
    method("speculative", guesses=4, adaptive=False),
    method("speculative", draft="student", guesses=4, adaptive=False),
    method("speculative", draft="draft", guesses=4, adaptive=False),
    method("drop", window=9, every=4),
    method("drop", times=2, keep="last", by="key-norm", window=9, every=4),
    method("drop", window=9, every=4, by="attention"),
    method("drop", times=2, keep="last", window=9, every=4, by="attention", observed=3),
    method("snap", window=4, budget=12),
    method("snap", times=2, keep="last", sinks=2, window=4, budget=12, kernel=3),
    method("snap", window=4, budget=12, per="head"),
    method("keydiff", times=2, keep="last", sinks=2, budget=9, offset="wrong"),
    method("lagkv", lag=3, ratio=0.7),
    method("chunkkv", budget=12, newest=3, chunk=4),
    method("critical-kv", budget=12, newest=3),
    method("critical-kv", by="heavy-hitters", budgets="ada", budget=12, newest=3),
    method("duo-attention", sinks=2, recent=5),
    method("triattention", budget=12, newest=3, every=5),
    method("compose", first="partrep", then="tova:budget=12"),
    method("kvzip", times=2, keep="last", budget=12, part=7),
    method("finch", budget=12, question=3, chunk=8),
    method("rkv", budget=12, every=5, window=3),
    method("expected-attention", times=2, keep="last", budget=9, newest=2),
    method("heavy-hitters", times=2, keep="last", sinks=2, budget=9, mean=True),
    method("d2o", times=2, keep="last", sinks=2, budget=9),
    method("keydiff", budgets="ada", budget=9),
    method("tova", budgets="pyramid", budget=9, sinks=2),
    method("compress", last=0, segment=8),
    method("compress", last=0, segment=8, scorer="draft"),
    method("passages", first=2, least=3),
    method("passages", first=0, least=3, checked=0.5, bound=0.001),
]
Asked = tuple[int, Method, int | None]  # a prompt's length, a technique, log-probabilities
Models = Callable[[str, int, int], LLM]


@pytest.fixture(scope="module")
def models(native_directory: Path) -> Models:
    @functools.cache
    def opened(index: str, pages: int, threads: int) -> LLM:
        options: dict[str, Any] = {"backend": "native", "weights": "int8", "student": "int2", "draft": "int4"}
        options["threads"] = threads
        page_bytes = 3 * 2 * 2 * 64 * 2 * 16
        return LLM(str(native_directory), prefix_index=index, kv_bytes=pages * page_bytes, **options)

    return opened


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[Asked], Answer]:
    """The answer to a prompt alone, unchunked and cold."""
    measure_heads(models("off", 256, 2))

    @functools.cache
    def answer(asked: Asked) -> Answer:
        llm = models("off", 256, 2)
        return answers(llm, requests(llm, [asked]), SchedulerConfig(max_step_tokens=4096))[0]

    return answer


def measure_heads(llm: LLM) -> None:
    """What DuoAttention measures in a model's first request, by strokes of its own, which other requests lack."""
    request = llm.request(PROMPT, SamplingParams(max_tokens=1), method("duo-attention", sinks=2, recent=5))
    answers(llm, [request], SchedulerConfig())


def requests(llm: LLM, asked: list[Asked]) -> list[Request]:
    return [llm.request(prompt(llm, length, one), SAMPLINGS[logprobs], one) for length, one, logprobs in asked]


def prompt(llm: LLM, length: int, chosen: Method) -> list[int]:
    if isinstance(chosen, Passages):
        lines = [f"{'the quick brown fox ' * (i % 3)}and the dog {i}" for i in range(length)]
        return llm.tokenizer.encode("\n".join(lines))[:length]
    return (PROMPT * 4)[:length]


@needs_native
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(
        st.tuples(st.sampled_from([1, 15, 16, 17, 40, 70]), st.sampled_from(TECHNIQUES), st.sampled_from([*SAMPLINGS])),
        min_size=1,
        max_size=5,
    ),
    chunk=st.sampled_from([1, 7, 16, 50, 512]),
    place=st.sampled_from([("off", 24, 3), ("radix", 24, 2), ("radix", 256, 1), ("radix", 24, 1), ("radix", 256, 5)]),
)
def test_any_schedule(
    asked: list[Asked], chunk: int, place: tuple[str, int, int], models: Models, alone: Callable[[Asked], Answer]
) -> None:
    """Any mix of prompts and techniques, in any chunks, by any number of threads, cold or prefix-hit (models are kept),
    preempted or not."""
    expected, llm = [alone(one) for one in asked], models(*place)
    assert answers(llm, requests(llm, asked), SchedulerConfig(max_step_tokens=chunk)) == expected
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
