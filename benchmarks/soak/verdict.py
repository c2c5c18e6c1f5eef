"""The checks after the storm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.soak.vitals import Vitals, slope

GROWTH_LIMIT = 1 << 20  # bytes per minute over the second half of the storm
STEP = 8 << 20  # bytes of growth allowed for caches and the allocator, which look like a leak in a short storm


@dataclass(frozen=True)
class Check:
    """One condition, and the value found."""

    name: str
    holds: bool
    found: str


def leaks(before: Vitals, after: Vitals, spare: int = 0) -> list[Check]:
    """Checks of vitals `before` and `after` the storm, both idle and after a reset of the prefix index.

    `spare`: threads and open files that may come besides, as bounded pools start them when they are needed.
    """
    return [
        Check(
            "pages used = 0, and none lost",
            (after.used, after.cached, after.free) == (0, 0, before.free),
            f"{after.used} used, {after.cached} cached, {after.free} of {before.free} free",
        ),
        Check(
            "no request runs or waits",
            after.running == after.waiting == after.arriving == after.in_flight == 0,
            f"{after.running} running, {after.waiting} waiting, {after.arriving} arriving, {after.in_flight} in flight",
        ),
        Check("no task was left", after.tasks <= before.tasks, f"{after.tasks}, before {before.tasks}"),
        Check(
            "no thread was left", after.threads <= before.threads + spare, f"{after.threads}, before {before.threads}"
        ),
        Check("no open file was left", after.files <= before.files + spare, f"{after.files}, before {before.files}"),
    ]


def flat(samples: Sequence[tuple[float, int]]) -> Check:
    """Growth of RSS, sampled as (seconds, bytes), over the second half of the storm.

    It uses the minimum of each twentieth, as running requests briefly hold megabytes.
    """
    width = max(1, len(samples) // 20)
    least = [min(samples[at : at + width], key=lambda one: one[1]) for at in range(0, len(samples), width)]
    seconds = samples[-1][0] - samples[len(samples) // 2][0]
    growth, limit = slope(least) * seconds, max(STEP, GROWTH_LIMIT * seconds / 60)
    course = " ".join(f"{held / 2**20:.0f}" for _, held in least)
    found = f"{growth / 2**20:+.2f} MiB in {seconds:.0f} s (limit {limit / 2**20:.1f}); MiB from the start: {course}"
    return Check("RSS is flat", growth < limit, found)


def quiet(name: str, count: int, examples: Sequence[str]) -> Check:
    """A check that something never happened."""
    return Check(name, count == 0, "\n      ".join([str(count), *examples]))
