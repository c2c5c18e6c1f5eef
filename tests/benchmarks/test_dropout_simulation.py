"""The parts of benchmarks/dropout_simulation.py."""

import numpy as np
import pytest

from benchmarks.dropout_simulation import PUBLISHED, Setting, auc, entropy, firings, phases, simulate


def test_phases_are_as_long_as_published() -> None:
    names, counts = np.unique(phases(), return_counts=True)
    assert dict(zip(names.tolist(), counts.tolist(), strict=True)) == {
        "alea": 100,
        "conf": 150,
        "drift": 100,
        "post": 50,
    }


def test_means_are_those_published() -> None:
    names = np.array(["alea", "conf", "drift", "post"] * 3)
    signals = simulate(Setting(), names, np.random.default_rng(1))
    for phase, (expected_entropy, expected_variance, _, _) in PUBLISHED.items():
        assert signals["entropy"][names == phase].mean() == pytest.approx(expected_entropy, rel=0.01)
        assert signals["variance"][names == phase].mean() == pytest.approx(expected_variance, abs=6e-5)


def test_a_trigger_is_asked_now_and_then_and_cools_down() -> None:
    signal = np.zeros(100)
    signal[17:90] = 1
    assert firings(signal, 0.5, look=16, cooldown=32) == [32, 64]
    assert firings(signal, 0.5, look=16, cooldown=0) == [32, 48, 64, 80]
    assert firings(signal, 1.0, look=16, cooldown=0) == []


def test_entropy_and_area() -> None:
    assert entropy(np.zeros(5000)) == pytest.approx(np.log(5000))
    assert auc(np.array([2, 3]), np.array([0, 1])) == 1
    assert auc(np.array([0, 1]), np.array([0, 1])) == 0.5
    assert auc(np.array([0]), np.array([0, 1])) == 0.25
