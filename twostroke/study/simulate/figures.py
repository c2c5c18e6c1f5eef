"""Figures of a simulation. TTFT, ITL, TPOT and percentiles are those of `engine/timings.py`."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.engine.timings import DEFINITIONS as TIMINGS
from twostroke.engine.timings import mean, percentile
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.simulate.timeline import Timeline, TimelineInterval
from twostroke.study.simulate.worker import SimulatedWorker
from twostroke.study.traffic.objectives import Objectives

PERCENTS = (50, 90, 99)
THRASHING = 0.1  # preemptions a request from which most of the work is done again
DEFINITIONS = {
    "ttft_s": TIMINGS["ttft_s"],
    "itl_s": "every gap between consecutive tokens, of all answers together; percentiles within 0.1%",
    "tpot_s": f"{TIMINGS['tpot_s']}, one figure an answer",
    "e2e_s": "last token - arrival",
    "queue_s": "first computed on - arrival, and from each preemption until it ran again",
    "duration_s": "last token of all - first arrival",
    "goodput": "answers within every objective that was given / duration_s; of an answer's ITL, its 99th percentile",
    "hit_rate": "tokens of prefills that prefix indexes had / all tokens of prefills",
    "thrashing": "more than one preemption for ten requests",
    "busy": "seconds in which devices worked / seconds of all workers",
}


class QuantileSketch:
    """Mean and percentiles of numbers that are too many to keep: counts in intervals that grow by 0.1%.

    The quantile sketch DDSketch (Masson et al. 2019) with a fixed range, from a nanosecond to a year.
    """

    MIN_S, GROWTH = 1e-9, 1.001
    BATCH = 1 << 14  # numbers that are counted together, since array operations cost the same for one and for many

    def __init__(self) -> None:
        self._counts = np.zeros(2 + int(np.log(3.2e7 / self.MIN_S) / np.log(self.GROWTH)), np.int64)
        self._sum = 0.0
        self._waiting: list[np.ndarray] = []  # numbers that are not counted yet
        self._num_waiting = 0

    def add(self, values: np.ndarray) -> None:
        """Seconds, 0 or more."""
        self._sum += float(values.sum())
        self._waiting.append(values)
        self._num_waiting += len(values)
        if self._num_waiting >= self.BATCH:
            self._count()

    def _count(self) -> None:
        values = np.concatenate([*self._waiting, np.zeros(0)])
        self._waiting, self._num_waiting = [], 0
        places = np.rint(np.log(np.maximum(values, self.MIN_S) / self.MIN_S) / np.log(self.GROWTH)).astype(np.int64)
        last = len(self._counts) - 1
        self._counts += np.bincount(np.minimum(places, last), minlength=last + 1)

    def figures(self) -> dict[str, float | None]:
        """The mean, and percentiles by nearest rank; None without numbers."""
        self._count()
        count = int(self._counts.sum())
        ranks = np.cumsum(self._counts)
        found: dict[str, float | None] = {"mean": self._sum / count if count else None}
        for percent in PERCENTS:
            place = int(np.searchsorted(ranks, max(1, np.ceil(count * percent / 100))))
            found[f"p{percent}"] = self.MIN_S * self.GROWTH**place if count else None
        return found


class SimulationFigures:
    """Collects what a service did."""

    def __init__(self, objectives: Objectives) -> None:
        self.timeline = Timeline()  # what its workers did in intervals of time
        self._objectives = objectives
        self._columns = {name: array("d") for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s")}
        self._gaps = QuantileSketch()
        self._met = self._inputs = self._outputs = self._cached = self._entered = self._preemptions = self._moves = 0
        self._first, self._last = math.inf, 0.0

    def watch(self, worker: SimulatedWorker, began: float, ended: float, what: TimelineInterval) -> None:
        """Count a step of a worker."""
        self.timeline.add(began, ended, what)

    def ended(self, call: SimulatedRequest) -> None:
        """Count a request that has all its tokens."""
        timings, columns = call.timings, self._columns
        columns["ttft_s"].append(timings.tokens[0] - call.arrival)
        columns["e2e_s"].append(timings.tokens[-1] - call.arrival)
        columns["queue_s"].append(call.queue_s)
        if (tpot := timings.tpot) is not None:
            columns["tpot_s"].append(tpot)
            times = np.array(timings.tokens)
            self._gaps.add(times[1:] - times[:-1])
        self._met += self._objectives.given and self._objectives.met(timings)
        self._inputs += call.asked.prompt_tokens
        self._outputs += len(timings.tokens)
        self._cached += call.cached
        self._entered += call.entered
        self._preemptions += call.preemptions
        self._moves += call.moves
        self._first, self._last = min(self._first, call.arrival), max(self._last, timings.tokens[-1])

    def summary(self, service: Simulation) -> dict[str, Any]:
        """Each figure as in `DEFINITIONS`, and what happened over time."""
        done = len(self._columns["ttft_s"])
        duration = self._last - self._first if done else 0.0

        def rate(count: float) -> float | None:
            return count / duration if duration else None

        cached, entered = self._cached, self._entered
        spreads: dict[str, Any] = {name: _spread(values) for name, values in self._columns.items()}
        return {
            "sent": service.came,
            "completed": done,
            "duration_s": duration,
            "input_tokens": self._inputs,
            "output_tokens": self._outputs,
            **spreads,
            "itl_s": self._gaps.figures(),
            "requests_per_second": rate(done),
            "output_tokens_per_second": rate(self._outputs),
            "total_tokens_per_second": rate(self._inputs + self._outputs),
            "goodput": rate(self._met) if self._objectives.given else None,
            "met": self._met / done if self._objectives.given and done else None,
            "hit_rate": cached / (cached + entered) if cached + entered else None,
            "preemptions": self._preemptions,
            "thrashing": self._preemptions > THRASHING * done,
            "moves": self._moves,
            "deaths": service.happened["death"],
            "lost_transfers": service.happened["lost transfer"],
            "moved_bytes": service.transfers.moved_bytes,
            "steps": service.num_steps,
        }

    def over_time(self, service: Simulation) -> list[dict[str, Any]]:
        """One row for each interval: what workers did on average; shares of the peaks where these are known."""
        fleet = service.fleet
        workers, pages = fleet.size, fleet.size * fleet.setup.pages
        peak = fleet.setup.costs.peak
        rows: list[dict[str, Any]] = []
        for i, one in enumerate(self.timeline.intervals):
            width = self.timeline.width
            rows.append(
                {
                    "at_s": i * width,
                    "busy": one.busy_s / (workers * width),
                    "running": one.running_s / width,
                    "waiting": one.waiting_s / width,
                    "kv": one.page_s / (pages * width),
                    "prefill_tokens_per_second": one.prefill / width,
                    "decode_tokens_per_second": one.decode / width,
                    "flops_per_second": one.flops / width,
                    "bytes_per_second": one.bytes / width,
                    "compute": None if peak is None else one.flops / (peak.flops * workers * width),
                    "bandwidth": None if peak is None else one.bytes / (peak.bytes * workers * width),
                }
            )
        return rows


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": mean(values)} | {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
