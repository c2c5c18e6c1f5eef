"""Dropout masks: their dependencies, and their rate."""

import numpy as np
import pytest

from twostroke.errors import InvalidRequest
from twostroke.models.dropout import Dropout


def test_a_mask_depends_on_its_seed_and_place_alone() -> None:
    drop, positions = Dropout(0.3, 7), np.arange(100, 140)
    whole = drop.factors(positions, 5, 64)
    assert whole.shape == (5, 40, 64)
    assert whole.dtype == np.float32
    assert (drop.factors(positions[[3, 1]], 5, 64) == whole[:, [3, 1]]).all()
    assert (drop.factors(positions, 2, 32) == whole[:2, :, :32]).all()
    assert (Dropout(0.3, 8).factors(positions, 5, 64) != whole).any(2).all(), "another seed"
    rows = whole.reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows), "another block or position"


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_what_stays_is_scaled(probability: float) -> None:
    factors = Dropout(probability, 1).factors(np.arange(200), 10, 128)
    assert set(np.unique(factors)) <= {np.float32(0), np.float32(1 / (1 - probability))}
    assert (factors == 0).mean() == pytest.approx(probability, abs=0.005)
    assert factors.mean() == pytest.approx(1, abs=0.02)


def test_bad_input() -> None:
    with pytest.raises(InvalidRequest, match="dropout: probability must be a number of at least 0 and below 1, not 1"):
        Dropout(1)
    with pytest.raises(InvalidRequest, match="dropout: seed must be an integer of at least 0, not -1"):
        Dropout(0.1, -1)
