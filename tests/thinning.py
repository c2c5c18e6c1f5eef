"""Of a product of parameters, the cases that run each time; the others run at night (`make test-nightly`)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby
from typing import Any

import pytest
from hypothesis import settings

Values = frozenset[tuple[str, object]]


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark as `nightly` the cases that show nothing new of a test which is marked `thinned`.

    `thinned` keeps each value of each parameter in some case, and `thinned(2)` each pair of values of two parameters.
    A parameter that is a tuple counts as its parts. The selection is of the cases that were asked for, so a case that
    is named alone runs.
    """
    for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        group = list(cases)
        mark = group[0].get_closest_marker("thinned")
        if mark is not None and len(group) > 1:
            kept = set(cover([_values(case) for case in group], *mark.args))
            for i in set(range(len(group))) - kept:
                group[i].add_marker(pytest.mark.nightly)


def cover(cases: Sequence[Values], strength: int = 1) -> Iterator[int]:
    """Indices of cases that have each combination of `strength` values, values that were used little first."""
    shown = [{frozenset(some) for some in combinations(case, strength)} for case in cases]
    missing, used = set[Any]().union(*shown), Counter[Any]()
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(shown[i] & missing), -sum(used[one] for one in cases[i])))
        missing -= shown[best]
        used.update(cases[best])
        yield best


def examples(count: int) -> int:
    """How many examples of a property: `count` each time, ten times as many at night, half in software."""
    return max(1, count * settings().max_examples // settings.get_profile("quiet").max_examples)


def _values(case: Any) -> Values:
    """The values of a case's parameters, which are the same objects in other cases."""
    found: list[tuple[str, object]] = []
    for name, value in case.callspec.params.items():
        parts = value if isinstance(value, tuple) else (value,)
        found += [(f"{name}.{i}", part if isinstance(part, int | str) else id(part)) for i, part in enumerate(parts)]
    return frozenset(found)
