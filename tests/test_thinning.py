"""Thinned products keep every value, or every pair of values."""

from itertools import combinations, product

import pytest

from tests.thinning import Values, cover

CASES: list[Values] = [frozenset({("a", a), ("b", b), ("c", c)}) for a, b, c in product(range(5), range(3), range(2))]


@pytest.mark.parametrize(("strength", "least", "most"), [(1, 5, 5), (2, 15, 17), (3, 30, 30)])
def test_each_combination_is_kept(strength: int, least: int, most: int) -> None:
    def shown(cases: list[Values]) -> set[Values]:
        return {frozenset(some) for case in cases for some in combinations(case, strength)}

    kept = list(cover(CASES, strength))
    assert shown([CASES[i] for i in kept]) == shown(CASES)
    assert least <= len(kept) <= most
    assert len(set(kept)) == len(kept)


def test_values_take_turns() -> None:
    """Of the values that are all kept, none is in most cases."""
    kept = [dict(CASES[i]) for i in cover(CASES)]
    assert sorted(sum(case["c"] == c for case in kept) for c in range(2)) == [2, 3]
