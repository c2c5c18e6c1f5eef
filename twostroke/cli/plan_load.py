"""How a plan's load looks in a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

COLOURS = {"nothing to do": "green", "misses the objective": "yellow", "cannot be served": "red"}


def print_load(load: dict[str, Any]) -> None:
    """The answer, percentiles, what limits it, and where else KV or strokes could be."""
    console = Console(highlight=False)
    console.print("\nUnder the load", style="bold")
    console.print(f"  {_offered(load)}", style="dim", markup=False, soft_wrap=True)
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


def _offered(load: dict[str, Any]) -> str:
    lengths, rate = load["lengths"], load["requests_per_second"]
    arrivals = f"{load['users']:,} users, each asking again at once" if rate is None else f"{rate:,.3g} requests/s"
    return (
        f"{arrivals}; prompts of {lengths['prompt_mean']:,.0f} tokens on average (p99 {lengths['prompt_p99']:,.0f}), "
        f"{lengths['shared_part']:.0%} of them known; answers of {lengths['output_mean']:,.0f} "
        f"(p99 {lengths['output_p99']:,.0f})"
    )


def _percentiles(served: dict[str, Any], percent: float) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 2))
    shown = [(name, name) for name in ("mean", "p50", "p90", "p99")]
    if percent not in (50, 90, 99):
        shown.append(("wanted", f"p{percent:g}"))
    table.add_column("ms")
    for _, title in shown:
        table.add_column(title, justify="right")
    for name, figure in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        table.add_row(name, *(f"{served[figure][key]:,.1f}" for key, _ in shown))
    return table


def lines(load: dict[str, Any]) -> list[str]:
    """Plain sentences."""
    most, within, apart = load["most_requests_per_second"], load["most_within_objectives"], load["apart"]
    found: list[str] = []
    if load["verdict"] == "cannot be served":
        found.append(f"this rate cannot be served: at most {most:,.3g} requests/s")
    if served := load["served"]:
        used = served["utilization"]
        strokes = "; ".join(
            f"{name} {one['time']:.0%} of the time, with {one['compute']:.0%} of the peak rate and "
            f"{one['bandwidth']:.0%} of the bandwidth"
            for name, one in used.items()
        )
        found.append(strokes)
        found.append(
            f"{served['sequences']:,.1f} sequences decode at once on average; "
            f"a prompt waits {served['waiting_ms']:,.1f} ms"
        )
    if closed := load["closed"]:
        found.append(
            f"{closed['rate']:,.3g} requests/s; TTFT {1e3 * closed['ttft_s']:,.1f} ms, ITL "
            f"{1e3 * closed['itl_s']:,.1f} ms on average; {closed['sequences']:,.1f} sequences decode at once"
        )
    limit = "" if within is None else f", {within:,.3g} within the objectives"
    found.append(f"highest rate: {most:,.3g} requests/s{limit}")
    if (workers := load["workers_needed"]) is not None and workers > 1:
        found.append(f"for this rate: {workers:,} workers like this one")
    if apart["prefill_workers_per_decode_worker"] is not None:
        found.append(_apart(apart))
    for one in load["tiers"]:
        answer = "pays" if one["pays"] else "does not pay"
        found.append(
            f"a hit in {one['tier']} {answer}: {one['bytes_per_second'] / 1e9:,.2f} GB/s, "
            f"{one['times']:,.{0 if one['times'] >= 10 else 1}f} times what is needed"
        )
    return found


def bindings(load: dict[str, Any]) -> list[str]:
    """What binds, and how much of it."""
    binds, parts, figure = load["binds"], load["parts_ms"], _figure(load)
    if not parts:
        return [f"{binds['rate']} binds: the queue grows without end"]
    return [
        f"{figure} TTFT: {parts['ttft_waiting']:,.1f} ms of waiting and {parts['ttft_prefill']:,.1f} of prefill; "
        f"{binds['TTFT']} binds",
        f"{figure} ITL: {parts['itl_decode']:,.1f} ms of decode and {parts['itl_chunk']:,.1f} of a prompt's chunk in "
        f"the same step; {binds['ITL']} binds",
    ]


def advice(load: dict[str, Any]) -> list[str]:
    """What to do, in order, and what it is predicted to bring."""
    found: list[str] = []
    for number, step in enumerate(load["advice"]["steps"], 1):
        wrong = " and ".join(step["missed"]) + " too long" if step["missed"] else "the rate cannot be served"
        found.append(f"{number}. {wrong}; {step['bound_by']} binds: {step['lever']} ({step['needs']})")
        found.append(f"   {_figure(load)} {_change(step['before'])} -> {_change(step)}: {step['verdict']}")
    if load["advice"]["verdict"] != "nothing to do":
        found.append("no change that is known here is enough" if found else "no change that is known here helps")
    return found


def _figure(load: dict[str, Any]) -> str:
    return "mean" if load["users"] else f"p{load['percentile']:g}"


def _change(one: dict[str, Any]) -> str:
    if one["ttft_ms"] is None:
        return "without end"
    return f"TTFT {one['ttft_ms']:,.1f} ms ({one['waiting_ms']:,.1f} waiting), ITL {one['itl_ms']:,.1f} ms"


def _levers(load: dict[str, Any]) -> Table:
    """A change a row: its figures, and what it leads to."""
    figure = _figure(load)
    table = Table(title="each change alone, under the load", box=None, header_style="bold", title_justify="left")
    table.add_column("change")
    for name in (f"TTFT {figure}", "of it waiting", f"ITL {figure}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    short = {"nothing to do": "enough", "misses the objective": "misses", "cannot be served": "not served"}
    for one in load["levers"]:
        figures = ["-" if one[name] is None else f"{one[name]:,.1f}" for name in ("ttft_ms", "waiting_ms", "itl_ms")]
        answer = Text(short[one["verdict"]], COLOURS[one["verdict"]], no_wrap=True)
        table.add_row(Text(one["lever"]).append(f" ({one['needs']})", "dim"), *figures, answer)
    return table


def _apart(apart: dict[str, Any]) -> str:
    answer = "disaggregate" if apart["pays"] else "do not disaggregate"
    return (
        f"{answer}: {apart['why']} ({apart['requests_per_second_and_worker']:,.3g} requests/s and worker apart, "
        f"{apart['together_requests_per_second_and_worker']:,.3g} together; "
        f"{apart['prefill_workers_per_decode_worker']:,.2g} prefill workers for each decode worker)"
    )
