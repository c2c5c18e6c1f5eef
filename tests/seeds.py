"""The command line of tests that draw everything from a seed: many seeds on all cores, and one again."""

import multiprocessing
import sys
from argparse import ArgumentParser
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Protocol, TypeVar

from twostroke.system.limits import usable_cores


class Checked(Protocol):
    """What a seed came to: `steps` of engines."""

    @property
    def steps(self) -> int: ...


Outcome = TypeVar("Outcome", bound=Checked)


def outcomes(module: str, about: str | None, check: Callable[[int], Outcome]) -> Iterator[Outcome]:
    """The outcomes of as many seeds as the command line asks for, in order. A failure prints how to see it again.

    `check` is the function of a module, since other processes call it too.
    """
    parser = ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--steps", type=int, default=1_000_000, help="run until so many steps of engines")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="at most so many seeds")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, one for each core unless stated")
    options = parser.parse_args()
    steps, seed, stop = 0, options.first, options.first + options.seeds
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as processes:
        running = deque[tuple[int, Future[Outcome]]]()
        while steps < options.steps:
            while len(running) < 2 * options.jobs and seed < stop:
                running.append((seed, processes.submit(check, seed)))
                seed += 1
            if not running:
                break
            oldest, future = running.popleft()
            try:
                outcome = future.result()
            except BaseException:
                print(f"seed {oldest} fails: python -m {module} --first {oldest} --seeds 1", flush=True)
                processes.shutdown(wait=False, cancel_futures=True)
                raise
            steps += outcome.steps
            yield outcome
        processes.shutdown(cancel_futures=True)
