"""Costs, figures, names and routers, each by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.study.simulate.chaos import draw
from twostroke.engine.router import KvAware
from twostroke.engine.timings import percentile
from twostroke.errors import InvalidRequest
from twostroke.kv.kv_events import page_names
from twostroke.models.cost import SequenceRows
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import find_model
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.weight_formats import weight_format
from twostroke.study.simulate.engine_setup import machine_setup
from twostroke.study.simulate.figures import QuantileSketch
from twostroke.study.simulate.fleet import Fleet, FleetFaults, KvLink
from twostroke.study.simulate.simulated_request import prompt_tokens
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.simulate.step_costs import RooflineCosts
from twostroke.study.simulate.timeline import MAX_INTERVALS, Timeline, TimelineInterval
from twostroke.study.traffic.requests import PromptPiece, Replay, Traffic, TrafficRequest

ROWS = st.builds(SequenceRows, st.integers(1, 600), st.integers(0, 9000), st.integers(0, 1))


@given(
    st.sampled_from(["llama-3-8b", "gpt-oss-20b"]), st.sampled_from([1, 2, 8]), st.lists(ROWS, min_size=1, max_size=6)
)
def test_peaks_are_the_roofline(name: str, tp: int, rows: list[SequenceRows]) -> None:
    model = find_model(name).model
    roofline = Roofline(model, find_machine("h100"), weight_format(model.weights), tp)
    taken, expected = RooflineCosts(roofline).step(rows), roofline.step(rows)
    assert taken.seconds == pytest.approx(expected.seconds)
    assert taken.flops == pytest.approx(expected.flops)
    assert taken.bytes == pytest.approx(expected.bytes)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200))
def test_percentiles_of_a_spread(values: list[float]) -> None:
    spread = QuantileSketch()
    spread.add(np.array(values[:7]))
    spread.add(np.array(values[7:]))
    found = spread.figures()
    assert found["mean"] == pytest.approx(sum(values) / len(values))
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == pytest.approx(percentile(values, percent), rel=1e-3)


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 30)), max_size=20))
def test_a_timeline_loses_nothing(steps: list[tuple[float, float]]) -> None:
    timeline = Timeline()
    for began, seconds in steps:
        timeline.add(began, began + seconds, TimelineInterval(busy_s=seconds, decode=2.0))
    assert len(timeline.intervals) <= MAX_INTERVALS
    assert sum(one.busy_s for one in timeline.intervals) == pytest.approx(sum(seconds for _, seconds in steps))
    assert sum(one.decode for one in timeline.intervals) == pytest.approx(2.0 * len(steps))
    # Nobody is busy for longer than the interval, but for those that are at work at once.
    assert all(one.busy_s <= len(steps) * timeline.width * 1.001 for one in timeline.intervals)


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 30)), max_size=20))
def test_a_timeline_adds_up_the_same_in_any_batches(steps: list[tuple[float, float]]) -> None:
    together, one_by_one = Timeline(), Timeline()
    for began, seconds in steps:
        for timeline in (together, one_by_one):
            timeline.add(began, began + seconds, TimelineInterval(busy_s=seconds, flops=1 / 3, page_s=seconds / 7))
        assert one_by_one.intervals
    assert together.intervals == one_by_one.intervals
    assert together.width == one_by_one.width


def test_equal_pieces_are_equal_tokens() -> None:
    one, other = (prompt_tokens([PromptPiece(7, 40), PromptPiece(name, 30)], 1000) for name in (8, 9))
    assert (one[:40] == other[:40]).all()
    assert (one[40:] != other[40:]).mean() > 0.9
    assert one.max() < 999
    names = [list(page_names(tokens, 16)) for tokens in (one, other)]
    assert len(names[0]) == 4
    assert [a == b for a, b in zip(*names, strict=True)] == [True, True, False, False]
    assert list(page_names(one[32:], 16, names[0][1])) == names[0][2:]


def test_events_report_what_an_index_holds() -> None:
    """At the end of a run, the router knows exactly the pages of all indexes."""
    setup = machine_setup("llama-3-8b", "h100", kv_bytes=500 << 20)
    arrivals = [TrafficRequest(0.01 * i, (PromptPiece(i % 5, 300), PromptPiece(100 + i, 100)), 4) for i in range(40)]
    traffic = Traffic.replayed(arrivals)
    service = Simulation(Fleet(setup, 3, router="kv-aware"), traffic)
    service.run()
    while service.events.step():
        pass
    assert isinstance(service.router, KvAware)
    for worker in service.workers:
        assert worker.model.index is not None
        assert len(service.router.held[worker]) == len(worker.model.index.pages)
    assert sum(one.cached for one in service.calls) > 0


def test_time_of_a_transfer() -> None:
    """A prompt's KV takes its bytes / rate + latency from the prefill to the decode worker."""
    times: list[float] = []
    for link in (KvLink(1e9, 0.0), KvLink(1e9, 0.5), KvLink(0.5e9, 0.0)):
        setup = machine_setup("llama-3-8b", "h100", kv_bytes=1 << 30)
        traffic = Traffic([TrafficRequest(0.0, (PromptPiece(1, 1000),), 2)], Replay((0.0,)))
        service = Simulation(Fleet(setup, 0, 1, 1, link=link), traffic)
        service.run()
        times.append(service.calls[0].tokens[0])
        assert service.transfers.moved_bytes == setup.model.kv_bytes(1000)
    seconds = 1000 * 131_072 / 1e9
    assert times[1] - times[0] == pytest.approx(0.5)
    assert times[2] - times[0] == pytest.approx(seconds)


def test_what_is_refused() -> None:
    setup = draw(0)[0].setup
    with pytest.raises(InvalidRequest, match="need a link"):
        Fleet(setup, 0, 1, 1)
    with pytest.raises(InvalidRequest, match="at least one worker each"):
        Fleet(setup, 0, 1, 0)
    with pytest.raises(InvalidRequest, match="how many prefill"):
        Fleet(setup, 1, 1, 1)
    with pytest.raises(InvalidRequest, match="router must be one of"):
        Fleet(setup, router="random")
    with pytest.raises(InvalidRequest, match="a rate above 0"):
        KvLink(0.0)
    with pytest.raises(InvalidRequest, match="below 1"):
        FleetFaults(lost=1.0)
    with pytest.raises(InvalidRequest, match="leave no room for KV"):
        machine_setup("llama-3-70b", "h100")
    with pytest.raises(InvalidRequest, match="the longest request"):
        Simulation(Fleet(setup), Traffic([TrafficRequest(0.0, (PromptPiece(1, 100_000),), 1)], Replay((0.0,))))
