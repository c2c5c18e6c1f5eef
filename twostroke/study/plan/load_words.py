"""What a load's facts say, as plain sentences: for the terminal and the page."""

from typing import Any


def offered(load: dict[str, Any]) -> str:
    """What is asked."""
    lengths, rate = load["lengths"], load["requests_per_second"]
    arrivals = f"{load['users']:,} users, each asking again at once" if rate is None else f"{rate:,.3g} requests/s"
    return (
        f"{arrivals}; prompts of {lengths['prompt_mean']:,.0f} tokens on average (p99 {lengths['prompt_p99']:,.0f}), "
        f"{lengths['shared_part']:.0%} of them known; answers of {lengths['output_mean']:,.0f} "
        f"(p99 {lengths['output_p99']:,.0f})"
    )


def lines(load: dict[str, Any]) -> list[str]:
    """What it takes, how much it could be, and where else KV or strokes could be."""
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
    binds, parts = load["binds"], load["parts_ms"]
    if not parts:
        return [f"{binds['rate']} binds: the queue grows without end"]
    kind = figure(load)
    return [
        f"{kind} TTFT: {parts['ttft_waiting']:,.1f} ms of waiting and {parts['ttft_prefill']:,.1f} of prefill; "
        f"{binds['TTFT']} binds",
        f"{kind} ITL: {parts['itl_decode']:,.1f} ms of decode and {parts['itl_chunk']:,.1f} of a prompt's chunk in "
        f"the same step; {binds['ITL']} binds",
    ]


def advice(load: dict[str, Any]) -> list[str]:
    """What to do, in order, and what it is predicted to bring."""
    found: list[str] = []
    for number, (change, brings) in enumerate(decisions(load), 1):
        found += [f"{number}. {change}", f"   {brings}"]
    return found + remains(load)


def decisions(load: dict[str, Any]) -> list[tuple[str, str]]:
    """For each step of the advice: what is wrong and what to change, and what that is predicted to bring."""
    found: list[tuple[str, str]] = []
    for step in load["advice"]["steps"]:
        wrong = " and ".join(step["missed"]) + " too long" if step["missed"] else "the rate cannot be served"
        change = f"{wrong}; {step['bound_by']} binds: {step['lever']} ({step['needs']})"
        found.append((change, f"{figure(load)} {_change(step['before'])} -> {_change(step)}: {step['verdict']}"))
    return found


def remains(load: dict[str, Any]) -> list[str]:
    """A line if the advice is not enough."""
    if load["advice"]["verdict"] == "nothing to do":
        return []
    return [f"no change that is known here {'is enough' if load['advice']['steps'] else 'helps'}"]


def figure(load: dict[str, Any]) -> str:
    """What is compared with objectives: a percentile, or means for users."""
    return "mean" if load["users"] else f"p{load['percentile']:g}"


def _change(one: dict[str, Any]) -> str:
    if one["ttft_ms"] is None:
        return "without end"
    return f"TTFT {one['ttft_ms']:,.1f} ms ({one['waiting_ms']:,.1f} waiting), ITL {one['itl_ms']:,.1f} ms"


def _apart(apart: dict[str, Any]) -> str:
    answer = "disaggregate" if apart["pays"] else "do not disaggregate"
    return (
        f"{answer}: {apart['why']} ({apart['requests_per_second_and_worker']:,.3g} requests/s and worker apart, "
        f"{apart['together_requests_per_second_and_worker']:,.3g} together; "
        f"{apart['prefill_workers_per_decode_worker']:,.2g} prefill workers for each decode worker)"
    )
