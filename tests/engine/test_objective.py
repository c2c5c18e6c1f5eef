"""An ITL objective: chunks are the largest that fit, prompts always make progress, and no answer changes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine import test_schedules as schedules
from tests.watching import answers
from twostroke.backends.native import library
from twostroke.engine.forecast import Forecast
from twostroke.engine.runner import Chunk
from twostroke.engine.scheduler import LEAST_CHUNK, Plan, SchedulerConfig, largest
from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.models.cost import Correction, Predictor, Rows, Work
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
ENDLESS = SamplingParams(max_tokens=1000, ignore_eos=True)


class Millisecond:
    """A forecast with a number of milliseconds for each token and for each ten entries before a chunk."""

    def planned(self, plan: Plan) -> float:
        return sum(count + len(lane.writer) // 10 * (count > 1) for lane, count in plan) / 1e3

    def placed(self, entries: Sequence[Chunk]) -> float:
        return 0.0

    def observe(self, entries: Sequence[Chunk], predicted: float, measured: float) -> None:
        assert measured > 0


@given(most=st.integers(1, 600), limit=st.integers(0, 700))
def test_largest(most: int, limit: int) -> None:
    found = largest(most, lambda tokens: tokens <= limit)
    assert found == min(most, max(limit, LEAST_CHUNK))


@pytest.fixture
def paced(tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def opened(**options: Any) -> LLM:
        monkeypatch.setattr(Forecast, "calibrated", lambda models: Millisecond())
        return tiny_llm(prefix_index="off", **options)

    return opened


def chunks(llm: LLM, decoding: int, prompt: int) -> list[int]:
    """The number of prompt tokens that each step enters beside `decoding` streams, until the first token."""
    streams = [llm.engine.submit(llm.request([5], ENDLESS)) for _ in range(decoding)]
    llm.engine.step()
    request = llm.engine.submit(llm.request([7] * prompt, SamplingParams(max_tokens=1)))
    found: list[int] = []
    while not request.done:
        llm.engine.step()
        assert llm.engine.report.decode == decoding
        found.append(llm.engine.report.prefill)
    for stream in streams:
        llm.engine.cancel(stream)
    return found


def test_chunks_are_the_largest_that_fit(paced: Callable[..., LLM]) -> None:
    # 40 ms for three streams: 37 tokens, then 34 as 37 precede them, then 30 as 71 precede them, and so on.
    assert chunks(paced(itl_ms=40), 3, 150) == [37, 34, 30, 27, 22]


def test_the_budget_of_a_step_still_holds(paced: Callable[..., LLM]) -> None:
    assert chunks(paced(itl_ms=40, max_step_tokens=28), 3, 50) == [25, 25]


def test_a_prompt_gets_on_however_tight_the_objective(paced: Callable[..., LLM]) -> None:
    assert chunks(paced(itl_ms=0.001), 3, 20) == [LEAST_CHUNK, LEAST_CHUNK, 20 - 2 * LEAST_CHUNK]
    assert chunks(paced(itl_ms=0.001, max_step_tokens=3), 3, 3) == [1, 1, 1]


def test_where_nothing_decodes_the_whole_budget_is_used(paced: Callable[..., LLM]) -> None:
    assert chunks(paced(itl_ms=1, max_step_tokens=512), 0, 1000) == [512, 488]


def test_without_an_objective_nothing_is_predicted(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    assert chunks(llm, 2, 600) == [510, 90]
    assert llm.engine.report.predicted_s is None


@pytest.mark.parametrize("itl_ms", [0, -5, float("nan"), float("inf")])
def test_wrong_objectives(itl_ms: float) -> None:
    with pytest.raises(InvalidRequest, match="itl_ms must be a number above 0"):
        LLM("no-such-model", itl_ms=itl_ms)


def test_calibration(family: str, tiny_llm: TinyLLM) -> None:
    """Calibration takes no page and sets prices; steps are then predicted, and the answer is the same."""
    plain, paced = tiny_llm(family), tiny_llm(family, itl_ms=0.5)
    assert paced.pool.num_used == 0
    options: Any = {"max_tokens": 12, "ignore_eos": True}
    prompts = [[5, 6], [7] * 90]
    expected = [one.tokens for one in plain.generate(prompts, **options)]
    found = [one.tokens for one in paced.generate(prompts, **options)]
    assert [[token.id for token in tokens] for tokens in found] == [[t.id for t in tokens] for tokens in expected]
    assert paced.engine.report.predicted_s is not None
    assert paced.engine.report.predicted_s > 0


def test_models_are_added_up(tiny_llm: TinyLLM) -> None:
    """A step over two models takes the sum of both times; the correction applies to the whole step."""
    a, b = tiny_llm().model, tiny_llm().model
    cost = a.cost
    first, second = Predictor(cost, Work(0, 0, 1e-6, 0, 0)), Predictor(cost, Work(0, 0, 2e-6, 0, 0))
    forecast = Forecast({a: first, b: second})
    both = forecast._seconds([(a, Rows(2)), (b, Rows(3))])
    assert both == pytest.approx(Correction().factor * (first.seconds([Rows(2)]) + second.seconds([Rows(3)])))


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
@settings(max_examples=6, deadline=None)
@given(asked=st.lists(schedules.ASKED, min_size=2, max_size=4), itl_ms=st.sampled_from([0.1, 8.0, 40.0]))
def test_an_objective_never_changes_a_bit(asked: list[schedules.Asked], itl_ms: float) -> None:
    """Chunks depend on measured times, with real predictions on a real model, while earlier requests decode."""
    config = SchedulerConfig(max_step_tokens=64, itl_ms=itl_ms)
    llm = schedules.model("off", 256, 2)
    found = answers(llm, schedules.requests(llm, asked), config, steps=3)
    assert found == [schedules.alone(one) for one in asked]
