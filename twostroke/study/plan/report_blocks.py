"""What the report of a plan is made of, whoever shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KINDS = {"nothing to do": "good", "misses the objective": "warn", "does not fit": "bad", "cannot be served": "bad"}
SHORT = {"nothing to do": "enough", "misses the objective": "misses", "does not fit": "no room"}


@dataclass(frozen=True)
class Section:
    """What follows belongs together."""

    title: str


@dataclass(frozen=True)
class Line:
    """A line of text."""

    text: str
    # "title", "strong", "faint", "item" of a list, "code", "source" (for pages alone), or "good", "warn" or "bad" for
    # an answer; empty for plain text
    style: str = ""
    indent: int = 0  # spaces before it in a terminal


@dataclass(frozen=True)
class Verdict:
    """The answer. `kind` is "good", "warn" or "bad"."""

    text: str
    kind: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text with a style, and more text that matters less."""

    text: str
    style: str = ""
    faint: str = ""


@dataclass(frozen=True)
class Grid:
    """A table. Columns whose names are in `left` have words, the others have numbers.

    `tiles`: whether a page shows each row as a tile: a name, a figure, notes on it, and the answer.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: Sequence[str] = ("", "change", "how")
    tiles: bool = False


@dataclass(frozen=True)
class Plots:
    """Where a page shows its plots."""


Block = Section | Line | Verdict | Grid | Plots


def record_grid(rows: Sequence[dict[str, Any]]) -> Grid:
    """A row for each record, a column for each of its fields."""
    return Grid([title(name) for name in rows[0]], [[Cell(shown(value)) for value in row.values()] for row in rows])


def title(name: str) -> str:
    """A field's name as the head of a column."""
    words = {"ttft": "TTFT", "itl": "ITL", "gb": "GB", "percent": "%", "per": "/", "second": "s"}
    return " ".join(words.get(word, word) for word in name.split("_")).replace(" / ", "/")


def shown(value: Any) -> str:
    """A field's value as text."""
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def gigabytes(count: float) -> str:
    """Of bytes, as GB or MB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
