"""How a plan's load looks in a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

COLOURS = {"nothing to do": "green", "misses the objective": "yellow", "cannot be served": "red"}


def print_load(load: dict[str, Any]) -> None:
    """The answer, percentiles, what limits it, and where else KV or strokes could be."""
    console = Console(highlight=False)
    console.print("\nUnder the load", style="bold")
    console.print(f"  {_offered(load)}", style="dim", markup=False, soft_wrap=True)
    if served := load["served"]:
        console.print(_percentiles(served, load["percentile"]))
    for text in lines(load):
        console.print(f"  - {text}", markup=False, soft_wrap=True)
    missed = f" ({', '.join(load['missed'])})" if load["missed"] else ""
    console.print(f"  load: {load['verdict']}{missed}", style=f"bold {COLOURS[load['verdict']]}", markup=False)


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


def _apart(apart: dict[str, Any]) -> str:
    answer = "disaggregate" if apart["pays"] else "do not disaggregate"
    return (
        f"{answer}: {apart['why']} ({apart['requests_per_second_and_worker']:,.3g} requests/s and worker apart, "
        f"{apart['together_requests_per_second_and_worker']:,.3g} together; "
        f"{apart['prefill_workers_per_decode_worker']:,.2g} prefill workers for each decode worker)"
    )
