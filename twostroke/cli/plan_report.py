"""How the report of a plan looks in a terminal."""

import re
from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.study.plan.report_blocks import Block, Grid, Line, Plots, Section, Verdict

WIDTH = 100  # columns of a command's lines
STYLES = {
    "title": "bold", "strong": "bold", "code": "bold", "faint": "dim", "good": "green", "warn": "yellow", "bad": "red",
}  # fmt: skip


def print_blocks(blocks: Iterable[Block]) -> None:
    """Print a report. Plots and sources are for pages."""
    console = Console(highlight=False)
    for block in blocks:
        match block:
            case Section(title):
                console.print(f"\n{title}" if title else "", style="bold", markup=False)
            case Verdict(text, kind):
                console.print(f"verdict: {text}", style=f"bold {STYLES[kind]}", markup=False, soft_wrap=True)
            case Line(text, "code", indent):
                console.print(_folded(text, indent), style=STYLES["code"], markup=False, soft_wrap=True)
            case Line(text, style, indent) if style != "source":
                mark = "  - " if style == "item" else " " * indent
                console.print(mark + text, style=STYLES.get(style), markup=False, soft_wrap=True)
            case Grid():
                console.print(Padding(_table(block), (0, 0, 0, 2)))
            case Line() | Plots():
                pass


def _folded(command: str, indent: int) -> str:
    """A command over several lines that a shell reads as one, broken before options; whole if a word is quoted."""
    lines = [" " * indent]
    for part in re.split(r"(?= --)", command) if "'" not in command else [command]:
        if len(lines[-1] + part) > WIDTH - 2 and lines[-1].strip():
            lines[-1] += " \\"
            lines.append(" " * (indent + 3))
        lines[-1] += part
    return "\n".join(lines)


def _table(grid: Grid) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(grid.columns):
        left = name in grid.left
        # Numbers stay whole, and heads are folded between words where a terminal is narrow.
        widest = 0 if left else max((len(row[i].text) for row in grid.rows), default=0)
        words = max((len(word) for word in name.split()), default=0)
        table.add_column(name, justify="left" if left else "right", min_width=max(widest, words), overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(cell.text, STYLES.get(cell.style, "")).append(cell.faint, "dim") for cell in row))
    return table
