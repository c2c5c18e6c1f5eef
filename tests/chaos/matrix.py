"""Which fault has hit which kind of request, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.chaos.kinds import KINDS, SHAPED, TAUGHT

FAULTS = (
    "prefill dies before the transfer",
    "prefill dies during the transfer",
    "prefill dies after the transfer",
    "decode dies",  # when its client has got tokens
    "what the receiver says is lost",
    "the lease is outlived",
    "the network stalls",  # while the value moves
    "the client leaves",
    "the front end restarts",
)
ALL = (*KINDS, SHAPED, *TAUGHT)

Matrix = Counter[tuple[str, str]]  # by fault and kind


def missing(matrix: Matrix) -> list[tuple[str, str]]:
    """The cells that were not hit."""
    return [(fault, kind) for fault in FAULTS for kind in ALL if not matrix[fault, kind]]


def table(matrix: Matrix) -> str:
    """The counts as text, a row for each fault."""
    rows: list[Sequence[object]] = [("", *ALL), *((fault, *(matrix[fault, kind] for kind in ALL)) for fault in FAULTS)]
    first = max(len(str(row[0])) for row in rows)
    return "\n".join(f"{row[0]!s:{first}}" + "".join(f"{cell!s:>11}" for cell in row[1:]) for row in rows)
