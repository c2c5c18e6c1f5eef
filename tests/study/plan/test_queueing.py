"""Waiting, batches and what can be carried: against exact queues and a server that is stepped token by token."""

from collections.abc import Sequence
from math import exp, factorial

import numpy as np
import pytest

from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows
from twostroke.study.plan.queueing import Queueing, ServerModel, waits
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic
from twostroke.study.traffic.workload_sampler import WorkloadSampler


def seconds(step: Sequence[SequenceRows]) -> float:
    """A step: 2 ms, 0.1 ms a row, 1 us for each entry of context."""
    return 2e-3 + sum(1e-4 * one.count + 1e-6 * one.context for one in step)


def server(most: int = 256, budget: int = 512) -> ServerModel:
    return ServerModel(seconds, budget, most)


def traffic(rate: float, count: int, inputs: TokenRange, outputs: TokenRange, burstiness: float = 1.0) -> Traffic:
    return WorkloadSampler(count, inputs, outputs, seed=1).traffic(OpenLoop(rate, burstiness))


def test_waits_by_hand() -> None:
    arrivals, services = np.array([0.0, 1.0, 1.5, 9.0, 9.0]), np.array([2.0, 3.0, 1.0, 5.0, 1.0])
    assert waits(arrivals, services).tolist() == [0, 1, 3.5, 0, 5]


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_equal_prompts_and_random_arrivals_are_an_m_d_1_queue(load: float) -> None:
    """Mean wait and its distribution (Erlang 1909) of a server whose requests have no second token."""
    service = seconds([SequenceRows(100, 0, 1)])
    rate = load / service
    found = Queueing(server(), traffic(rate, 100_000, TokenRange(100, 100), TokenRange(1, 1))).at(rate)
    assert found is not None
    assert found.prefill_share == pytest.approx(load)
    assert found.waiting_s == pytest.approx(rate * service**2 / (2 * (1 - load)), rel=0.05)

    def waits_at_most(t: float) -> float:
        whole = int(t / service)
        terms = (
            (rate * (k * service - t)) ** k / factorial(k) * exp(-rate * (k * service - t)) for k in range(whole + 1)
        )
        return (1 - load) * sum(terms)

    assert waits_at_most(found.ttft.p90 - service) == pytest.approx(0.9, abs=0.01)
    assert waits_at_most(found.ttft.p99 - service) == pytest.approx(0.99, abs=0.004)


def stepped(traffic: Traffic, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """TTFTs and gaps of a server that does one step after the other: all decode, the first in line is prefilled."""
    waiting = [[one.at, one.prompt_tokens, 0, one.output_tokens, 0.0] for one in traffic.arrivals]
    now, count, running, ttfts, gaps = 0.0, 0, list[list[float]](), list[float](), list[float]()
    while waiting or running:
        if not running and waiting[0][0] > now:
            now = waiting[0][0]
        rows = [SequenceRows(1, int(one[1] + one[2]), 1) for one in running]
        first = waiting[0] if waiting and waiting[0][0] <= now else None
        if first is not None:
            count = min(budget - len(rows), int(first[1] - first[2]))
            rows.append(SequenceRows(count, int(first[2]), 1))
        now += seconds(rows)
        for one in running:
            one[2] += 1
            gaps.append(now - one[4])
            one[4] = now
        running = [one for one in running if one[2] < one[3]]
        if first is not None:
            first[2] += count
            if first[2] == first[1]:
                ttfts.append(now - first[0])
                waiting.pop(0)
                if first[3] > 1:
                    running.append([first[0], first[1], 1, first[3], now])
    return np.array(ttfts), np.array(gaps)


@pytest.mark.parametrize(("load", "ttft", "itl"), [(0.15, 0.02, 0.08), (0.3, 0.03, 0.1), (0.5, 0.08, 0.2)])
def test_both_strokes_against_a_server_that_is_stepped(load: float, ttft: float, itl: float) -> None:
    """Up to half of what it can carry. Its steps depend strongly on the number of sequences, which is the hard case."""
    made = traffic(1.0, 4000, TokenRange(100, 1500), TokenRange(10, 120))
    whole = Queueing(server(), made)
    rate = load * whole.max_rate()
    found = whole.at(rate)
    assert found is not None
    ttfts, gaps = stepped(made.at_rate(rate), 512)
    assert found.ttft.mean == pytest.approx(ttfts.mean(), rel=ttft)
    assert found.ttft.p50 == pytest.approx(np.percentile(ttfts, 50), rel=ttft)
    assert found.ttft.p99 == pytest.approx(np.percentile(ttfts, 99), rel=2 * ttft)
    assert found.itl.mean == pytest.approx(gaps.mean(), rel=itl)


def test_what_cannot_be_served() -> None:
    made = traffic(1.0, 500, TokenRange(1000, 1000), TokenRange(1, 1))
    whole = Queueing(server(), made)
    service = seconds([SequenceRows(512)]) + seconds([SequenceRows(488, 512, 1)])
    assert whole.max_rate() == pytest.approx(1 / service, rel=0.01)
    assert whole.at(1.01 / service) is None
    assert whole.at(0.9 / service) is not None


def test_sequences_without_room_limit_the_rate() -> None:
    made = traffic(1.0, 500, TokenRange(16, 16), TokenRange(200, 200))
    rates = [Queueing(server(most), made).max_rate() for most in (1, 8, 64)]
    assert rates == sorted(rates)
    assert rates[0] < 0.3 * rates[1] < rates[2]
    with pytest.raises(InvalidRequest, match="not even one"):
        Queueing(server(0), made)


def test_a_worker_that_only_decodes_has_a_highest_rate_too() -> None:
    """With room for very many sequences: rate x seconds of an answer at a full batch is the batch."""
    made = traffic(1.0, 200, TokenRange(100, 100), TokenRange(101, 101))
    most = Queueing(server(512), made, prefills=False).max_rate()
    step = seconds([SequenceRows(1, 150, 1)] * 512)
    assert most == pytest.approx(512 / (100 * step), rel=0.02)
    assert Queueing(server(512), made, decodes=False).max_rate() == pytest.approx(
        1 / seconds([SequenceRows(100, 0, 1)]), rel=0.01
    )


def test_objectives_lower_the_rate() -> None:
    whole = Queueing(server(), traffic(1.0, 2000, TokenRange(500, 1500), TokenRange(50, 50)))
    free = whole.max_rate()
    tight = whole.max_rate(Objectives(ttft_s=0.3))
    assert 0 < tight < free
    found = whole.at(tight)
    assert found is not None
    assert found.ttft.wanted <= 0.3
    assert not found.missed(Objectives(ttft_s=0.3))
    assert found.missed(Objectives(ttft_s=0.3, itl_s=1e-6)) == ["ITL"]
    assert whole.max_rate(Objectives(ttft_s=1e-4)) == 0
    assert whole.max_rate(Objectives(ttft_s=0.3), longer_s=0.3) == 0
    with pytest.raises(InvalidRequest, match="above 0"):
        whole.at(-1.0)


def test_one_user_waits_for_nobody() -> None:
    made = WorkloadSampler(10, TokenRange(400, 400), TokenRange(41, 41), seed=1).traffic(ClosedLoop(1))
    whole = Queueing(server(), made)
    one = whole.closed(1)
    prefill, step = seconds([SequenceRows(400, 0, 1)]), seconds([SequenceRows(1, 420, 1)])
    assert one.ttft_s == pytest.approx(prefill)
    assert one.itl_s == pytest.approx(step, rel=0.02)
    assert one.rate == pytest.approx(1 / (prefill + 40 * step), rel=0.02)
    many = whole.closed(500)
    assert many.rate < 1 / prefill
    assert many.rate > whole.closed(4).rate > one.rate
    with pytest.raises(InvalidRequest, match="at least 1 user"):
        whole.closed(0)
