"""`twostroke plan`: what a deployment will take, before it is bought."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag
from twostroke.cli.report import print_json

if TYPE_CHECKING:
    from twostroke.checkpoints.checkpoint import Checkpoint
    from twostroke.planning.plan import Lever, Plan, Workload


def plan(
    model: Annotated[str, typer.Argument(help="A named model, a GGUF file, or a directory with a config.json.")],
    *,
    on: Annotated[str, typer.Option(help="A named machine, such as h100, or a TOML or JSON file of one.")],
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    concurrency: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 1,
    shared_prefix: Annotated[int, typer.Option(help="First tokens of each prompt that are in the prefix index.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective for TTFT, in milliseconds.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Objective for ITL, in milliseconds.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="bf16, fp8, int8, int4, int4-g128 or mxfp4.", show_default="as published")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share each product (tensor parallelism).")] = 1,
    efficiency: Annotated[
        float | None, typer.Option(help="Fraction of the peak rate that products reach.", show_default="the machine's")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict memory, TTFT, ITL and what to change, from a model's config and a machine's peaks."""
    from twostroke.planning.here import stored_format
    from twostroke.planning.machines import find_machine
    from twostroke.planning.models import find_model
    from twostroke.planning.plan import Workload, levers, make_plan, solving
    from twostroke.planning.weights import weight_format

    found, checkpoint = find_model(model)
    if weights is None and checkpoint is not None:
        form = stored_format(checkpoint)
    else:
        form = weight_format(weights or found.weights)
    workload = Workload(prompt_tokens, output_tokens, concurrency, shared_prefix, ttft_ms, itl_ms)
    made = make_plan(found, find_machine(on, efficiency), form, tp, workload)
    options = [] if made.verdict == "nothing to do" else levers(made)
    advised = solving(made, options)
    facts = describe(made, options, advised)
    if checkpoint is not None and made.machine.kind == "cpu":
        facts["engine"] = _engine(model, checkpoint, weights or "stored", workload)
    if as_json:
        print_json(facts)
    else:
        print_tables(facts)


def describe(plan: "Plan", options: "list[Lever]", advised: "Lever | None") -> dict[str, Any]:
    """All facts, for JSON. Milliseconds, bytes, FLOPs; `verdict` is one of three answers."""
    from twostroke.planning.plan import BATCHES, CHUNKS
    from twostroke.planning.specification import VALUE_BYTES

    memory, prefill, decode = plan.memory, plan.prefill, plan.decode()
    load = plan.workload
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "source": plan.model.source,
        "machine": plan.machine.title,
        "machine_source": plan.machine.source,
        "assumed": {
            "compute": plan.machine.compute,
            "bandwidth": plan.machine.memory_share,
            "link": plan.machine.link_share,
        },
        "weights": plan.weights.name,
        "devices": plan.tp,
        "memory": {
            "weights_bytes": memory.weights,
            "kv_bytes_per_token": plan.model.kv_values * VALUE_BYTES,
            "kv_bytes_per_user": memory.kv_per_user,
            "room_for_kv_bytes": memory.room,
            "users": memory.users,
        },
        "prefill": _step(prefill) | {"flops_by_part": plan.model.prefill_flops(load.prompt - load.shared, load.shared)},
        "decode": _step(decode) | {"tokens_per_second": plan.tokens_per_second},
        "attention_overtakes_at": plan.model.crossover(),
        "kv_break_even_bytes_per_second": plan.break_even_bandwidth,
        "compute_bound_batch": plan.compute_bound_batch(),
        "batches": [
            {"batch": batch, "itl_ms": 1e3 * step.seconds, "tokens_per_second": batch / step.seconds}
            for batch in BATCHES
            if batch <= memory.users
            for step in [plan.decode(batch)]
        ],
        "chunks": [
            {"chunk": chunk, "ttft_ms": 1e3 * plan.chunked_ttft(chunk), "longest_itl_ms": 1e3 * step.seconds}
            for chunk in CHUNKS
            if load.concurrency > 1 and chunk < load.prompt
            for step in [plan.mixed(chunk)]
        ],
        "verdict": plan.verdict,
        "missed": plan.missed(),
        "advice": None if advised is None else advised.name,
        "levers": [
            {
                "lever": one.name,
                "ttft_ms": one.plan.ttft_ms,
                "itl_ms": one.plan.itl_ms,
                "users": one.plan.memory.users,
                "verdict": one.plan.verdict,
            }
            for one in options
        ],
    }


def _engine(name: str, checkpoint: "Checkpoint", weights: str, load: "Workload") -> dict[str, Any]:
    """What this engine allocates, exactly, and the command that starts it."""
    from twostroke.backends.native.weights import FORMATS
    from twostroke.planning.here import engine_memory, serve_command

    memory = engine_memory(checkpoint, FORMATS, weights)
    pool = memory.pool(load.concurrency, load.prompt + load.output)
    command = serve_command(name, weights, pool, load.concurrency, load.itl_ms)
    return {"weights_bytes": memory.matrices + memory.vectors, "pool_bytes": pool, "command": shlex.join(command)}


def _step(step: Any) -> dict[str, Any]:
    return {
        "ms": 1e3 * step.seconds,
        "flops": step.flops,
        "bytes": step.bytes,
        "intensity": step.flops / step.bytes,
        "bound": step.bound,
        "link_ms": 1e3 * step.link_s,
    }


def print_tables(facts: dict[str, Any]) -> None:
    """The same in plain words."""
    from rich.console import Console

    console, memory, assumed = Console(highlight=False), facts["memory"], facts["assumed"]

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line(
        f"{facts['model']}, {facts['parameters'] / 1e9:.2f} B parameters, weights {facts['weights']}, "
        f"on {facts['devices']} x {facts['machine']}"
    )
    line(
        f"assumed: {assumed['compute']:.0%} of the peak rate, {assumed['bandwidth']:.0%} of the bandwidth, "
        f"{assumed['link']:.0%} of the link; no queueing"
    )
    line(
        f"memory: weights {memory['weights_bytes'] / 1e9:.1f} GB, KV {memory['kv_bytes_per_token']:,} bytes a token, "
        f"{memory['kv_bytes_per_user'] / 1e9:.3f} GB a user; room for {memory['users']:,} users"
    )
    if facts["verdict"] == "does not fit":
        line("it does not fit; times are those that it would have if it did")
    for stroke, name in (("prefill", "TTFT"), ("decode", "ITL")):
        one = facts[stroke]
        line(f"{stroke}: {name} {one['ms']:.1f} ms, {one['intensity']:.1f} FLOPs a byte, bound by {one['bound']}")
    line(
        f"KV from a tier or another worker is quicker than a prefill above "
        f"{facts['kv_break_even_bytes_per_second'] / 1e9:.2f} GB/s"
    )
    crossover, batch = facts["attention_overtakes_at"], facts["compute_bound_batch"]
    line(
        f"scores take more FLOPs than all matrices from {crossover:,} tokens" if crossover else "scores never dominate"
    )
    line(
        f"matrices of a decode step are bound by compute from a batch of {batch:,}" if batch else "always by bandwidth"
    )
    for title, rows in (("batches", facts["batches"]), ("chunks", facts["chunks"]), ("levers", facts["levers"])):
        if rows:
            console.print(_table(title, rows))
    if engine := facts.get("engine"):
        line(f"this engine allocates {engine['weights_bytes']:,} bytes of weights and {engine['pool_bytes']:,} of KV")
        line(f"start it: {engine['command']}")
    missed = f" ({', '.join(facts['missed'])})" if facts["missed"] else ""
    line(f"verdict: {facts['verdict']}{missed}")
    if facts["levers"]:
        line(f"advice: {facts['advice'] or 'no single change is enough'}")


def _table(title: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title=title, box=None, header_style="bold", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("lever", "verdict") else "right")
    for row in rows:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table
