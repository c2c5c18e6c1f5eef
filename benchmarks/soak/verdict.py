"""What must hold once everybody has gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.vitals import Vitals

GROWTH_LIMIT = 1 << 20  # bytes a minute, over the second half of the storm


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and what was found."""

    name: str
    holds: bool
    found: str


def leaks(before: Vitals, after: Vitals) -> list[Check]:
    """`before` the storm and `after` it; both idle, with a prefix index that was reset."""
    return [
        Check(
            "pages used = 0, and none lost",
            (after.used, after.cached, after.free) == (0, 0, before.free),
            f"{after.used} used, {after.cached} cached, {after.free} of {before.free} free",
        ),
        Check(
            "no request runs or waits",
            after.running == after.waiting == after.in_flight == 0,
            f"{after.running} running, {after.waiting} waiting, {after.in_flight} in flight",
        ),
        Check("no task was left", after.tasks <= before.tasks, f"{after.tasks}, before {before.tasks}"),
        Check("no thread was left", after.threads <= before.threads, f"{after.threads}, before {before.threads}"),
        Check("no open file was left", after.files <= before.files, f"{after.files}, before {before.files}"),
    ]


def flat(bytes_per_second: float, first: int, last: int) -> Check:
    """RSS over the second half of the storm."""
    growth = bytes_per_second * 60
    limit = f"limit {GROWTH_LIMIT >> 20} MiB a minute"
    return Check(
        "RSS is flat",
        growth < GROWTH_LIMIT,
        f"{growth / 2**20:+.2f} MiB a minute ({limit}); {first >> 20} MiB, then {last >> 20}",
    )


def quiet(name: str, count: int, examples: Sequence[str]) -> Check:
    """Something that was not to happen at all."""
    return Check(name, count == 0, "\n      ".join([str(count), *examples]))
