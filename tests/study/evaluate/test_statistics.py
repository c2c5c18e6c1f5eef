"""Intervals and tests against values worked out by hand."""

import math

import numpy as np
import pytest

from twostroke.study.evaluate.measures.divergence import compare
from twostroke.study.evaluate.measures.judge import repetition
from twostroke.study.evaluate.statistics import bootstrap, bootstrap_columns, mcnemar, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # z = 1.959964: of 0 in 6 the upper end is z^2 / (n + z^2) = 3.841459 / 9.841459.
    [(0, 6, 0.0, 0.390334), (6, 6, 0.609666, 1.0), (8, 10, 0.490162, 0.943318), (50, 100, 0.403832, 0.596168)],
)
def test_wilson(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert (found.n, found.value) == (n, successes / n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 0, 1.0), (3, 3, 1.0), (0, 6, 2 / 64), (6, 0, 2 / 64), (1, 9, 2 * (1 + 10) / 1024), (2, 3, 1.0)],
)
def test_mcnemar_is_the_exact_binomial(first: int, second: int, p: float) -> None:
    assert mcnemar(first, second) == pytest.approx(p)


def test_bootstrap_holds_the_mean_and_shrinks() -> None:
    values = np.random.default_rng(0).standard_normal(400) + 5
    many, few = bootstrap(values), bootstrap(values[:25])
    assert many.low < 5 < many.high
    assert many.value == pytest.approx(values.mean())
    assert many.high - many.low < 0.5 * (few.high - few.low)
    # The normal approximation: 1.96 standard errors on either side.
    assert many.high - many.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert bootstrap(values) == many


def test_bootstrap_of_what_is_not_there() -> None:
    first, second, third = bootstrap_columns(np.array([[1.0, math.nan, 2.0], [3.0, math.nan, 2.0], [math.nan] * 3]))
    assert (first.n, first.value, first.low, first.high) == (2, 2.0, 1.0, 3.0)
    assert second.n == 0
    assert math.isnan(second.value)
    assert (third.value, third.low, third.high) == (2.0, 2.0, 2.0)


def test_comparison_of_two_distributions() -> None:
    p = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32)
    q = np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32)
    surprise, kl, same = compare(np.log(p) + 3, np.log(q) - 2, [0, 2])
    assert surprise == pytest.approx([np.log(4), -np.log(0.8)], rel=1e-6)
    assert kl == pytest.approx([0.25 * np.log(2), 0], abs=1e-7)
    assert same.tolist() == [0, 1]


def test_repetition() -> None:
    assert repetition([1, 2, 3, 1, 2, 3, 1]) == pytest.approx(2 / 5)  # 123 231 312 123 231
    assert repetition([1, 2, 3, 4]) == 0
    assert repetition([1, 2]) is None
