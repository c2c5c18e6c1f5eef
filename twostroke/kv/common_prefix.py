"""The common prefix of two sequences: for as many tokens, one can use the KV entries of the other."""

from collections.abc import Iterable


def common_prefix_length(one: Iterable[object], other: Iterable[object]) -> int:
    """Count the leading items in which two sequences agree."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
