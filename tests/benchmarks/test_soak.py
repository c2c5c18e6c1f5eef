"""The soak test's verdict can fail: every kind of leak is found."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak.memory import MIB, Budgets, Sample, Watch, taken
from benchmarks.soak.requests import KINDS, documented
from benchmarks.soak.storm import log_errors
from benchmarks.soak.verdict import GROWTH_LIMIT, flat, leaks
from benchmarks.soak.vitals import Vitals, hosted_bytes, slope

IDLE = Vitals(used=0, cached=0, free=64, running=0, waiting=0, arriving=0, in_flight=0, tasks=3, threads=6, files=7)


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


def test_threads_of_tiers_may_still_begin() -> None:
    spare = Budgets(MIB, remote="redis://localhost").spare
    assert Budgets(MIB, host_bytes=MIB).spare == 0
    assert all(check.holds for check in leaks(IDLE, replace(IDLE, threads=6 + spare, files=7 + spare), spare))
    assert not all(check.holds for check in leaks(IDLE, replace(IDLE, threads=7 + spare), spare))


@pytest.mark.parametrize(
    ("rss", "peak", "disk", "holds"),
    [
        (568, 568, 200, [True, True]),  # 1.02 x 500, 10 for a step and 48 for calls
        (569, 569, 200, [False, True]),
        (400, 569, 200, [False, True]),  # between two samples
        (400, 400, 201, [True, False]),
    ],
)
def test_memory_above_a_budget_is_found(rss: int, peak: int, disk: int, holds: list[bool]) -> None:
    budgets = Budgets(100 * MIB, 100 * MIB, Path("/kv"), 200 * MIB)
    samples = [Sample(1, rss * MIB, disk * MIB), Sample(2, 300 * MIB, 0)]
    watch = Watch(1, budgets, started=300 * MIB, step_bytes=10 * MIB, peak=peak * MIB, samples=samples)
    assert [check.holds for check in watch.checks()] == holds


def test_a_directory_takes_what_du_says(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"x")
    before = taken(tmp_path)
    (tmp_path / "page").write_bytes(bytes(3 * MIB))
    assert taken(tmp_path) - before >= 3 * MIB


def test_what_the_host_holds() -> None:
    line = 'twostroke_tier_used_bytes{tier="%s"} %s\n'
    assert hosted_bytes(line % ("disk", "5.0") + line % ("host", "6.709248e+07")) == 67092480
    assert hosted_bytes(line % ("disk", "5.0")) == 0


def test_the_server_is_started_with_the_budgets() -> None:
    assert Budgets(5).options == ["--kv-bytes", "5"]
    everything = Budgets(5, 6, Path("/kv"), 7, "redis://localhost").options
    tiers = ["--kv-host", "6", "--kv-disk", "/kv", "--kv-disk-bytes", "7", "--kv-remote", "redis://localhost"]
    assert everything == ["--kv-bytes", "5", *tiers]


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
