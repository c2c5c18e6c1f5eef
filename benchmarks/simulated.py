"""A server under load beside the simulation of the same requests: `python -m benchmarks.simulated`.

The model's steps are timed in this process first. Then a server starts, and a few requests of other lengths tell what
HTTP adds (`http_costs.py`). Then each load is simulated, before it is measured by `twostroke bench serve`: the same
lengths, prefixes and times of arrival, round by round. Printed are p50 and p99 of TTFT and ITL, and
simulated / measured - 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import typer

from benchmarks.http_costs import PROBES, Stream, with_http
from benchmarks.results_file import save
from benchmarks.server_process import ServerFailed, ServerProcess
from twostroke.cli.simulate import run
from twostroke.cli.traffic import TrafficOptions, parse_range
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import TwostrokeError
from twostroke.llm import LLM
from twostroke.planning.timed import time_model
from twostroke.simulation.fleet import Fleet
from twostroke.simulation.here import setup_of
from twostroke.simulation.opening import Setup
from twostroke.traffic.objectives import Objectives

LIMIT = 0.15  # error of p50 and p99 that is aimed at
DEFINITIONS = {
    "ttft_s": "first token - arrival, at the client",
    "itl_s": "every gap between consecutive tokens at the client, of all answers together",
    "simulated": "median over rounds of the simulation's figure",
    "measured": "median over rounds of the server's figure",
    "error": "simulated / measured - 1",
    "http": "seconds that HTTP adds, from requests of other lengths: to a step, a token, a request, a token of its "
    "prompt, one of these that was computed; stalls of steps (mean), and by how much tokens come late",
}


@dataclass(frozen=True)
class Load:
    """One load of the comparison. `options` are those of `bench serve`."""

    name: str
    options: TrafficOptions

    def arguments(self) -> list[str]:
        """The options of `twostroke bench serve` that send it."""
        one, found = self.options, list[str]()
        for name in ("rate", "concurrency", "requests", "trace", "input_tokens", "output_tokens", "seed"):
            if (value := getattr(one, name)) is not None:
                found += [f"--{name.replace('_', '-')}", str(value)]
        found += ["--prefix-tokens", str(one.prefix_tokens), "--groups", str(one.groups)] if one.prefix_tokens else []
        return found + (["--workload", one.workload] if one.workload != "synthetic" else [])


def loads(rate: float, requests: int, seed: int, trace: Path | None) -> list[Load]:
    """In open loop, in closed loop, with shared prefixes, and a trace if there is one."""
    short = parse_range("64-512")
    wanted: dict[str, dict[str, Any]] = {
        "open loop": {"rate": rate, "input_tokens": short},
        "closed loop of 8": {"concurrency": 8, "input_tokens": short},
        "shared prefixes": {"rate": rate, "input_tokens": parse_range("32-128"), "prefix_tokens": 512, "groups": 4},
    }
    common: dict[str, Any] = {"requests": requests, "output_tokens": parse_range("16-96")}
    # Other seeds, since the server would know the prompts of the load before.
    found = [Load(name, TrafficOptions(seed=seed + i, **common, **one)) for i, (name, one) in enumerate(wanted.items())]
    if trace is not None:
        found.append(Load(f"trace {trace.name}", TrafficOptions(trace=trace, requests=requests, seed=seed)))
    return found


def bench_serve(url: str, *arguments: str) -> dict[str, Any]:
    """The figures of `twostroke bench serve`. Raises ServerFailed."""
    command = [sys.executable, "-m", "twostroke", "bench", "serve", "--url", url, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerFailed(f"bench serve: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout)


def probe(url: str, arguments: list[str], directory: Path) -> list[Stream]:
    """Streams of requests that tell what HTTP adds."""
    from twostroke.perf.serving.files import REQUESTS  # which needs an extra

    bench_serve(url, *arguments, "--output", str(directory))
    return [Stream.of(json.loads(line)) for line in (directory / REQUESTS).read_text().splitlines()]


def compare(setup: Setup, load: Load, url: str, rounds: int) -> dict[str, Any]:
    """Simulated, then measured, and the errors."""
    simulated, measured = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(rounds):
        # Prompts of another round would be known to the server. Their lengths and times are others too.
        one = replace(load, options=replace(load.options, seed=(load.options.seed or 0) + 1000 * number))
        simulated.append(run(Fleet(setup), one.options.traffic(), Objectives()))
        measured.append(bench_serve(url, *one.arguments()))
    figures: dict[str, Any] = {}
    for figure in ("ttft_s", "itl_s"):
        for name in ("p50", "p99"):
            ours, theirs = (median(one[figure][name] for one in rows) for rows in (simulated, measured))
            figures[f"{figure.removesuffix('_s').upper()} {name}"] = {
                "simulated_s": ours,
                "measured_s": theirs,
                "error": ours / theirs - 1,
            }
    speed = median(one["requests_per_wall_second"] for one in simulated)
    return {"figures": figures, "simulated_requests_per_wall_second": speed}


def measure(model: str, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All loads of one model."""
    scheduler = SchedulerConfig(itl_ms=options.itl_ms)
    with LLM(model, kv_bytes=options.kv_bytes, itl_ms=options.itl_ms) as llm:
        setup = setup_of(llm, time_model(llm, options.timing_s), "radix", scheduler)
    command = [sys.executable, "-m", "twostroke", "serve", "--model", model, "--host", "127.0.0.1", "--port", "{port}"]
    command += [
        "--kv-bytes",
        str(options.kv_bytes),
        "--itl-ms",
        "off" if options.itl_ms is None else f"{options.itl_ms:g}",
    ]
    found: dict[str, Any] = {}
    with ServerProcess("simulated", command, work) as server:
        probes = {name: probe(server.url, PROBES[name], work / f"{Path(model).name} {name}") for name in PROBES}
        setup, http = with_http(setup, probes)
        typer.echo(f"{model}: HTTP adds, in ms: " + ", ".join(f"{name} {one * 1e3:.3g}" for name, one in http.items()))
        for load in loads(options.rate, options.requests, options.seed, options.trace):
            found[load.name] = compare(setup, load, server.url, options.rounds)
            show(model, load.name, found[load.name]["figures"])
    return {"http": http, "loads": found}


def show(model: str, load: str, figures: dict[str, Any]) -> None:
    typer.echo(f"\n{model}, {load}\n{'':10}{'simulated':>12}{'measured':>12}{'error':>9}")
    for name, one in figures.items():
        far = "" if abs(one["error"]) <= LIMIT else "  beyond the aim"
        cells = f"{one['simulated_s'] * 1e3:>9.1f} ms{one['measured_s'] * 1e3:>9.1f} ms{one['error']:>+9.1%}"
        typer.echo(f"{name:10}{cells}{far}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the loads in open loop")
    parser.add_argument("--requests", type=int, default=60, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each load")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--itl-ms", type=float, help="the engines' objective for ITL")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    parser.add_argument("--timing-s", type=float, default=30.0, help="seconds in which the model is timed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for model in options.models:
            facts = measure(model, options, Path(work))
            typer.echo(f"\nkept in {save('simulated', DEFINITIONS, model, facts)}")


if __name__ == "__main__":
    try:
        main()
    except (TwostrokeError, ServerFailed) as error:
        sys.exit(f"error: {error}")
