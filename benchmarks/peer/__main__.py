"""The command: `setup` makes environments and weights; `run` compares, after setting up whatever is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.peer.engines import ENGINES
from benchmarks.peer.environments import WORK, CannotSetUp, ensure_environment
from benchmarks.peer.figures import DEFINITIONS
from benchmarks.peer.random_shapes import SHAPES
from benchmarks.peer.report import record, table
from benchmarks.peer.turns import Workload, compare
from benchmarks.peer.weights import ensure_weights
from benchmarks.results_file import RESULTS, of_this_run
from benchmarks.terminal import say
from twostroke.errors import TwostrokeError
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.system.machine import describe as describe_machine

ALL = ",".join(ENGINES)
KNOWN = {**CATALOG, **SHAPES}
MODELS = "smollm2-135m,qwen2.5-coder-0.5b,qwen2.5-coder-1.5b"
PRESETS = (Workload("batch", 256, 64, batch=8), Workload("long", 8000, 32))

app = typer.Typer(help="Compare engines side by side on this machine.", no_args_is_help=True, add_completion=False)
Engines = Annotated[str, typer.Option(help="Names separated by commas.")]
Models = Annotated[str, typer.Option(help="Names in the catalog or of random_shapes.py, separated by commas.")]
Work = Annotated[Path, typer.Option(help="Folder of environments, weights and logs.")]


def names(text: str, known: dict[str, Any]) -> list[str]:
    """Parse `a,b`. Unknown names are an error; duplicates are dropped."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found or not set(found) <= set(known):
        raise typer.BadParameter(f"{text!r}: there are {', '.join(known)}")
    return found


@app.command()
def setup(engines: Engines = ALL, models: Models = MODELS, work: Work = WORK) -> None:
    """Install each engine in its own environment, and convert models for them. Existing ones are kept."""
    chosen, work, failed = names(engines, ENGINES), work.expanduser().resolve(), False
    for name in chosen:
        try:
            say(f"{name}: installing")
            ensure_environment(ENGINES[name], work)
            for model in names(models, KNOWN):
                say(f"{name}: {model}")
                ensure_weights(ENGINES[name], model, work)
        except (CannotSetUp, TwostrokeError) as error:
            say(f"{name}: {error}")
            failed = True
    if failed:
        raise typer.Exit(1)


@app.command()
def run(
    *,
    models: Models = MODELS,
    engines: Engines = ALL,
    workloads: Annotated[str, typer.Option(help="Any of single, batch (8 x 256 + 64), long (8000 + 32).")] = "single",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="In the workload `single`.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=1, help="In the workload `single`.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once, in the workload `single`.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds; medians are reported.")] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    amx: Annotated[bool, typer.Option(help="Whether engines may use the processor's tiles, if it has any.")] = True,
    apart: Annotated[bool, typer.Option("--apart", help="Load an engine for each turn: two do not fit.")] = False,
    work: Work = WORK,
    output: Annotated[Path, typer.Option(help="Folder of the JSON.")] = RESULTS,
) -> None:
    """Measure engines in turn, print a table for each model and workload, and save the raw numbers."""
    known = {one.name: one for one in (Workload("single", prompt_tokens, output_tokens, batch), *PRESETS)}
    chosen, work = names(engines, ENGINES), work.expanduser().resolve()
    todo = [(model, known[name]) for model in names(models, KNOWN) for name in names(workloads, known)]
    from benchmarks.peer.bandwidth import memory_read  # imports PyTorch, which --help must not need

    read = memory_read(threads)
    machine = describe_machine()
    facts = machine | {"memory_read": read, "threads": threads, "rounds": rounds, "amx": amx}
    facts |= {"definitions": DEFINITIONS, "prompts": "random ordinary tokens, fresh every round, the same for all"}
    results: list[dict[str, Any]] = []
    path = of_this_run("peers", output)
    for model, workload in todo:
        try:
            measurements = compare(model, workload, chosen, rounds, threads, work, say, amx=amx, apart=apart)
        except TwostrokeError as error:
            say(f"{model}: {error}")
            continue
        typer.echo(table(model, workload, measurements) + "\n")
        results.append(record(model, workload, measurements))
        output.mkdir(parents=True, exist_ok=True)  # after each, so that results are kept if the next is interrupted
        path.write_text(json.dumps(facts | {"results": results}))
    where = f"{machine['machine']['cpu']}{'' if amx else ' without AMX'}, {threads} threads, medians of {rounds}"
    typer.echo(f"{where}; memory read {read['bytes_per_second'] / 1e9:.0f} GB/s ({read['what']})")


if __name__ == "__main__":
    app(prog_name="benchmarks.peer")
