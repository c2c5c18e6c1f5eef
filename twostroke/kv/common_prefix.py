"""What two sequences begin with alike: only for as many tokens can one use the entries of the other."""

from collections.abc import Iterable


def common_prefix_length(one: Iterable[object], other: Iterable[object]) -> int:
    """How many first items are the same."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
