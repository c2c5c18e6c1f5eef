"""The soak test's verdict can fail: every kind of leak is found."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.requests import KINDS, documented
from benchmarks.soak.storm import log_errors
from benchmarks.soak.verdict import GROWTH_LIMIT, flat, leaks
from benchmarks.soak.vitals import Vitals, slope

IDLE = Vitals(used=0, cached=0, free=64, running=0, waiting=0, in_flight=0, tasks=3, threads=6, files=7)


def failed(after: Vitals) -> list[str]:
    return [check.name for check in leaks(IDLE, after) if not check.holds]


@pytest.mark.parametrize(
    ("left", "name"),
    [
        ({"used": 1}, "pages used = 0, and none lost"),
        ({"free": 63}, "pages used = 0, and none lost"),
        ({"running": 1}, "no request runs or waits"),
        ({"in_flight": 1}, "no request runs or waits"),
        ({"tasks": 4}, "no task was left"),
        ({"threads": 7}, "no thread was left"),
        ({"files": 8}, "no open file was left"),
    ],
)
def test_what_is_left_is_found(left: dict[str, int], name: str) -> None:
    assert failed(IDLE) == []
    assert failed(replace(IDLE, **left)) == [name]


def test_growth_is_of_the_second_half() -> None:
    """It takes the second half of half an hour. Brief peaks are not growth, and a minute is too short to tell."""
    warming = [(float(at), min(at, 900) * 1_000_000) for at in range(1800)]
    growing = [(at, held + int(at * 2 * GROWTH_LIMIT / 60)) for at, held in warming]
    assert slope(warming) == pytest.approx(0, abs=1)
    assert slope(growing) == pytest.approx(2 * GROWTH_LIMIT / 60, rel=1e-3)
    assert flat(warming).holds
    assert not flat(growing).holds
    assert flat([(at, held + (at % 7 > 0) * int(at) * 1_000_000) for at, held in warming]).holds
    assert flat(growing[-120:]).holds


def test_a_mistake_in_the_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("10:00:00 INFO request id=req_ERROR path=/v1/completions status=500\n")
    assert log_errors(log) == []
    log.write_text("10:00:00 INFO fine\n10:00:01 ERROR a handler failed\nTraceback (most recent call last):\n")
    assert len(log_errors(log)) == 2


def test_only_deadlines_are_server_errors_that_may_come() -> None:
    assert documented(400, b"")
    assert documented(504, b'{"error":{"message":"...","code":"timeout"}}')
    assert not documented(504, b"")
    assert not documented(500, b'"code":"timeout"')


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_requests_are_seeded(kind: Callable[[random.Random], object]) -> None:
    assert kind(random.Random(1)) == kind(random.Random(1))
