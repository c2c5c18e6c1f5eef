"""How a plan's load looks in a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.study.plan.load_words import advice, bindings, figure, lines, offered

COLOURS = {"nothing to do": "green", "misses the objective": "yellow", "cannot be served": "red"}


def print_load(load: dict[str, Any]) -> None:
    """The answer, percentiles, what limits it, and where else KV or strokes could be."""
    console = Console(highlight=False)
    console.print("\nUnder the load", style="bold")
    console.print(f"  {offered(load)}", style="dim", markup=False, soft_wrap=True)
    if served := load["served"]:
        console.print(_percentiles(served, load["percentile"]))
    for text in [*bindings(load), *lines(load)]:
        console.print(f"  - {text}", markup=False, soft_wrap=True)
    missed = f" ({', '.join(load['missed'])})" if load["missed"] else ""
    console.print(f"  load: {load['verdict']}{missed}", style=f"bold {COLOURS[load['verdict']]}", markup=False)
    if load["verdict"] != "nothing to do":
        console.print(_levers(load))
        for text in advice(load):
            console.print(f"  {text}", markup=False, soft_wrap=True)
    for title, command in load.get("commands", {}).items():
        console.print(f"  {title}:", markup=False)
        console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)


def _percentiles(served: dict[str, Any], percent: float) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 2))
    shown = [(name, name) for name in ("mean", "p50", "p90", "p99")]
    if percent not in (50, 90, 99):
        shown.append(("wanted", f"p{percent:g}"))
    table.add_column("ms")
    for _, title in shown:
        table.add_column(title, justify="right")
    for name, one in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        table.add_row(name, *(f"{served[one][key]:,.1f}" for key, _ in shown))
    return table


def _levers(load: dict[str, Any]) -> Table:
    """A change a row: its figures, and what it leads to."""
    kind = figure(load)
    table = Table(title="each change alone, under the load", box=None, header_style="bold", title_justify="left")
    table.add_column("change")
    for name in (f"TTFT {kind}", "of it waiting", f"ITL {kind}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    short = {"nothing to do": "enough", "misses the objective": "misses", "cannot be served": "not served"}
    for one in load["levers"]:
        figures = ["-" if one[name] is None else f"{one[name]:,.1f}" for name in ("ttft_ms", "waiting_ms", "itl_ms")]
        answer = Text(short[one["verdict"]], COLOURS[one["verdict"]], no_wrap=True)
        table.add_row(Text(one["lever"]).append(f" ({one['needs']})", "dim"), *figures, answer)
    return table
