"""Words and tables of a terminal: texts of tokens, amounts, times."""

from rich.console import Console
from rich.table import Table
from rich.text import Text


def quoted(text: str) -> str:
    """A text as a Python literal, so that control characters are escaped."""
    return repr(text)


def amount(count: float, unit: str) -> str:
    """A count with a prefix of 1,000s: 2.82 GFLOP, 96.7 MB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}"


def plural(count: int, name: str) -> str:
    """1 page, 2 pages."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def ms(seconds: float | None) -> str:
    """Milliseconds; a dash where nothing was timed."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def print_paragraph(console: Console, text: str, style: str = "") -> None:
    """One paragraph; nothing in it is markup."""
    console.print(Text(text, style=style))


def table_of(*columns: str) -> Table:
    """A table without lines. Columns whose names begin with > are numbers."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table
