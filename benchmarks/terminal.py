"""What programs of benchmarks/ share at the terminal: options, progress, Markdown tables, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from twostroke.errors import InvalidRequest
from twostroke.system.extras import requires_extra


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a module's docstring, as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def numbers(text: str) -> list[int]:
    """Parse `64,128`."""
    return [int(part) for part in text.split(",") if part]


def say(text: object) -> None:
    """Tell progress on stderr, apart from the tables."""
    print(text, file=sys.stderr, flush=True)


def row(cells: Iterable[object]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(columns: Sequence[str], words: int = 1) -> str:
    """The first two lines of a table: the first `words` columns have words, the others numbers."""
    return f"{row(columns)}\n{row(['---'] * words + ['--:'] * (len(columns) - words))}"


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]], words: int = 1) -> str:
    """A Markdown table."""
    return "\n".join([head(columns, words), *map(row, rows)])


@contextmanager
def ended_by(*kinds: type[Exception]) -> Generator[None]:
    """Ends the program with one line where such an error is raised."""
    try:
        yield
    except kinds as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def needs(extra: str) -> Generator[None]:
    """Around imports of an extra's packages, before anything is measured: ends the program if one is missing."""
    with ended_by(InvalidRequest), requires_extra(extra, "this benchmark"):
        yield
