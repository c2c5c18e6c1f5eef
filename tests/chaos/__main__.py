"""Many seeds: `python -m tests.chaos --steps 1000000`. A failure names its seed, and `--first SEED` replays it."""

import logging
import sys
import time
from argparse import ArgumentParser
from collections import Counter

from tests.chaos.run import check


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="run until so many steps of engines")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="at most so many seeds")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    steps, events, seed, happened, began = 0, 0, options.first, Counter[str](), time.process_time()
    while steps < options.steps and seed < options.first + options.seeds:
        try:
            outcome = check(seed)
        except BaseException:
            print(f"seed {seed} fails: python -m tests.chaos --first {seed} --seeds 1", flush=True)
            raise
        steps, events, seed = steps + outcome.steps, events + outcome.events, seed + 1
        happened += outcome.happened
    seconds = time.process_time() - began
    done = f"{seed - options.first} seeds, {steps:,} steps of engines, {events:,} events"
    print(f"{done} in {seconds:.0f} s of this process: {steps / seconds:,.0f} steps a second")
    print(*(f"{count:8,} {name}" for name, count in sorted(happened.items())), sep="\n")


if __name__ == "__main__":
    main()
