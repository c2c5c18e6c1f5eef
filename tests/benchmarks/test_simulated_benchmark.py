"""benchmarks/simulated.py: which rounds are missing, which load a model gets, and what rounds say together."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.http_costs import probes
from benchmarks.simulated import Comparison, figures, highest_rate, with_kernels
from tests.study.simulate.chaos import draw
from twostroke.models.cost import CostModel, SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.step_costs import MeasuredCosts

ASKED = {"part": 0.3, "rate": None, "itl_ms": None, "kv_bytes": 1 << 30, "trace": None}


def options(**changes: Any) -> Namespace:
    return Namespace(**(ASKED | {"requests": 20, "rounds": 2, "seed": 1} | changes))


def test_rounds_that_were_measured_count_for_the_same_load_alone() -> None:
    fresh = Comparison("m", options(), {})
    assert [(load.name, number) for load, number in fresh.missing] == [
        (name, number) for name in ("open loop", "closed loop of 8", "shared prefixes") for number in (0, 1)
    ]
    fresh.facts["open loop"] |= {"rate": 0.5, "rounds": [{}, {}]}
    fresh.facts["shared prefixes"] |= {"rate": 1.5, "rounds": [{}]}
    again = Comparison("m", options(), fresh.facts)
    assert [(load.name, number) for load, number in again.missing] == [
        ("closed loop of 8", 0), ("closed loop of 8", 1), ("shared prefixes", 1),
    ]  # fmt: skip
    assert again.facts["shared prefixes"]["rate"] == 1.5
    for change in ({"requests": 30}, {"seed": 2}, {"part": 0.2}, {"rate": 2.0}):
        assert len(Comparison("m", options(**change), fresh.facts).missing) == 6


def test_figures_are_medians_over_rounds() -> None:
    rounds = [
        {"simulated": {"TTFT p50": ours}, "measured": {"TTFT p50": theirs}}
        for ours, theirs in ((1.0, 5.0), (3.0, 2.0), (2.0, 4.0))
    ]
    assert figures(rounds) == {"TTFT p50": {"simulated_s": 2.0, "measured_s": 4.0, "error": -0.5}}


def timed(times: float) -> EngineSetup:
    """An engine whose steps take so many times as long as those of the first."""
    setup = replace(draw(0)[0].setup, pages=10_000, page_size=16)
    cost = CostModel(
        setup.config, {setup.config.head_tensor: 10_000, "blocks.0.up.weight": 90_000}, setup.model.kv_bytes(1)
    )
    prices = tuple(times * price for price in (1e-8, 1e-8, 1e-9, 0, 1e-9, 0, 0, 0, 0))
    return replace(setup, costs=MeasuredCosts(StepPredictor(cost, prices), host_s=times * 1e-4, token_s=times * 1e-5))


def test_slower_models_get_fewer_requests() -> None:
    for load in Comparison("m", options(), {}).loads:
        assert highest_rate(timed(3), load) == pytest.approx(highest_rate(timed(1), load) / 3, rel=0.01)


def test_kernels_are_timed_anew_and_the_rest_stays() -> None:
    one, kernels = timed(1), timed(3).costs
    assert isinstance(kernels, MeasuredCosts)
    made = with_kernels(one, kernels.predictor)
    assert (made.costs.step([SequenceRows(3)]), made.costs.host_s) == (
        kernels.step([SequenceRows(3)]),
        one.costs.host_s,
    )


def test_a_server_that_is_probed_at_rest_is_at_rest() -> None:
    """Requests come at most twice a second, and take at most half of the time."""
    for times, rate in ((1, "2"), (1e4, None)):
        asked = probes(timed(times).costs)["long"]
        found = asked[asked.index("--rate") + 1]
        assert found == rate if rate else 0 < float(found) < 2
