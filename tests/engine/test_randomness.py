"""Statistics of the tokens drawn and of the random numbers behind them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.test_sampler import dense, draw, noise
from twostroke.engine.sampler import sample, uniform


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations the statistic is above its mean, cells of no probability left out."""
    cells = expected > 0
    assert not counts[~cells].any()
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.1}], ids=lambda o: "".join(o))
def test_tokens_follow_the_distribution_over_indexes_and_over_seeds(options: dict[str, Any]) -> None:
    row, count = noise(20, scale=1.0, seed=1), 6000
    expected = dense(row, temperature=0.8, **options) * count
    draws = {
        "indexes": [draw(i, temperature=0.8, **options) for i in range(count)],
        "seeds": [draw(3, seed=i.to_bytes(4, "little"), temperature=0.8, **options) for i in range(count)],
    }
    for over, each in draws.items():
        ids = torch.tensor([s.id for s in sample(row.expand(count, -1), each)])
        assert chi_square(ids.bincount(minlength=20), expected) < 4, over
    # A sampler that is off by a little is found out: one draw in ten is of another temperature.
    biased = [draw(i, temperature=0.8 if i % 10 else 8.0) for i in range(count)]
    if not options:
        ids = torch.tensor([s.id for s in sample(row.expand(count, -1), biased)])
        assert chi_square(ids.bincount(minlength=20), expected) > 4


def kolmogorov_smirnov(numbers: list[float]) -> float:
    """The largest distance from the uniform distribution, times the root of the count; above 1.95 once in 1000."""
    ordered, count = np.sort(numbers), len(numbers)
    steps = np.arange(count)
    return max((ordered - steps / count).max(), ((steps + 1) / count - ordered).max()) * math.sqrt(count)


def test_random_numbers_are_uniform_and_depend_on_seed_and_index_alone() -> None:
    by_index = [uniform(b"a", i) for i in range(20000)]
    by_seed = [uniform(i.to_bytes(16, "little"), 0) for i in range(20000)]
    for numbers in (by_index, by_seed):
        assert all(0 <= number < 1 for number in numbers)
        assert len(set(numbers)) == len(numbers)
        assert kolmogorov_smirnov(numbers) < 1.95
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert kolmogorov_smirnov([number**1.05 for number in by_index]) > 1.95, "the test finds a small bias"
    assert by_index == [uniform(b"a", i) for i in range(20000)]
    assert uniform(b"b", 0) != uniform(b"a", 0)
