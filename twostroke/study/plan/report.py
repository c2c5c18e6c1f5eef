"""A plan's account as a report: the blocks that a terminal (`cli/plan_report.py`) and a page (`page/page.py`) show."""

import json
from collections.abc import Iterator
from typing import Any

from twostroke.study.plan.advice import PROBLEMS
from twostroke.study.plan.load_report import load_blocks
from twostroke.study.plan.report_blocks import (
    KINDS,
    Block,
    Cell,
    Grid,
    Line,
    Plots,
    Section,
    Verdict,
    change_grid,
    of_verdict,
    record_grid,
)

TABLES = {
    "batches": "Sequences at once",
    "chunks": "Chunked prefill beside the other sequences",
    "tensor_parallelism": "Tensor parallelism: two all-reduces a layer",
}


def report(facts: dict[str, Any]) -> Iterator[Block]:
    """The answer first, then what to do about it, then what it rests on."""
    yield from _head(facts)
    yield from _answer(facts)
    if facts["verdict"] != "nothing to do":
        yield from _advice(facts)
    yield Plots("plan")
    yield Section("Each change alone")
    yield change_grid(facts["levers"], {"ttft_ms": "TTFT ms", "itl_ms": "ITL ms", "users": "users"})
    for key, title in TABLES.items():
        if facts[key]:
            yield from (Section(title), record_grid(facts[key]))
    yield Section("Also")
    yield from (Line(text, "item") for text in _also(facts))
    yield Line(f"model: {facts['source']}; machine: {facts['machine_source']}", "source")
    if "engine" in facts:
        yield from _engine(facts["engine"])
    if "load" in facts:
        yield from load_blocks(facts["load"])


def _head(facts: dict[str, Any]) -> Iterator[Block]:
    load, assumed, weights = facts["workload"], facts["assumed"], facts["weights"]
    yield Line(f"{facts['model']} on {facts['devices']} x {facts['machine']}", "title")
    shared = f", {load['shared_prefix']:,} of them known" if load["shared_prefix"] else ""
    yield Line(
        f"{facts['parameters'] / 1e9:.2f} B parameters {'as stored' if weights == 'stored' else f'in {weights}'}; "
        f"{load['prompt_tokens']:,} prompt tokens{shared} and {load['output_tokens']:,} output tokens; "
        f"{_count(load['concurrency'], 'sequence')} at once"
    )
    if facts["technique"] != "plain":
        yield Line(facts["technique"] + (f", {assumed['technique']}" if assumed["technique"] else ""))
    yield Line(
        f"assumed: {assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of the bandwidth, "
        f"{assumed['link']:.0%} of the link; no queueing",
        "faint",
    )


def _answer(facts: dict[str, Any]) -> Iterator[Block]:
    """Three rows, memory, TTFT and ITL; and the verdict, of the load too if there is one."""
    load, memory, fits = facts["workload"], facts["memory"], facts["verdict"] != "does not fit"
    needed = memory["weights_bytes"] + load["concurrency"] * memory["kv_bytes_per_user"]
    answer = Cell("fits", "good") if fits else Cell("no", "bad")
    rows = [[Cell("memory"), Cell(_gb(needed)), Cell(_gb(memory["usable_bytes"])), Cell(""), answer]]
    for name, stroke, limit in (("TTFT", "prefill", load["ttft_ms"]), ("ITL", "decode", load["itl_ms"])):
        one, kept = facts[stroke], Cell("") if limit is None else Cell("kept", "good")
        answer = Cell("missed", "warn") if name in facts["missed"] else kept
        limit = "" if limit is None else f"{limit:,g} ms"
        rows.append([Cell(name), Cell(f"{one['ms']:,.1f} ms"), Cell(limit), Cell(one["bound"]), answer])
    yield Section("")
    yield Grid(("", "predicted", "limit", "bound by", ""), rows, left=("", "bound by"), tiles=True)
    verdicts, text = [facts["verdict"]], of_verdict(facts)
    text += "" if fits else "; times are those that it would have if it did"
    if "load" in facts:
        verdicts.append(facts["load"]["verdict"])
        text += f"; under the load: {of_verdict(facts['load'])}"
    kinds = [KINDS[one] for one in verdicts]
    yield Verdict(text, next(kind for kind in ("bad", "warn", "good") if kind in kinds))


def _advice(facts: dict[str, Any]) -> Iterator[Block]:
    """The decisions in order, their sum, and the sum without more devices."""
    load, advice = facts["workload"], facts["advice"]
    yield Section("What to do, in order")
    if not advice["steps"]:
        yield Line("no change that is known here helps", indent=2)
    for number, step in enumerate(advice["steps"], 1):
        before, limit = step["before"], {"TTFT": load["ttft_ms"], "ITL": load["itl_ms"]}.get(step["problem"])
        over = "" if limit is None else f" ({before[step['problem'].lower() + '_ms']:,.1f} > {limit:,g} ms)"
        yield Line(f"{number}. {PROBLEMS[step['problem']]}{over}; {step['bound_by']} binds.", indent=2)
        yield Line(f"{step['lever']} ({step['needs']})", "strong", indent=5)
        yield Line(
            f"TTFT {before['ttft_ms']:,.1f} -> {step['ttft_ms']:,.1f} ms, ITL {before['itl_ms']:,.1f} -> "
            f"{step['itl_ms']:,.1f} ms, room for {before['users']:,} -> {step['users']:,} users",
            "faint",
            indent=5,
        )
    yield _sum("In all", advice)
    other = facts["advice_without_more_devices"]
    if other["changes"] != advice["changes"]:
        yield _sum("Without more devices", other)


def _sum(title: str, advice: dict[str, Any]) -> Line:
    if not advice["changes"]:
        return Line(f"{title}: nothing helps.", indent=2)
    times = f"TTFT {advice['ttft_ms']:,.1f} ms, ITL {advice['itl_ms']:,.1f} ms, {_count(advice['users'], 'user')}"
    left = "nothing left to do" if advice["verdict"] == "nothing to do" else f"it still {advice['verdict']}"
    return Line(f"{title}: {' + '.join(advice['changes'])}. {times}: {left}.", indent=2)


def _also(facts: dict[str, Any]) -> Iterator[str]:
    """Single facts."""
    memory, apart, decode = facts["memory"], facts["apart"], facts["decode"]
    crossover, batch, chunk = facts["attention_overtakes_at"], facts["compute_bound_batch"], facts["largest_chunk"]
    yield (
        f"weights {_gb(memory['weights_bytes'])}; KV {memory['kv_bytes_per_token']:,} bytes a token, "
        f"{memory['kv_bytes_per_user'] / 1e9:.3f} GB a user; room for {_count(memory['users'], 'user')}"
    )
    for name, one in (("prefill", facts["prefill"]), ("decode", decode)):
        yield (
            f"{name}: {one['intensity']:,.1f} FLOPs a byte, {one['compute_percent']:.1f}% of the peak rate, "
            f"{one['bandwidth_percent']:.1f}% of the bandwidth"
        )
    yield f"decode: {decode['tokens_per_second']:,.1f} tokens/s in all"
    bound = f"bound by compute from a batch of {batch:,}" if batch else "always bound by bandwidth"
    yield f"decode's matrices are {bound}"
    yield (
        f"attention scores take more FLOPs than all matrices from {crossover:,} tokens"
        if crossover
        else "attention scores never take more FLOPs than the matrices"
    )
    yield f"KV from a tier is faster than computing it above {facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s"
    if chunk is not None:
        ttft = facts["ttft_in_chunks_ms"]
        yield f"chunks of at most {chunk:,} tokens keep ITL beside a prefill; TTFT is then {ttft:,.1f} ms"
    elif facts["workload"]["itl_ms"] is not None and facts["workload"]["concurrency"] > 1:
        yield "no chunk keeps ITL beside a prefill"
    move = "" if apart["transfer_ms"] is None else f", {apart['transfer_ms']:.1f} ms over the link"
    yield (
        f"prefill and decode on workers of their own: {'yes' if apart['pays'] else 'no'}, {apart['why']} "
        f"({_gb(apart['kv_bytes'])} of KV a prompt{move}; {apart['prefill_workers_per_decode_worker']:.2f} prefill "
        f"workers for each decode worker)"
    )


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


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
