"""The command line of tests that draw everything from a seed: many seeds, and one again."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar


class Checked(Protocol):
    """What a seed came to: `steps` of engines."""

    @property
    def steps(self) -> int: ...


Outcome = TypeVar("Outcome", bound=Checked)


def outcomes(module: str, about: str | None, check: Callable[[int], Outcome]) -> Iterator[Outcome]:
    """The outcomes of as many seeds as the command line asks for. A failure prints how to see it again."""
    parser = ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--steps", type=int, default=1_000_000, help="run until so many steps of engines")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="at most so many seeds")
    options = parser.parse_args()
    steps, seed = 0, options.first
    while steps < options.steps and seed < options.first + options.seeds:
        try:
            outcome = check(seed)
        except BaseException:
            print(f"seed {seed} fails: python -m {module} --first {seed} --seeds 1", flush=True)
            raise
        yield outcome
        steps, seed = steps + outcome.steps, seed + 1
