"""How `twostroke plan` looks in a terminal."""

import json
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twostroke.study.plan.advice import PROBLEMS

COLOURS = {"nothing to do": "green", "misses the objective": "yellow", "does not fit": "red"}


def print_tables(facts: dict[str, Any]) -> None:
    """The answer first, then what to do about it, then what it rests on."""
    console = Console(highlight=False)
    _head(console, facts)
    _answer(console, facts)
    _advice(console, facts)
    _section(console, "Each change alone", _levers(facts))
    for title, key in (
        ("Sequences at once", "batches"),
        ("Chunked prefill beside the other sequences", "chunks"),
        ("Tensor parallelism: two all-reduces a layer", "tensor_parallelism"),
    ):
        if facts[key]:
            _section(console, title, _table(facts[key]))
    _also(console, facts)
    if engine := facts.get("engine"):
        _engine(console, engine)


def _head(console: Console, facts: dict[str, Any]) -> None:
    load, assumed = facts["workload"], facts["assumed"]
    _line(console, f"{facts['model']} on {facts['devices']} x {facts['machine']}", "bold")
    shared = f", {load['shared_prefix']:,} of them known" if load["shared_prefix"] else ""
    model = f"{facts['parameters'] / 1e9:.2f} B parameters {_form(facts['weights'])}"
    _line(
        console,
        f"{model}; {load['prompt_tokens']:,} prompt tokens{shared} and {load['output_tokens']:,} output tokens; "
        f"{_count(load['concurrency'], 'sequence')} at once",
    )
    if facts["technique"] != "plain":
        _line(console, facts["technique"] + (f", {assumed['technique']}" if assumed["technique"] else ""))
    _line(
        console,
        f"assumed: {assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of the bandwidth, "
        f"{assumed['link']:.0%} of the link; no queueing",
        "dim",
    )


def _answer(console: Console, facts: dict[str, Any]) -> None:
    """Three rows: memory, TTFT, ITL."""
    load, memory = facts["workload"], facts["memory"]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "predicted", "limit", "bound by", ""):
        table.add_column(name, justify="right" if name in ("predicted", "limit") else "left")
    needed = memory["weights_bytes"] + load["concurrency"] * memory["kv_bytes_per_user"]
    fits = facts["verdict"] != "does not fit"
    table.add_row(
        "memory", _gb(needed), _gb(memory["usable_bytes"]), "", Text("fits", "green") if fits else Text("no", "red")
    )
    for name, stroke, limit in (("TTFT", "prefill", load["ttft_ms"]), ("ITL", "decode", load["itl_ms"])):
        one, missed = facts[stroke], name in facts["missed"]
        kept = Text("missed", "yellow") if missed else Text("kept", "green") if limit is not None else ""
        table.add_row(name, f"{one['ms']:,.1f} ms", "" if limit is None else f"{limit:,g} ms", one["bound"], kept)
    _section(console, "", table)
    missed = f" ({', '.join(facts['missed'])})" if facts["missed"] else ""
    note = "; times are those that it would have if it did" if not fits else ""
    _line(console, f"verdict: {facts['verdict']}{missed}{note}", f"bold {COLOURS[facts['verdict']]}")


def _advice(console: Console, facts: dict[str, Any]) -> None:
    """The decisions in order, their sum, and the sum without more devices."""
    if facts["verdict"] == "nothing to do":
        return
    load, advice = facts["workload"], facts["advice"]
    _section(console, "What to do, in order", None)
    if not advice["steps"]:
        _line(console, "  no change that is known here helps")
    for number, step in enumerate(advice["steps"], 1):
        limit = {"TTFT": load["ttft_ms"], "ITL": load["itl_ms"]}.get(step["problem"])
        over = "" if limit is None else f" ({step['before'][step['problem'].lower() + '_ms']:,.1f} > {limit:,g} ms)"
        _line(console, f"  {number}. {PROBLEMS[step['problem']]}{over}; {step['bound_by']} binds.")
        _line(console, f"     {step['lever']} ({step['needs']})", "bold")
        _line(console, f"     {_change(step['before'], step)}", "dim")
    _sum(console, "In all", advice)
    other = facts["advice_without_more_devices"]
    if other["changes"] != advice["changes"]:
        _sum(console, "Without more devices", other)


def _sum(console: Console, title: str, advice: dict[str, Any]) -> None:
    if not advice["changes"]:
        _line(console, f"  {title}: nothing helps.")
        return
    times = f"TTFT {advice['ttft_ms']:,.1f} ms, ITL {advice['itl_ms']:,.1f} ms, {_count(advice['users'], 'user')}"
    left = "nothing left to do" if advice["verdict"] == "nothing to do" else f"it still {_still(advice['verdict'])}"
    _line(console, f"  {title}: {' + '.join(advice['changes'])}. {times}: {left}.")


def _form(weights: str) -> str:
    return "as stored" if weights == "stored" else f"in {weights}"


def _still(verdict: str) -> str:
    return verdict if verdict.startswith("misses") else "does not fit"


def _change(before: dict[str, Any], after: dict[str, Any]) -> str:
    return (
        f"TTFT {before['ttft_ms']:,.1f} -> {after['ttft_ms']:,.1f} ms, ITL {before['itl_ms']:,.1f} -> "
        f"{after['itl_ms']:,.1f} ms, room for {before['users']:,} -> {after['users']:,} users"
    )


def _also(console: Console, facts: dict[str, Any]) -> None:
    """Single facts, a line each."""
    memory, apart, prefill, decode = facts["memory"], facts["apart"], facts["prefill"], facts["decode"]
    crossover, batch, chunk = facts["attention_overtakes_at"], facts["compute_bound_batch"], facts["largest_chunk"]
    lines = [
        f"weights {_gb(memory['weights_bytes'])}; KV {memory['kv_bytes_per_token']:,} bytes a token, "
        f"{memory['kv_bytes_per_user'] / 1e9:.3f} GB a user; room for {_count(memory['users'], 'user')}",
        *(
            f"{name}: {one['intensity']:,.1f} FLOPs a byte, {one['compute_percent']:.1f}% of the peak rate, "
            f"{one['bandwidth_percent']:.1f}% of the bandwidth"
            for name, one in (("prefill", prefill), ("decode", decode))
        ),
        f"decode: {decode['tokens_per_second']:,.1f} tokens/s in all",
        f"decode's matrices are bound by compute from a batch of {batch:,}"
        if batch
        else "decode's matrices are always bound by bandwidth",
        f"attention scores take more FLOPs than all matrices from {crossover:,} tokens"
        if crossover
        else "attention scores never take more FLOPs than the matrices",
        f"KV from a tier is quicker than computing it above {facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s",
    ]
    if chunk is not None:
        lines.append(
            f"chunks of at most {chunk:,} tokens keep ITL beside a prefill; TTFT is then "
            f"{facts['ttft_in_chunks_ms']:,.1f} ms"
        )
    elif facts["workload"]["itl_ms"] is not None and facts["workload"]["concurrency"] > 1:
        lines.append("no chunk keeps ITL beside a prefill")
    move = "" if apart["transfer_ms"] is None else f", {apart['transfer_ms']:.1f} ms over the link"
    lines.append(
        f"prefill and decode on workers of their own: {'yes' if apart['pays'] else 'no'}, {apart['why']} "
        f"({_gb(apart['kv_bytes'])} of KV a prompt{move}; {apart['prefill_workers_per_decode_worker']:.2f} prefill "
        f"workers for each decode worker)"
    )
    _section(console, "Also", None)
    for line in lines:
        _line(console, f"  - {line}")


def _engine(console: Console, engine: dict[str, Any]) -> None:
    _section(console, "This engine, to the byte", None)
    for title, one in (("as planned", engine), ("as advised", engine["advised"])):
        if one is None:
            continue
        _line(
            console,
            f"  {title}: {one['weights_bytes']:,} bytes of weights and {one['pool_bytes']:,} of KV "
            f"({one['backend']} backend)",
        )
        _line(console, f"  {one['command']}", "bold")
        if one["method"]:
            _line(console, f'  and in each request: "method": {json.dumps(one["method"])}')


def _levers(facts: dict[str, Any]) -> Table:
    """A change a row: its figures, and what it leads to."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("change", "TTFT ms", "ITL ms", "users"):
        table.add_column(name, justify="left" if name == "change" else "right", no_wrap=name != "change")
    table.add_column("")
    short = {"nothing to do": "enough", "misses the objective": "misses", "does not fit": "does not fit"}
    for one in facts["levers"]:
        answer = Text(short[one["verdict"]], COLOURS[one["verdict"]], no_wrap=True)
        figures = (f"{one['ttft_ms']:,.1f}", f"{one['itl_ms']:,.1f}", f"{one['users']:,}")
        table.add_row(Text(one["lever"]).append(f" ({one['needs']})", "dim"), *figures, answer)
    return table


def _table(rows: list[dict[str, Any]], left: tuple[str, ...] = ()) -> Table:
    from twostroke.study.plan.account import title

    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(title(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _section(console: Console, title: str, table: Table | None) -> None:
    console.print()
    if title:
        _line(console, title, "bold")
    if table is not None:
        console.print(Padding(table, (0, 0, 0, 2)))


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style or None, markup=False, soft_wrap=True)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
