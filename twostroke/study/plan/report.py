"""A plan's account as a report: the blocks that a terminal (`cli/plan_report.py`) and a page (`page/page.py`) show.

The first screen has one verdict, three numbers, and two ways out. Everything else is a detail.
"""

import json
from collections.abc import Iterator
from typing import Any

from twostroke.study.plan.pairs import pair_report
from twostroke.study.plan.report_blocks import (
    KINDS,
    SHORT,
    Block,
    Cell,
    Grid,
    Line,
    Plots,
    Section,
    Verdict,
    gigabytes,
    record_grid,
    shown,
)

TABLES = {
    "batches": "Sequences at once",
    "chunks": "Chunked prefill beside the other sequences",
    "tensor_parallelism": "Tensor parallelism: two all-reduces a layer",
}
WAYS = {
    "same_devices": "without more devices",
    "more_devices": "with more devices",
    "cheapest": "with the fewest devices",
}


def report(facts: dict[str, Any], details: bool = True) -> Iterator[Block]:
    """The first screen, and all tables if `details` are wanted."""
    yield from _head(facts)
    yield from _numbers(facts)
    yield from _ways(facts)
    yield from _assumed(facts)
    yield Plots()
    for title, command in (facts["load"] or {}).get("commands", {}).items():
        yield from (Line(f"{title}:", indent=2), Line(command, "code", indent=2))
    if "engine" in facts:
        yield from _engine(facts["engine"])
    if "pair" in facts:
        yield from pair_report(facts["pair"])
    if details:
        yield from _details(facts)


def _head(facts: dict[str, Any]) -> Iterator[Block]:
    asked, load = facts["workload"], facts["load"]
    yield Line(f"{facts['model']} on {facts['devices']} x {facts['machine']}", "title")
    shared = f", {asked['shared_prefix']:,} of them known" if asked["shared_prefix"] else ""
    mean = "on average " if load and load["lengths"]["prompt_p99"] > 1.01 * load["lengths"]["prompt_mean"] else ""
    requests = (
        f"{_count(asked['concurrency'], 'sequence')} at once"
        if load is None
        else f"{load['users']:,} users"
        if load["users"]
        else f"{load['requests_per_second']:,.3g} requests/s"
    )
    technique = "" if facts["technique"] == "plain" else f"; {facts['technique']}"
    assumed = f", {facts['assumed']['technique']}" if facts["assumed"]["technique"] else ""
    yield Line(
        f"{facts['parameters'] / 1e9:.2f} B parameters, {facts['weights_title']}{technique}{assumed}; {requests}, "
        f"{mean}{asked['prompt_tokens']:,} prompt tokens{shared} and {asked['output_tokens']:,} output tokens"
    )
    yield Verdict(_verdict(facts), KINDS[facts["verdict"]])


def _verdict(facts: dict[str, Any]) -> str:
    """The answer, with what it rests on: the hardest of all demands."""
    verdict, load, binds = facts["verdict"], facts["load"], facts["binds"]
    if verdict == "does not fit":
        memory, users = facts["memory"], 1 if load else facts["workload"]["concurrency"]
        needed = memory["weights_bytes"] + users * memory["kv_bytes_per_user"]
        return f"does not fit: {gigabytes(needed)} of {gigabytes(memory['usable_bytes'])}"
    if verdict == "cannot be served":
        return f"cannot be served: at most {load['most_requests_per_second']:,.3g} requests/s; {binds['rate']} binds"
    if facts["missed"]:
        named = " and ".join(f"{name} ({binds[name]} binds)" for name in facts["missed"])
        return f"misses the objective: {named}"
    return verdict


def _numbers(facts: dict[str, Any]) -> Iterator[Block]:
    """Three rows: what is served or what has room, TTFT, and ITL."""
    asked, load, binds, missed = facts["workload"], facts["load"], facts["binds"], facts["missed"]
    rows: list[list[Cell]] = []
    if load is None:
        memory, fits = facts["memory"], facts["verdict"] != "does not fit"
        needed = memory["weights_bytes"] + asked["concurrency"] * memory["kv_bytes_per_user"]
        answer = Cell("fits", "good") if fits else Cell("no", "bad")
        rows.append(
            [Cell("memory"), Cell(gigabytes(needed)), Cell(gigabytes(memory["usable_bytes"])), Cell(""), answer]
        )
        got = {"TTFT": facts["prefill"]["ms"], "ITL": facts["decode"]["ms"]}
        bound = {"TTFT": facts["prefill"]["bound"], "ITL": facts["decode"]["bound"]}
    else:
        within, rate = load["most_within_objectives"], load["requests_per_second"]
        if rate is not None:
            served = within is not None and within >= rate
            least = load["searched_from"]
            text = f"{within:,.3g}/s" if within else f"below {least:,.3g}/s" if least else "none"
            answer = Cell("kept", "good") if served else Cell("missed", "bad")
            rows.append([Cell("rate"), Cell(text), Cell(f"{rate:,.3g}/s"), Cell(binds.get("rate", "")), answer])
        got = {"TTFT": load["served"]["ttft_ms"], "ITL": load["served"]["itl_ms"]}
        bound = binds
    for name, limit in (("TTFT", asked["ttft_ms"]), ("ITL", asked["itl_ms"])):
        kept = Cell("missed", "warn") if name in missed or got[name] is None else Cell("kept", "good")
        kept = Cell("") if limit is None else kept
        lost = "-" if facts["verdict"] == "does not fit" else "without end"
        value = lost if got[name] is None else f"{got[name]:,.1f} ms"
        limit = "" if limit is None else f"{limit:,g} ms"
        rows.append([Cell(name), Cell(value), Cell(limit), Cell(bound.get(name, "")), kept])
    which = "predicted" if load is None else f"p{load['percentile']:g}"
    yield Grid(("", which, "limit", "bound by", ""), rows, left=("", "bound by"), tiles=True)


def _ways(facts: dict[str, Any]) -> Iterator[Block]:
    """Two ways out, or what would do with less; and the frontier."""
    ways = facts["ways_out"]
    enough = facts["verdict"] == "nothing to do"
    for key, title in WAYS.items():
        way = ways[key]
        if way is None:
            if key != "cheapest" and not enough:
                yield Line(f"{title}: nothing that is known here helps", "strong")
            continue
        yield Line(f"{title}: {' + '.join(way['changes'])}", "strong")
        yield Line(_served(way, facts), indent=2)
    frontier = facts["load"]["frontier"] if facts["load"] else []
    if len(frontier) > 1:
        points = "; ".join(f"{one['devices']}: {one['requests_per_second']:,.3g}/s" for one in frontier)
        yield Line(f"most within the objectives, by devices: {points}")


def _served(way: dict[str, Any], facts: dict[str, Any]) -> str:
    price = [f"{way['devices']:,} device{'s' if way['devices'] > 1 else ''}"]
    price += [] if way["watts"] is None else [f"{way['watts']:,.0f} W"]
    price += [] if way["price_per_hour"] is None else [f"{way['price_per_hour']:,.2f} an hour"]
    rate = way["requests_per_second"]
    served = f"serves {rate:,.3g} requests/s" if rate else f"room for {way['users']:,}"
    needs = "".join(f"; {need}" for need in dict.fromkeys(way["needs"]) if "device" not in need)
    if way["ttft_ms"] is None or way["itl_ms"] is None:
        return f"{served} at most on {', '.join(price)}: not enough{needs}"
    short = "" if way["enough"] else "; not enough"
    return f"{served} on {', '.join(price)}: TTFT {way['ttft_ms']:,.0f} ms, ITL {way['itl_ms']:,.1f} ms{needs}{short}"


def _assumed(facts: dict[str, Any]) -> Iterator[Block]:
    """What the answer rests on, and how sure it is."""
    assumed, load = facts["assumed"], facts["load"]
    text = (
        f"assumed: {assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of the bandwidth, "
        f"{assumed['link']:.0%} of the link"
    )
    if load is None:
        yield Line(f"{text}; no queueing (say --rate)", "faint")
        return
    (slow, fast), (low, high) = assumed["speed_range"], load["range"]
    if 0 < low < high:
        which = "what is advised" if any(facts["ways_out"].values()) else "it"
        served = f"{which} serves {low:,.3g} to {high:,.3g} requests/s"
        yield Line(f"published engines had {slow:g} to {fast:g} times this speed, at which {served}")
    yield Line(text, "faint")
    sure, parts = load["sure"], list[str]()
    for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        if (between := sure["between"][key]) and between[0] < between[1] < float("inf"):
            parts.append(f"{name} {between[0]:,.1f} to {between[1]:,.1f} ms")
    spread = f"; {sure['draws']} draws gave p{load['percentile']:g} of {', '.join(parts)}" if parts else ""
    near = "; near them p99 of TTFT differs up to 3 times by draw" if facts["workload"]["ttft_ms"] else ""
    simulated = f"{sure['requests_simulated']:,} requests were simulated; rates are searched to 12%"
    yield Line(f"{simulated}{near}{spread}", "faint")


def _details(facts: dict[str, Any]) -> Iterator[Block]:
    """All tables and single facts."""
    if (load := facts["load"]) is not None:
        yield from _load(load)
    yield Section("Each change alone, without queueing")
    rows = [
        [
            Cell(one["lever"], faint=f" ({one['needs']})" if one["needs"] else ""),
            *(Cell(shown(one[name])) for name in ("ttft_ms", "itl_ms", "users")),
            Cell(SHORT[one["verdict"]], KINDS[one["verdict"]]),
        ]
        for one in facts["levers"]
    ]
    yield Grid(("change", "TTFT ms", "ITL ms", "users", ""), rows)
    for key, title in TABLES.items():
        if facts[key]:
            yield from (Section(title), record_grid(facts[key]))
    yield Section("Also")
    yield from (Line(text, "item") for text in _also(facts))
    yield Line(f"model: {facts['source']}; machine: {facts['machine_source']}", "source")


def _load(load: dict[str, Any]) -> Iterator[Block]:
    """Percentiles at what was asked, and the frontier."""
    served, lengths = load["served"], load["lengths"]
    yield Section("Under the load")
    names = ("mean", "p50", "p90", "p99")
    rows = [
        [Cell(name), *(Cell(shown(served[key][column])) for column in names)]
        for name, key in (("TTFT", "ttft_percentiles_ms"), ("ITL", "itl_percentiles_ms"))
    ]
    yield Grid(("ms", *names), rows, left=("ms",))
    yield Line(
        f"prompts of {lengths['prompt_mean']:,.0f} tokens on average (p99 {lengths['prompt_p99']:,.0f}), "
        f"{lengths['shared_part']:.0%} of them known; answers of {lengths['output_mean']:,.0f} "
        f"(p99 {lengths['output_p99']:,.0f}); {served['sequences']:,.1f} sequences decode at once",
        "item",
    )
    if load["frontier"]:
        yield Section("Devices, and the highest rate within the objectives that was found with them")
        rows = [
            [Cell(shown(one["devices"])), Cell(f"{one['requests_per_second']:,.3g}"), Cell(one["how"])]
            for one in load["frontier"]
        ]
        yield Grid(("devices", "requests/s", "how"), rows)


def _also(facts: dict[str, Any]) -> Iterator[str]:
    """Single facts."""
    memory, decode = facts["memory"], facts["decode"]
    crossover, chunk = facts["attention_overtakes_at"], facts["largest_chunk"]
    yield (
        f"weights {gigabytes(memory['weights_bytes'])}; KV {memory['kv_bytes_per_token']:,} bytes a token, "
        f"{memory['kv_bytes_per_user'] / 1e9:.3f} GB a user; room for {_count(memory['users'], 'user')}"
    )
    if snapshot := memory["snapshot_bytes"]:
        yield (
            f"recurrent layers: {snapshot:,} bytes a snapshot of their states, of which each user has two; room for "
            f"{_count(memory['snapshots_kept'], 'snapshot')} more; what saves the fewest tokens leaves first"
        )
    for name, one in (("prefill", facts["prefill"]), ("decode", decode)):
        yield (
            f"{name}: {one['intensity']:,.1f} FLOPs a byte, {one['compute_percent']:.1f}% of the peak rate, "
            f"{one['bandwidth_percent']:.1f}% of the bandwidth"
        )
    yield f"decode: {decode['tokens_per_second']:,.1f} tokens/s in all"
    yield (
        f"attention scores take more FLOPs than all matrices from {crossover:,} tokens"
        if crossover
        else "attention scores never take more FLOPs than the matrices"
    )
    yield f"KV from a tier is faster than computing it above {facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s"
    for one in facts["tiers"]:
        answer = "pays" if one["pays"] else "does not pay"
        yield (
            f"a hit in {one['tier']} {answer}: {one['bytes_per_second'] / 1e9:,.2f} GB/s, "
            f"{one['times']:,.{0 if one['times'] >= 10 else 1}f} times what is needed"
        )
    if chunk is not None:
        ttft = facts["ttft_in_chunks_ms"]
        yield f"chunks of at most {chunk:,} tokens keep ITL beside a prefill; TTFT is then {ttft:,.1f} ms"
    elif facts["workload"]["itl_ms"] is not None and facts["workload"]["concurrency"] > 1:
        yield "no chunk keeps ITL beside a prefill"


def _engine(engine: dict[str, Any]) -> Iterator[Block]:
    """What this engine allocates, and the commands that start it."""
    yield Section("This engine, to the byte")
    for title, one in (("as planned", engine), ("as advised", engine["advised"])):
        if one is None:
            continue
        weights, pool = one["weights_bytes"], one["pool_bytes"]
        yield Line(f"{title}: {weights:,} bytes of weights and {pool:,} of KV ({one['backend']} backend)", indent=2)
        yield Line(one["command"], "code", indent=2)
        if one["method"]:
            yield Line(f'and in each request: "method": {json.dumps(one["method"])}', indent=2)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
