"""Many seeds: `python -m tests.chaos --steps 1000000`. A failure names its seed, and `--first SEED` replays it."""

import logging
import os
import time
from collections import Counter

from tests.chaos.matrix import Matrix, table
from tests.chaos.run import check
from tests.seeds import outcomes


def main() -> None:
    logging.disable(logging.CRITICAL)
    seeds, steps, events, happened, matrix, began = 0, 0, 0, Counter[str](), Matrix(), time.perf_counter()
    for outcome in outcomes("tests.chaos", __doc__, check):
        seeds, steps, events = seeds + 1, steps + outcome.steps, events + outcome.events
        happened += outcome.happened
        matrix += outcome.matrix
    seconds, used = time.perf_counter() - began, sum(os.times()[:4])
    print(f"{seeds} seeds, {steps:,} steps of engines, {events:,} events in {seconds:.0f} s")
    print(f"{steps / seconds:,.0f} steps a second, {steps / used:,.0f} a second of processor time")
    print(*(f"{count:8,} {name}" for name, count in sorted(happened.items())), sep="\n")
    print(f"\nRequests that were hit, by kind:\n{table(matrix)}")


if __name__ == "__main__":
    main()
