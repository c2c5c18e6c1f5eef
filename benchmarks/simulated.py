"""A server under load beside the simulation of the same requests: `python -m benchmarks.simulated`.

    python -m benchmarks.simulated --models smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b

The model's steps are timed in this process first. Then a server starts, and a few requests of other lengths tell what
HTTP adds (`http_costs.py`). Then each load is measured by `twostroke bench serve`, and simulated: the same lengths,
prefixes and times of arrival, round by round. Steps are timed once more between any two runs, and a run is simulated
with those of just before and just after it, since a machine that others use too is not the same for minutes. Nothing is
taken from the run itself. Printed are p50 and p99 of TTFT and ITL, and simulated / measured - 1.

How many requests come in a second is a part of what the model could serve, by its timed steps and the queueing of
`twostroke plan`, so each model gets the load that it can take. How long it will take is printed before it begins: the
seconds that the simulation says. Each round is saved as it is measured. The same command on the same day measures the
rounds that are missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import typer

from benchmarks.http_costs import Stream, probes, with_http
from benchmarks.results_file import earlier, save
from benchmarks.server_process import ServerFailed, bench_serve, our_server
from benchmarks.terminal import command_line, ended_by
from twostroke.api.llm import LLM
from twostroke.cli.simulate import run
from twostroke.cli.traffic import TrafficOptions, parse_range
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import TwostrokeError
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.model_timing import ModelTimer, setup_of, time_rounds
from twostroke.study.simulate.step_costs import MeasuredCosts
from twostroke.study.simulate.trial import try_load
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic

LIMIT = 0.15  # error of p50 and p99 that is aimed at
STARTING_S = 3.0  # that `bench serve` takes besides, each time
FIGURES = (("TTFT", "ttft_s"), ("ITL", "itl_s"))
PERCENTILES = ("p50", "p99")
DEFINITIONS = {
    "ttft_s": "first token - arrival, at the client",
    "itl_s": "every gap between consecutive tokens at the client, of all answers together",
    "asked": "options of the load",
    "rate": "requests a second in open loop: --rate, or --part of the highest that queueing over the timed steps says",
    "rounds": "seconds, simulated and measured, of each round; its seed is that of the load + 1000 a round",
    "simulated": "median over rounds of the simulation's figure, with the steps as timed before and after the run",
    "measured": "median over rounds of the server's figure",
    "error": "simulated / measured - 1",
    "http": "seconds that HTTP adds, from requests of other lengths: to a step, a token, a request, a token of its "
    "prompt, one of these that was computed; stalls of steps (mean), and by how much tokens come late; as measured "
    "when the last round was",
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

    def at(self, rate: float) -> Load:
        return replace(self, options=replace(self.options, rate=rate))

    def round(self, number: int) -> Load:
        """With other prompts, since a server would know those of a round before. Lengths and times are others too."""
        return replace(self, options=replace(self.options, seed=(self.options.seed or 0) + 1000 * number))


def loads(rate: float | None, requests: int, seed: int, trace: Path | None) -> list[Load]:
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
        found.append(Load(f"trace {trace.name}", TrafficOptions(rate=rate, trace=trace, requests=requests, seed=seed)))
    return found


def highest_rate(setup: EngineSetup, load: Load) -> float:
    """Requests a second beyond which the queue grows without end: what is served where requests never lack."""
    traffic = replace(load.options, rate=1.0, concurrency=None, requests=100).traffic()
    waiting = Traffic.replayed([replace(one, at=0.0) for one in traffic.arrivals], traffic.seed)
    return try_load(Fleet(setup), waiting, Objectives()).first_token_rate


def probe(url: str, arguments: list[str], directory: Path) -> list[Stream]:
    """Streams of requests that tell what HTTP adds."""
    from twostroke.study.bench.serving.figures import REQUESTS  # which needs an extra

    bench_serve(url, *arguments, "--output", str(directory))
    return [Stream.of(json.loads(line)) for line in (directory / REQUESTS).read_text().splitlines()]


class Comparison:
    """The loads of one model: what is known of each, and the rounds that are missing.

    Attributes:
        facts: by load: what was asked, its rate, the rounds so far, and their figures.
    """

    def __init__(self, model: str, options: argparse.Namespace, known: dict[str, Any]) -> None:
        """Rounds that are `known` count if the same load was asked for."""
        self.model, self.options = model, options
        self.loads = loads(options.rate, options.requests, options.seed, options.trace)
        self.facts: dict[str, dict[str, Any]] = {}
        engine = [f"--itl-ms {options.itl_ms}", f"--kv-bytes {options.kv_bytes}", f"--part {options.part}"]
        for load in self.loads:
            asked = [*load.arguments(), *engine]
            before = known.get(load.name, {})
            self.facts[load.name] = before if before.get("asked") == asked else {"asked": asked, "rounds": []}

    @property
    def missing(self) -> list[tuple[Load, int]]:
        """Loads, and the numbers of their rounds."""
        return [
            (load, number)
            for load in self.loads
            for number in range(len(self.facts[load.name]["rounds"]), self.options.rounds)
        ]

    def measure(self, work: Path) -> None:
        """Everything that is missing. Raises ServerFailed, and what opening a model raises."""
        options = self.options
        typer.echo(f"{self.model}: its steps are timed, then its server's HTTP")
        with LLM(self.model, kv_bytes=options.kv_bytes, itl_ms=options.itl_ms) as llm:
            scheduler = SchedulerConfig(itl_ms=options.itl_ms)
            timing = ModelTimer(llm)
            time_rounds(timing, options.timing_s)
            setup = setup_of(llm, timing.result(), "radix", scheduler)
            self._serve(setup, timing, work)

    def _serve(self, setup: EngineSetup, timing: ModelTimer, work: Path) -> None:
        options = self.options
        itl = "off" if options.itl_ms is None else f"{options.itl_ms:g}"
        asked = ["--model", self.model, "--kv-bytes", str(options.kv_bytes), "--itl-ms", itl]
        with our_server(work, *asked) as server:
            wanted, name = probes(setup.costs), Path(self.model).name
            probed = {kind: probe(server.url, one, work / f"{name} {kind}") for kind, one in wanted.items()}
            setup, http = with_http(setup, probed)
            added = ", ".join(f"{name} {one * 1e3:.3g}" for name, one in http.items())
            typer.echo(f"{self.model}: HTTP adds, in ms: {added}")
            self._compare(setup, timing, http, server.url)

    def _compare(self, setup: EngineSetup, timing: ModelTimer, http: dict[str, float], url: str) -> None:
        """Say how long all that is missing will take; measure it, and simulate it."""
        missing, seconds = list[Load](), 0.0
        for load, number in self.missing:
            one, facts = load.round(number), self.facts[load.name]
            if load.options.concurrency is None:
                rate = load.options.rate or self.options.part * highest_rate(setup, load)
                one = one.at(facts.setdefault("rate", float(f"{rate:.3g}")))
            missing.append(one)
            seconds += run({self.model: Fleet(setup)}, one.options.traffic(), Objectives())["duration_s"] + STARTING_S
        typer.echo(f"{self.model}: {len(missing)} runs, about {seconds / 60:.1f} minutes and the times between them")
        timing.round()
        for load in missing:
            theirs, facts = bench_serve(url, *load.arguments()), self.facts[load.name]
            timing.round()
            ours = run(
                {self.model: Fleet(with_kernels(setup, timing.kernels(2)))}, load.options.traffic(), Objectives()
            )
            facts["rounds"].append({"simulated": percentiles(ours), "measured": percentiles(theirs)})
            facts["figures"] = figures(facts["rounds"])
            facts["simulated_requests_per_wall_second"] = ours["requests_per_wall_second"]
            path = save("simulated", DEFINITIONS, self.model, {"http": http, "loads": self.facts})
            typer.echo(f"{self.model}, {load.name}, round {len(facts['rounds'])}: kept in {path}")


def with_kernels(setup: EngineSetup, kernels: StepPredictor) -> EngineSetup:
    """The setup with other seconds of its kernels, and what Python and HTTP add as before."""
    assert isinstance(setup.costs, MeasuredCosts)
    return replace(setup, costs=replace(setup.costs, predictor=kernels))


def percentiles(facts: dict[str, Any]) -> dict[str, float]:
    """In seconds, of one run."""
    return {f"{name} {column}": facts[key][column] for name, key in FIGURES for column in PERCENTILES}


def figures(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds, and the error of each."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds[0]["measured"]:
        ours, theirs = (median(one[side][name] for one in rounds) for side in ("simulated", "measured"))
        found[name] = {"simulated_s": ours, "measured_s": theirs, "error": ours / theirs - 1}
    return found


def show(model: str, load: str, facts: dict[str, Any]) -> None:
    rate = f", {facts['rate']:g} requests/s" if "rate" in facts else ""
    typer.echo(f"\n{model}, {load}{rate}\n{'':10}{'simulated':>12}{'measured':>12}{'error':>9}")
    for name, one in facts["figures"].items():
        far = "" if abs(one["error"]) <= LIMIT else "  beyond the aim"
        cells = f"{one['simulated_s'] * 1e3:>9.1f} ms{one['measured_s'] * 1e3:>9.1f} ms{one['error']:>+9.1%}"
        typer.echo(f"{name:10}{cells}{far}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
    parser.add_argument("--part", type=float, default=0.3, help="of the highest rate, in open loop")
    parser.add_argument("--rate", type=float, help="requests per second of the loads in open loop, in place of --part")
    parser.add_argument("--requests", type=int, default=60, help="of each load")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each load")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format, stretched to the same rate or part")
    parser.add_argument("--itl-ms", type=float, help="the engines' objective for ITL")
    parser.add_argument("--kv-bytes", type=int, default=1 << 30)
    parser.add_argument("--timing-s", type=float, default=30.0, help="seconds in which the model is timed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="do not count what was measured today")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for model in options.models:
            known = {} if options.again else earlier("simulated", model).get("loads", {})
            compared = Comparison(model, options, known)
            if compared.missing:
                compared.measure(Path(work))
            for name, facts in compared.facts.items():
                show(model, name, facts)


if __name__ == "__main__":
    with ended_by(TwostrokeError, ServerFailed):
        main()
