"""Statistics of the tokens drawn and of the random numbers behind them."""

import math
from typing import Any

import numpy as np
import pytest

from tests.sampling.test_sampler import dense, draw, noise
from twostroke.sampling import draw as kernels_noise
from twostroke.sampling.draw import NO_NOISE, Noise, gumbel
from twostroke.sampling.sampler import sample


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic's distance above its mean in standard deviations, without cells of probability 0."""
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
        ids = [s.id for s in sample(np.broadcast_to(row, (count, 20)), each)]
        assert chi_square(np.bincount(ids, minlength=20), expected) < 4, over
    # The test detects a small error: one draw in ten has another temperature.
    biased = [draw(i, temperature=0.8 if i % 10 else 8.0) for i in range(count)]
    if not options:
        ids = [s.id for s in sample(np.broadcast_to(row, (count, 20)), biased)]
        assert chi_square(np.bincount(ids, minlength=20), expected) > 4


def kolmogorov_smirnov(numbers: list[float]) -> float:
    """The largest distance from the uniform distribution, times the root of the count; above 1.95 once in 1000."""
    ordered, count = np.sort(numbers), len(numbers)
    steps = np.arange(count)
    return max((ordered - steps / count).max(), ((steps + 1) / count - ordered).max()) * math.sqrt(count)


def test_noise_is_gumbels_and_depends_on_key_and_id_alone() -> None:
    """exp(-exp(-noise)) is uniform: over the ids of a token, and for one id over tokens and over seeds."""
    keys = [Noise.of(1.0, b"a", i).key or 0 for i in range(20000)]
    seeds = [Noise.of(1.0, i.to_bytes(16, "little"), 0).key or 0 for i in range(20000)]
    assert len({*keys, *seeds}) == 40000
    ids = np.arange(20000)
    for kind in (
        [gumbel(keys[0], ids), gumbel(2**64 - 1, ids), gumbel(0, ids), gumbel(5, ids + 130000)],
        [np.concatenate([gumbel(key, np.array([id])) for key in each]) for each in (keys, seeds) for id in (0, 151935)],
    ):
        for values in kind:
            uniform = np.exp(-np.exp(-values))
            assert kolmogorov_smirnov(uniform.tolist()) < 1.95
            assert kolmogorov_smirnov((uniform**1.05).tolist()) > 1.95, "the test finds a small bias"
            assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.03
    grid = np.stack([gumbel(key, ids[:300]) for key in keys[:2000]])
    assert abs(np.corrcoef(grid.T) - np.eye(300)).max() < 0.12, "ids are independent of each other"
    assert (gumbel(keys[7], ids[5:9]) == gumbel(keys[7], ids)[5:9]).all()
    assert Noise.of(0.5, b"a", 3) == Noise.of(0.5, b"a", 3) != Noise.of(0.5, b"b", 3)
    assert Noise.of(0.0, b"a", 3) == NO_NOISE


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_ends_of_the_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_noise, "mix_bits", lambda x: np.full_like(x, bits))
    assert np.isfinite(gumbel(1, np.arange(3))).all()
