"""How the figures of a simulation look in a terminal."""

from typing import Any

from twostroke.cli.report import goodput_text, latency_table, print_lines, rates_text


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def print_report(facts: dict[str, Any]) -> None:
    """Latencies, rates, and utilization over time."""
    from rich.console import Console

    console = Console(highlight=False)
    print_lines(simulated(facts), "bold")
    console.print(latency_table(facts, ",.2f"))
    fleets = facts["fleets"]
    console.print(_over_time(facts["over_time"], "" if len(fleets) == 1 else f", {fleets[0]['model']} alone"))
    print_lines(remarks(facts))


def _over_time(rows: list[dict[str, Any]], of: str, most: int = 16) -> Any:
    """A table of at most `most` rows, each the mean of neighbouring intervals. `of`: what its title says besides."""
    from rich.table import Table

    table = Table(title=f"over time{of}", box=None, header_style="bold", title_justify="left", padding=(0, 1, 0, 0))
    names = ("from, s", "busy", "compute", "bandwidth", "running", "waiting", "KV used")
    for name in (*names, "prefill tok/s", "decode tok/s"):
        table.add_column(name, justify="right", overflow="fold")
    some = -(-len(rows) // most) or 1
    for start in range(0, len(rows), some):
        group = rows[start : start + some]

        def average(name: str, group: list[dict[str, Any]] = group) -> float | None:
            values = [row[name] for row in group]
            return None if values[0] is None else sum(values) / len(values)

        shares = ("busy", "compute", "bandwidth")
        cells = ["-" if (one := average(name)) is None else f"{one:.0%}" for name in shares]
        counts = [f"{average(name) or 0:,.1f}" for name in ("running", "waiting")]
        rates = [f"{average(f'{kind}_tokens_per_second') or 0:,.0f}" for kind in ("prefill", "decode")]
        table.add_row(f"{group[0]['at_s']:g}", *cells, *counts, f"{average('kv') or 0:.0%}", *rates)
    return table


def simulated(facts: dict[str, Any]) -> list[str]:
    """What was simulated: models, machines, lengths and arrivals."""
    lines = [
        f"{one['model']} ({one['weights']}, KV in {one['kv_bits']} bits) on "
        f"{_count(one['workers_in_all'], 'worker')} of {one['devices']} x {one['machine_title']}"
        for one in facts["fleets"]
    ]
    work, come = facts["workload"], facts["arrivals"]
    lengths, named = f"{work.get('inputs')} prompt and {work.get('outputs')} answer tokens", work.get("inputs", "trace")
    if named in ("trace", "sharegpt"):
        mean = f"{work['mean_prompt']:,.0f} prompt and {work['mean_answer']:,.0f} answer tokens on average"
        lengths = f"{work.get('trace', 'lengths of sharegpt')}: {mean}"
    shared = f", {work['prefix_tokens']} first ones shared in {work['groups']} groups" if work["prefix_tokens"] else ""
    when = {
        "OpenLoop": lambda: f"{come['rate']:g} a second" + _evenness(come["burstiness"]),
        "Replay": lambda: f"in {come['seconds']:,.1f} s, at the times of {_trace(work)}",
        "ClosedLoop": lambda: f"{come['concurrency']} at once",
    }[come["loop"]]()
    return [*lines, f"{_count(work['requests'], 'request')}, {when}: {lengths}{shared}"]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _evenness(burstiness: float) -> str:
    if burstiness == 1:
        return ""
    return f", {'in bursts' if burstiness < 1 else 'more evenly than random'} (burstiness {burstiness:g})"


def _trace(work: dict[str, Any]) -> str:
    rate = work["requests_per_second"]
    return "the trace" if rate is None or not work["stretched"] else f"the trace, stretched to {rate:,.3g} a second"


def remarks(facts: dict[str, Any]) -> list[str]:
    """Lines of text: rates, what was assumed, and how long it took."""
    engine, workers = facts["engine"], facts["workers"]
    lines = [rates_text(facts)]
    if facts["goodput"] is not None:
        lines.append(f"{goodput_text(facts)} ({facts['met']:.1%} of all)")
    lines.append(
        f"prefix hits {facts['hit_rate'] or 0:.1%} of prefilled tokens, {facts['preemptions']:,} preemptions, "
        f"{facts['steps']:,} steps"
    )
    if facts["thrashing"]:
        lines.append(
            f"thrashing: {facts['preemptions']:,} preemptions of {facts['completed']:,} requests, whose prompts were "
            f"computed again. Let fewer run at once (--max-running), or make room for KV (--kv-bits 8, --weights, --tp)"
        )
    lines += [
        f"{one['model']}: {one['completed']:,} requests, TTFT p99 {_ms(one['ttft_s']['p99'])}, ITL p99 "
        f"{_ms(one['itl_s']['p99'])}, {one['preemptions']:,} preemptions"
        for one in (facts["fleets"] if len(facts["fleets"]) > 1 else [])
    ]
    fleet = (
        f"{workers['together']} of both strokes"
        if workers["together"]
        else (
            f"{workers['prefill']} that prefill, {workers['decode']} that decode, "
            f"{facts['moved_bytes'] / 1e9:,.2f} GB of KV moved at {facts['link']['rate'] / 1e9:g} GB/s"
        )
    )
    of = f" of {facts['model']}" if len(facts["fleets"]) > 1 else ""
    lines.append(
        f"workers{of}: {fleet}; router {facts['router']}; each {engine['kv_pages']:,} pages of {engine['page_size']}, "
        f"steps of {engine['max_step_tokens']} tokens, {'a step in flight' if engine['in_flight'] else 'step by step'}"
    )
    if facts["deaths"] or facts["lost_transfers"]:
        lines.append(
            f"{facts['deaths']} workers died and {facts['lost_transfers']} transfers were lost: {facts['moves']} times "
            f"a request began again elsewhere, fault seed {facts['faults']['seed']}"
        )
    if engine["technique"] != "plain":
        assumed = f", {engine['assumed']}" if engine["assumed"] else ""
        lines.append(f"answers by {engine['technique']}{assumed}")
    lines.append(
        f"assumed: Python takes {engine['host_s'] * 1e6:,.0f} us a step and {engine['token_s'] * 1e6:,.0f} us a token; "
        f"answers are as long as asked for"
    )
    lines.append(
        f"simulated in {facts['wall_s']:,.1f} s: {facts['requests_per_wall_second']:,.0f} requests a second of wall "
        f"time, seed {facts['seed']}"
    )
    return lines
