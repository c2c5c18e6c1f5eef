"""Our server and vLLM's CPU server under the same load, in turn: `python -m benchmarks.serving`.

A round starts each server in turn, runs every load on it with `twostroke bench serve`, and ends it. The first server
alternates between rounds. Prompts are the same for both and new in every round. Weights are the catalog's file for us
and its dequantized values in bfloat16 for vLLM, as in `peers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.peer.__main__ import names
from benchmarks.peer.engines import ENGINES, OURS
from benchmarks.peer.environments import WORK, CannotSetUp, ensure_environment, python
from benchmarks.peer.figures import turn_order
from benchmarks.peer.processes import peak_rss_bytes, tree
from benchmarks.peer.weights import describe, ensure_weights
from benchmarks.quiet import Others, doubt
from benchmarks.results_file import RESULTS, of_this_run
from benchmarks.server_process import ServerFailed, ServerProcess, bench_serve
from benchmarks.terminal import head, row, say
from twostroke.errors import TwostrokeError
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.system.machine import describe as describe_machine

CONTEXT = 4096  # maximum context of both
KV_BYTES = 2 << 30  # as `VLLM_CPU_KVCACHE_SPACE` in `peer/engines.py`
OBJECTIVES = ["--slo-ttft-ms", "2000", "--slo-itl-ms", "200"]
AT_RANDOM, SIZES = ["--rate", "1"], ["--input-tokens", "256", "--output-tokens", "64"]
LOADS = {
    "poisson": [*AT_RANDOM, *SIZES, "--requests", "60"],
    "bursty": [*AT_RANDOM, "--burstiness", "0.25", *SIZES, "--requests", "60"],
    "closed": ["--concurrency", "8", *SIZES, "--requests", "48"],
    "sharegpt": ["--rate", "0.5", "--workload", "sharegpt", "--requests", "40"],
    "prefix": [*AT_RANDOM, "--prefix-tokens", "1024", "--groups", "4", "--input-tokens", "64", "--requests", "60"],
}
COLUMNS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "TTFT p50 ms": lambda facts: scaled(facts["ttft_s"]["p50"]),
    "TTFT p99 ms": lambda facts: scaled(facts["ttft_s"]["p99"]),
    "ITL p50 ms": lambda facts: scaled(facts["itl_s"]["p50"]),
    "ITL p99 ms": lambda facts: scaled(facts["itl_s"]["p99"]),
    "generated tok/s": lambda facts: facts["output_tokens_per_second"],
    "goodput req/s": lambda facts: facts["goodput"],
}


@dataclass
class Turns:
    """All measurements of a server under one load; `failure` is the reason if there are no more."""

    engine: str
    load: str
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failure: str | None = None


def scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def command(engine: str, model: str, threads: int, work: Path) -> list[str]:
    """The command that starts the server, after setting it up if necessary. Raises CannotSetUp, or TwostrokeError."""
    ensure_environment(ENGINES[engine], work)
    weights, interpreter = ensure_weights(ENGINES[engine], model, work), python(ENGINES[engine], work)
    at = ["--host", "127.0.0.1", "--port", "{port}"]
    if engine == OURS:
        own = ["--backend", "native", "--threads", str(threads), "--kv-bytes", str(KV_BYTES)]
        return [str(interpreter), "-m", "twostroke", "serve", "--model", weights, *at, *own]
    # Not `vllm serve`: it looks up the version of a package `vllm`, and the CPU build has another name.
    own = ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--served-model-name", model]
    module = [str(interpreter), "-m", "vllm.entrypoints.openai.api_server", "--model", weights]
    return [*module, *at, *own, "--enable-prompt-tokens-details"]


def measure(server: ServerProcess, load: Sequence[str], seed: int) -> dict[str, Any]:
    """One run of the load generator. Raises ServerFailed with its message."""
    others = Others()
    facts = bench_serve(server.url, "--seed", str(seed), *OBJECTIVES, *load)
    return facts | {"others_cpu": others.cpu, "peak_rss_bytes": peak_rss_bytes(tree(server.pid))}


def compare(
    model: str, loads: dict[str, list[str]], engines: Sequence[str], rounds: int, threads: int, work: Path
) -> list[Turns]:
    """Every engine under every load, `rounds` times."""
    found = {(engine, load): Turns(engine, load) for load in loads for engine in engines}
    working = list(engines)
    for number in range(rounds):
        for engine in turn_order(working, number):
            load = next(iter(loads))
            try:
                say(f"round {number + 1} of {rounds}: starting {engine}")
                started = command(engine, model, threads, work)
                with ServerProcess(engine, started, work, ENGINES[engine].variables(threads, str(work))) as server:
                    for load, arguments in loads.items():
                        say(f"round {number + 1} of {rounds}: {engine}, {load}")
                        found[engine, load].rounds.append(measure(server, arguments, seed=number))
            except (CannotSetUp, ServerFailed, TwostrokeError) as failure:
                found[engine, load].failure = str(failure)
                say(str(failure))
                working.remove(engine)
    return list(found.values())


def table(load: str, arguments: Sequence[str], entries: Sequence[Turns]) -> str:
    """A Markdown table: medians over rounds, and the ratio of ours to each other server's."""
    medians = {
        one.engine: {name: middle([read(facts) for facts in one.rounds]) for name, read in COLUMNS.items()}
        for one in entries
        if one.rounds
    }
    lines = [f"**{load}**: `{' '.join(arguments)}`", "", head(["server", *COLUMNS])]
    for engine, figures in medians.items():
        lines.append(row([engine, *("" if value is None else f"{value:.4g}" for value in figures.values())]))
    for engine in medians:
        if engine != OURS and OURS in medians:
            pairs = zip(medians[OURS].values(), medians[engine].values(), strict=True)
            cells = (f"{mine / theirs:.2f}" if mine is not None and theirs else "" for mine, theirs in pairs)
            lines.append(row([f"{OURS} / {engine}", *cells]))
    lines += [f"\n{one.engine}: {one.failure}" for one in entries if one.failure]
    return "\n".join([*lines, "", *doubt([facts["others_cpu"] for one in entries for facts in one.rounds])])


def middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def main(
    model: Annotated[str, typer.Option(help="Name in the catalog.")] = "smollm2-135m",
    servers: Annotated[str, typer.Option(help="Names separated by commas.")] = f"{OURS},vllm",
    loads: Annotated[str, typer.Option(help=f"Any of {', '.join(LOADS)}, separated by commas.")] = ",".join(LOADS),
    rounds: Annotated[int, typer.Option(min=1, help="Medians are reported.")] = 3,
    requests: Annotated[int | None, typer.Option(min=1, help="Number per load, for a short trial.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    work: Annotated[Path, typer.Option(help="Folder of environments, weights and logs.")] = WORK,
    output: Annotated[Path, typer.Option(help="Folder of the JSON.")] = RESULTS,
) -> None:
    """Compare, print a table for each load, and save the reports of all runs."""
    known = {name: ENGINES[name] for name in (OURS, "vllm")}
    chosen, (model,) = names(servers, known), names(model, CATALOG)
    fewer = [] if requests is None else ["--requests", str(requests)]
    wanted = {load: [*LOADS[load], *fewer] for load in names(loads, LOADS)}
    found = compare(model, wanted, chosen, rounds, threads, work.expanduser().resolve())
    for load, arguments in wanted.items():
        typer.echo(table(load, arguments, [one for one in found if one.load == load]))
    facts = describe_machine() | {"model": model, "threads": threads, "objectives": OBJECTIVES, "loads": wanted}
    facts |= {"weights": {name: describe(ENGINES[name], model) for name in chosen}}
    output.mkdir(parents=True, exist_ok=True)
    path = of_this_run("serving", output)
    path.write_text(json.dumps(facts | {"results": [asdict(one) for one in found]}) + "\n")
    say(str(path))


if __name__ == "__main__":
    typer.run(main)
