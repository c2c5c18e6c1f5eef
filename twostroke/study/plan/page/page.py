"""The page of a plan: its report with plots, one file that loads nothing."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from twostroke.study.charts import STYLE
from twostroke.study.plan.page.plots import Plot, load_plots, plots
from twostroke.study.plan.report import report
from twostroke.study.plan.report_blocks import Block, Cell, Grid, Line, Plots, Section, Verdict
from twostroke.study.plan.search import Advice
from twostroke.study.plan.service import LoadSimulator


def render(advice: Advice, facts: Mapping[str, Any], load: LoadSimulator | None = None) -> str:
    """The page's text. `load` is that of the facts, None where there is none."""
    here = files("twostroke.study.plan.page")
    head, *blocks = report(dict(facts))
    assert isinstance(head, Line)
    tables = len(list(report(dict(facts), details=False))) - 1  # behind the first screen
    made = list(plots(advice.asked.plan, None if advice.best is advice.asked else advice.best.plan))
    made = made if load is None else [*load_plots(advice, load), *made]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_e(head.text)}</title><style>{here.joinpath('page.css').read_text()}{STYLE}</style></head><body>"
        f"<header><h1>{_e(head.text)}</h1><button id=theme>light / dark</button></header>"
        f"{''.join(_body(blocks[:tables], made))}"
        f"<details><summary>All tables</summary>{''.join(_body(blocks[tables:], made))}</details>"
        f"<script>{here.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _body(blocks: Iterable[Block], made: Iterable[Plot]) -> Iterator[str]:
    for is_item, some in groupby(blocks, lambda one: isinstance(one, Line) and one.style == "item"):
        parts = "".join(_block(block, made) for block in some)
        yield f"<ul>{parts}</ul>" if is_item else parts


def _block(block: Block, made: Iterable[Plot]) -> str:
    match block:
        case Section(title):
            return f"<h2>{_e(title)}</h2>" if title else ""
        case Verdict(text, kind):
            return f"<p class='verdict {kind}'>{_e(text[0].upper() + text[1:])}</p>"
        case Line(text, "item"):
            return f"<li>{_e(text)}</li>"
        case Line(text, "code"):
            return f"<div class=code><pre>{_e(text)}</pre><button class=copy>copy</button></div>"
        case Line(text, style):
            return f"<p class='line {style}'>{_e(text)}</p>"
        case Grid(columns, rows, tiles=True):
            return f"<div class=tiles>{''.join(_tile(columns, row) for row in rows)}</div>"
        case Grid(columns, rows):
            body = "".join(_row("td", row, block) for row in rows)
            return f"<div class=table><table>{_row('th', map(Cell, columns), block)}{body}</table></div>"
        case Plots():
            figures = (
                f"<figure><h3>{_e(title)}</h3>{svg}<figcaption>{_e(caption)}</figcaption></figure>"
                for title, svg, caption in made
            )
            return f"<div class=plots>{''.join(figures)}</div>"


def _row(tag: str, cells: Iterable[Cell], grid: Grid) -> str:
    shown = (
        f"<{tag} class='{cell.style} {'words' if name in grid.left else ''}'>{_e(cell.text)}"
        f"<span>{_e(cell.faint)}</span></{tag}>"
        for name, cell in zip(grid.columns, cells, strict=True)
    )
    return f"<tr>{''.join(shown)}</tr>"


def _tile(columns: Sequence[str], row: Sequence[Cell]) -> str:
    (name, value, *notes), answer = row[:-1], row[-1]
    texts = [f"{column} {note.text}" for column, note in zip(columns[2:], notes, strict=False) if note.text]
    return (
        f"<div class='tile {answer.style}'><h3>{_e(name.text)}</h3><p class=value>{_e(value.text)}</p>"
        f"<p>{_e('; '.join([*texts, answer.text] if answer.text else texts))}</p></div>"
    )


def _e(text: str) -> str:
    return html.escape(text)
