"""benchmarks/http_costs.py: costs that made streams are found again in them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.http_costs import ANSWER, LONG, SHORT, STREAMS, Pace, Stream, with_http
from tests.study.simulate.chaos import draw
from twostroke.models.cost import CostModel, SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.simulate.engine_setup import HttpOverhead
from twostroke.study.simulate.step_costs import HostInclusiveSeconds, MeasuredCosts

STEP = 0.003


def even(count: int, step: float = STEP) -> list[float]:
    return [1.0 + step * i for i in range(count)]


def test_a_steady_stream_has_no_stalls() -> None:
    pace = Pace.of([Stream(SHORT, 0, 0.9, even(40))])
    assert pace.step_s == pytest.approx(STEP)
    assert max(pace.stalls) == 0
    assert max(pace.late_s) == pytest.approx(0, abs=1e-12)


def test_late_tokens_are_not_stalls() -> None:
    """A token that comes 9 ms late, at once with the next two, says nothing of its step."""
    tokens = even(40)
    tokens[20] += 0.009
    tokens[21] = tokens[22] = tokens[20]
    pace = Pace.of([Stream(SHORT, 0, 0.9, tokens)])
    assert pace.step_s == pytest.approx(STEP)
    assert max(pace.stalls) == 0
    assert pace.late_s[20] == pytest.approx(0.009, abs=0.003)
    assert sum(late > 1e-9 for late in pace.late_s) <= 3


def test_stalls_are_not_late_tokens() -> None:
    tokens = [at + (0.05 if i >= 20 else 0) for i, at in enumerate(even(41))]
    pace = Pace.of([Stream(SHORT, 0, 0.9, tokens)])
    assert sum(stall > 0 for stall in pace.stalls) == 1
    assert max(pace.late_s) == pytest.approx(0, abs=1e-12)
    assert pace.step_s + sum(pace.stalls) / 40 == pytest.approx((tokens[-1] - tokens[0]) / 40)


def test_what_http_adds_is_found_again() -> None:
    setup = draw(0)[0].setup
    cost = CostModel(
        setup.config, {setup.config.head_tensor: 10_000, "blocks.0.up.weight": 90_000}, setup.model.kv_bytes(1)
    )
    timed = MeasuredCosts(StepPredictor(cost, (1e-8, 1e-8, 1e-9, 0, 0, 0, 0, 0, 0)), host_s=1e-4, token_s=1e-5)
    slower = replace(timed, host_s=timed.host_s + 5e-4, token_s=timed.token_s + 2e-4)
    row = SequenceRows(1, SHORT + ANSWER // 2, 1)

    def first(prompt: int, cached: int) -> Stream:
        entered = prompt - cached
        at = (
            HostInclusiveSeconds(slower).seconds([SequenceRows(entered, cached, 1)])
            + 0.004
            + 2e-5 * prompt
            + 3e-5 * entered
        )
        return Stream(prompt, cached, 1.0, [1.0 + at])

    made, added = with_http(
        replace(setup, costs=timed),
        {
            "one stream": [Stream(SHORT, 0, 0.9, even(40, HostInclusiveSeconds(slower).seconds([row])))],
            "streams": [Stream(SHORT, 0, 0.9, even(40, HostInclusiveSeconds(slower).seconds([row] * STREAMS)))]
            * STREAMS,
            "short": [first(SHORT, 0)],
            "long": [first(LONG, 0)],
            "known": [first(SHORT + LONG, 0), first(SHORT + LONG, LONG)],
        },
    )
    expected = {"step_s": 5e-4, "token_s": 2e-4, "request_s": 0.004, "prompt_s": 2e-5, "entered_s": 3e-5}
    assert {name: added[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert made.http.request_delay(100) == pytest.approx(0.006)


def test_tokens_on_their_way() -> None:
    """They come in order, each as late as one of the measured, in the measured order."""
    late = (0.0, 0.01, 0.0, 0.0)
    front = HttpOverhead(late_s=late)
    for number in range(8):
        start = random.Random(number).randrange(4)
        made = even(9)
        received = front.delivery_times(number, made)
        assert received == sorted(received)
        for i, (at, before) in enumerate(zip(made, received, strict=True)):
            assert before >= at + late[(start + i) % 4]
        assert max(b - a for a, b in zip(made, received, strict=True)) == pytest.approx(0.01)
    assert HttpOverhead().delivery_times(3, [1.0, 2.0]) == [1.0, 2.0]
