"""Every technique under random schedules, on the native backend: the same tokens and log-probabilities, to the bit."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.methods.watching import PROMPT, needs_native
from twostroke.engine.sampling import SamplingParams
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.track import Token
from twostroke.llm import LLM
from twostroke.methods import METHODS, Method, method

SAMPLING = SamplingParams(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True)
TECHNIQUES: list[Method] = [
    *(method(name) for name in sorted(METHODS)),
    method("repeat", times=3, sinks=2, offset="wrong"),
    method("refresh", every=3, window=2),
    method("refresh", when="entropy", threshold=6.8, every=2),
    method("refresh", when="budget", budget=300, every=1),
    method("refresh", when="probe", every=3, threshold=0.9),
    method("speculative", draft="student"),
    method("speculative", draft="draft"),
    method("drop", window=9, every=4),
    method("drop", times=2, keep="last", by="key-norm", window=9, every=4),
    method("drop", window=9, every=4, by="attention"),
    method("drop", times=2, keep="last", window=9, every=4, by="attention", observed=3),
    method("snap", window=4, budget=12),
    method("snap", times=2, keep="last", sinks=2, window=4, budget=12, kernel=3),
]
Models = Callable[[str, int], LLM]


@pytest.fixture(scope="module")
def models(native_directory: Path) -> Models:
    @functools.cache
    def opened(index: str, pages: int) -> LLM:
        options = {"backend": "native", "weights": "int8", "student": "int2", "draft": "int4", "threads": 2}
        page_bytes = 3 * 2 * 2 * 64 * 2 * 16
        return LLM(str(native_directory), prefix_index=index, kv_bytes=pages * page_bytes, **options)

    return opened


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[int, Method], list[Token]]:
    """The answer to a prompt by itself, unchunked and cold."""

    @functools.cache
    def answer(length: int, chosen: Method) -> list[Token]:
        llm = models("off", 256)
        llm.engine.config = SchedulerConfig(max_step_tokens=4096)
        return llm.generate([prompt(length)], method=chosen, params=SAMPLING)[0].tokens

    return answer


def prompt(length: int) -> list[int]:
    return (PROMPT * 4)[:length]


@needs_native
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 15, 16, 17, 40, 70]), st.sampled_from(TECHNIQUES)), min_size=1, max_size=5
    ),
    chunk=st.sampled_from([1, 7, 16, 50, 512]),
    index=st.sampled_from(["off", "radix", "hash"]),
    pages=st.sampled_from([24, 256]),
)
def test_any_schedule(
    requests: list[tuple[int, Method]],
    chunk: int,
    index: str,
    pages: int,
    models: Models,
    alone: Callable[[int, Method], list[Token]],
) -> None:
    """Any mix of prompts and techniques, in any chunks, cold or prefix-hit (models are kept), preempted or not."""
    expected = [alone(length, chosen) for length, chosen in requests]
    llm = models(index, pages)
    llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
    submitted = [llm.engine.submit(llm.request(prompt(length), SAMPLING, chosen)) for length, chosen in requests]
    llm.engine.finish(submitted)
    assert [list(request.events) for request in submitted] == expected
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
