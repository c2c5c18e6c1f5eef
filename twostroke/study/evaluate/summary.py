"""Estimates of every metric for every method, and comparisons of methods item by item."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from twostroke.study.evaluate.evaluation import Evaluation
from twostroke.study.evaluate.measure import Measure, Metric
from twostroke.study.evaluate.run_directory import ItemRecords
from twostroke.study.evaluate.statistics import Estimate, bootstrap, bootstrap_columns, mcnemar, wilson


@dataclass(frozen=True)
class MethodPair:
    """Two methods on the items that both have a value for."""

    first: str
    second: str
    difference: Estimate  # second - first, with its paired bootstrap interval
    # first_only, second_only, p: of a share, how many items only one has, and McNemar's exact test
    first_only: int | None = None
    second_only: int | None = None
    p: float | None = None


@dataclass(frozen=True)
class MetricSummary:
    """`estimates` by method; a curve has one for each position."""

    metric: Metric
    estimates: dict[str, list[Estimate]]
    pairs: list[MethodPair]

    def of(self, method: str) -> Estimate:
        return self.estimates[method][0]


@dataclass(frozen=True)
class Summary:
    """The result of an evaluation. `metrics` are by measure; those without any value are left out."""

    settings: dict[str, Any]
    about: str
    n: int
    methods: list[str]
    metrics: dict[str, list[MetricSummary]]

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON, where nan becomes null."""
        measures = {
            name: {
                one.metric.key: {
                    "meaning": one.metric.meaning,
                    "methods": {
                        method: [_plain(asdict(value)) for value in values]
                        if one.metric.form == "curve"
                        else _plain(asdict(values[0]))
                        for method, values in one.estimates.items()
                    },
                    "pairs": [_plain(asdict(pair)) for pair in one.pairs],
                }
                for one in metrics
            }
            for name, metrics in self.metrics.items()
        }
        return {"settings": self.settings, "data": self.about, "n": self.n, "measures": measures}


def summarize(evaluation: Evaluation, lines: Sequence[ItemRecords]) -> Summary:
    """Estimates over all lines."""
    methods = [contender.name for contender in evaluation.comparison.contenders]
    metrics = {measure.name: _metrics(measure, methods, lines) for measure in evaluation.measures}
    return Summary(evaluation.settings, evaluation.comparison.task.about, len(lines), methods, metrics)


def _metrics(measure: Measure, methods: Sequence[str], lines: Sequence[ItemRecords]) -> list[MetricSummary]:
    found: list[MetricSummary] = []
    for metric in measure.metrics:
        key = metric.exponent_of or metric.key
        raw = {name: [line.measures[measure.name][name][key] for line in lines] for name in methods}
        if metric.form == "curve":
            curves = {name: bootstrap_columns(_ragged(values)) for name, values in raw.items()}
            found.append(MetricSummary(metric, curves, []))
            continue
        values = {
            name: np.array([math.nan if one is None else one for one in ones], float) for name, ones in raw.items()
        }
        if all(np.isnan(ones).all() for ones in values.values()):
            continue
        estimates = {name: [_estimate(metric, ones)] for name, ones in values.items()}
        pairs = [_pair(metric, a, b, values[a], values[b]) for a, b in combinations(methods, 2)] if metric.pairs else []
        found.append(MetricSummary(metric, estimates, pairs))
    return found


def _estimate(metric: Metric, values: np.ndarray) -> Estimate:
    known = values[~np.isnan(values)]
    if metric.form == "share":
        return wilson(int(known.sum()), len(known))
    mean = bootstrap(values)
    if metric.exponent_of is None:
        return mean
    return Estimate(mean.n, *(math.exp(value) for value in (mean.value, mean.low, mean.high)))


def _pair(metric: Metric, first: str, second: str, a: np.ndarray, b: np.ndarray) -> MethodPair:
    difference = bootstrap(b - a)
    if metric.form != "share":
        return MethodPair(first, second, difference)
    first_only, second_only = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return MethodPair(first, second, difference, first_only, second_only, mcnemar(first_only, second_only))


def _ragged(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """[rows, longest], nan where a row has ended."""
    table = np.full((len(rows), max(map(len, rows))), math.nan)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
