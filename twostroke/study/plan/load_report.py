"""A load's account as a report: what is asked, the answer, what binds, and what to do."""

from collections.abc import Iterator
from typing import Any

from twostroke.study.plan.report_blocks import KINDS, Block, Cell, Grid, Line, Plots, Section, change_grid, of_verdict


def load_blocks(load: dict[str, Any]) -> Iterator[Block]:
    """The part of a plan's report that its load adds."""
    yield Section("Under the load")
    yield Line(_asked(load), "faint", indent=2)
    if load["served"]:
        yield _percentiles(load["served"], load["percentile"])
    yield from (Line(text, "item") for text in (*bindings(load), *_figures(load)))
    yield Line(f"load: {of_verdict(load)}", KINDS[load["verdict"]], indent=2)
    if load["verdict"] != "nothing to do":
        kind = _compared(load)
        yield Section("Each change alone, under the load")
        yield change_grid(
            load["levers"], {"ttft_ms": f"TTFT {kind}", "waiting_ms": "of it waiting", "itl_ms": f"ITL {kind}"}
        )
        yield Section("What to do under the load, in order")
        yield from (Line(text, indent=2) for text in advice(load))
    yield Plots("load")
    for title, command in load.get("commands", {}).items():
        yield from (Line(f"{title}:", indent=2), Line(command, "code", indent=2))


def _asked(load: dict[str, Any]) -> str:
    lengths, rate = load["lengths"], load["requests_per_second"]
    arrivals = f"{load['users']:,} users, each asking again at once" if rate is None else f"{rate:,.3g} requests/s"
    return (
        f"{arrivals}; prompts of {lengths['prompt_mean']:,.0f} tokens on average (p99 {lengths['prompt_p99']:,.0f}), "
        f"{lengths['shared_part']:.0%} of them known; answers of {lengths['output_mean']:,.0f} "
        f"(p99 {lengths['output_p99']:,.0f})"
    )


def _percentiles(served: dict[str, Any], percent: float) -> Grid:
    columns = {name: name for name in ("mean", "p50", "p90", "p99")}
    if percent not in (50, 90, 99):
        columns["wanted"] = f"p{percent:g}"
    rows = [
        [Cell(name), *(Cell(f"{served[one][key]:,.1f}") for key in columns)]
        for name, one in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))
    ]
    return Grid(("ms", *columns.values()), rows, left=("ms",))


def bindings(load: dict[str, Any]) -> list[str]:
    """What binds TTFT and ITL, and how many milliseconds of each it is."""
    binds, parts = load["binds"], load["parts_ms"]
    if not parts:
        return [f"{binds['rate']} binds: the queue grows without end"]
    kind = _compared(load)
    return [
        f"{kind} TTFT: {parts['ttft_waiting']:,.1f} ms of waiting and {parts['ttft_prefill']:,.1f} of prefill; "
        f"{binds['TTFT']} binds",
        f"{kind} ITL: {parts['itl_decode']:,.1f} ms of decode and {parts['itl_chunk']:,.1f} of a prompt's chunk in "
        f"the same step; {binds['ITL']} binds",
    ]


def _figures(load: dict[str, Any]) -> Iterator[str]:
    """What the load takes, how much it could be, and where else KV or strokes could be."""
    most, within, apart = load["most_requests_per_second"], load["most_within_objectives"], load["apart"]
    if load["verdict"] == "cannot be served":
        yield f"this rate cannot be served: at most {most:,.3g} requests/s"
    if served := load["served"]:
        yield "; ".join(
            f"{name} {one['time']:.0%} of the time, with {one['compute']:.0%} of the peak rate and "
            f"{one['bandwidth']:.0%} of the bandwidth"
            for name, one in served["utilization"].items()
        )
        waiting = served["waiting_ms"]
        yield f"{served['sequences']:,.1f} sequences decode at once on average; a prompt waits {waiting:,.1f} ms"
    if closed := load["closed"]:
        yield (
            f"{closed['rate']:,.3g} requests/s; TTFT {1e3 * closed['ttft_s']:,.1f} ms, ITL "
            f"{1e3 * closed['itl_s']:,.1f} ms on average; {closed['sequences']:,.1f} sequences decode at once"
        )
    limit = "" if within is None else f", {within:,.3g} within the objectives"
    yield f"highest rate: {most:,.3g} requests/s{limit}"
    if (workers := load["workers_needed"]) is not None and workers > 1:
        yield f"for this rate: {workers:,} workers like this one"
    if apart["prefill_workers_per_decode_worker"] is not None:
        answer = "disaggregate" if apart["pays"] else "do not disaggregate"
        yield (
            f"{answer}: {apart['why']} ({apart['requests_per_second_and_worker']:,.3g} requests/s and worker apart, "
            f"{apart['together_requests_per_second_and_worker']:,.3g} together; "
            f"{apart['prefill_workers_per_decode_worker']:,.2g} prefill workers for each decode worker)"
        )
    for one in load["tiers"]:
        answer = "pays" if one["pays"] else "does not pay"
        yield (
            f"a hit in {one['tier']} {answer}: {one['bytes_per_second'] / 1e9:,.2f} GB/s, "
            f"{one['times']:,.{0 if one['times'] >= 10 else 1}f} times what is needed"
        )


def advice(load: dict[str, Any]) -> list[str]:
    """What to do, in order: what is wrong and what to change, and what that is predicted to bring."""
    found: list[str] = []
    for number, step in enumerate(load["advice"]["steps"], 1):
        wrong = " and ".join(step["missed"]) + " too long" if step["missed"] else "the rate cannot be served"
        found.append(f"{number}. {wrong}; {step['bound_by']} binds: {step['lever']} ({step['needs']})")
        found.append(f"   {_compared(load)} {_times(step['before'])} -> {_times(step)}: {step['verdict']}")
    if load["advice"]["verdict"] != "nothing to do":
        found.append(f"no change that is known here {'is enough' if found else 'helps'}")
    return found


def _compared(load: dict[str, Any]) -> str:
    """What is compared with objectives: a percentile, or means for users."""
    return "mean" if load["users"] else f"p{load['percentile']:g}"


def _times(one: dict[str, Any]) -> str:
    if one["ttft_ms"] is None:
        return "without end"
    return f"TTFT {one['ttft_ms']:,.1f} ms ({one['waiting_ms']:,.1f} waiting), ITL {one['itl_ms']:,.1f} ms"
