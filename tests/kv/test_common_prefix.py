"""How much two sequences have in common."""

import numpy as np
import pytest

from twostroke.kv.common_prefix import common_prefix_length


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [1], 0),
        ([1, 2], [2, 1], 0),
        ([1, 2, 3], [1, 2, 4, 5], 2),
        ([1, 2, 9, 4], [1, 2, 3, 4], 2),
        ([1, 2], [1, 2, 3], 2),
        (np.array([0, 1, 2, 5]), range(6), 3),
        ([b"ab", b"c"], [b"ab", b"d"], 1),
    ],
)
def test_first_items(one: list[object], other: list[object], expected: int) -> None:
    assert common_prefix_length(one, other) == common_prefix_length(other, one) == expected
