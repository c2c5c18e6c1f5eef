"""`twostroke simulate`: the engine, or many of them behind a router, on a virtual clock."""

import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, checked, choice_settings, option, spread
from twostroke.cli.parsers import parse_size
from twostroke.cli.report import note, print_json, progress_bar
from twostroke.cli.traffic import WEIGHTS_HELP, TrafficOptions, above_zero, zero_or_more
from twostroke.engine.options import LLMOptions
from twostroke.fields import rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.study.simulate.engine_setup import EngineSetup
    from twostroke.study.simulate.fleet import Fleet
    from twostroke.study.traffic.objectives import Objectives
    from twostroke.study.traffic.requests import Traffic

HERE = "here"
MAX_WORKERS = 10_000  # each takes 0.6 MB
ROUTERS = ("round-robin", "least-loaded", "kv-aware")
Number = float | None
_engine = partial(typer.Option, rich_help_panel="Engine")
_fleet = partial(typer.Option, rich_help_panel="Workers")


def _declared(name: str) -> Any:
    """An option with the rule of the real engine's."""
    rule = rules(LLMOptions)[name]
    return option(rule, panel="Engine", **({} if rule.choices else {"callback": checked(rule)}))


@dataclass(frozen=True)
class EngineOptions:
    """One engine and the machine that it runs on."""

    on: Annotated[str, _engine(help="A named machine, such as h100, a file of one, or here: measured for seconds.")]
    weights: Annotated[str | None, _engine(help=WEIGHTS_HELP, show_default="as published")] = None
    kv_bits: Annotated[int, _engine(help="Bits of a number in the KV cache: 16, 8, or 6 (K of 8, V of 4).")] = 16
    tp: Annotated[int, _engine(min=1, help="Devices that share each product (tensor parallelism).")] = 1
    efficiency: Annotated[
        Number, _engine(help="Fraction of the peak rate that products reach.", show_default="the machine's")
    ] = None
    kv_bytes: Annotated[
        Any, _engine(parser=parse_size, metavar="SIZE", help="Bytes for KV.", show_default="what weights leave")
    ] = None
    page_size: Annotated[int, _declared("page_size")] = LLMOptions.page_size
    prefix_index: Annotated[str, _declared("prefix_index")] = LLMOptions.prefix_index
    max_step_tokens: Annotated[int, _declared("max_step_tokens")] = LLMOptions.max_step_tokens
    max_running: Annotated[int, _declared("max_running")] = LLMOptions.max_running
    itl_ms: Annotated[
        Number, _engine(callback=above_zero, help="ITL objective of the scheduler: chunks shrink to meet it.")
    ] = None
    host_us: Annotated[
        Number,
        _engine(
            callback=zero_or_more,
            help="Microseconds in which Python prepares a step.",
            show_default="0; here: measured",
        ),
    ] = None
    method: Annotated[
        str,
        _engine(
            help="How answers are made: plain, repeat, ptdo, drop, overfill, refresh, speculative-student; with "
            "--draft also speculative-draft and compress, with --draft mtp speculative-mtp."
        ),
    ] = "plain"
    draft: Annotated[
        str | None,
        _engine(help="A smaller model with the same tokenizer, named as MODEL; or mtp, the model's own head."),
    ] = None
    acceptance: Annotated[
        Number, _engine(help="Share of guesses that stand.", show_default="as measured, by kind of draft")
    ] = None

    def setup(self, name: str) -> "EngineSetup":
        """Raises InvalidRequest, UnknownModel."""
        from twostroke.engine.scheduler import SchedulerConfig
        from twostroke.study.simulate.engine_setup import machine_setup

        shared: dict[str, Any] = {name: getattr(self, name) for name in ("weights", "kv_bits", "kv_bytes", "page_size")}
        shared["index"] = self.prefix_index
        shared["scheduler"] = SchedulerConfig(self.max_step_tokens, self.max_running, self.itl_ms)
        if self.on == HERE:
            from twostroke.study.simulate.model_timing import measured_setup

            if self.tp > 1 or self.efficiency is not None or self.host_us is not None:
                raise typer.BadParameter("this machine is measured: leave out --tp, --efficiency and --host-us")
            if self.method != "plain":
                raise typer.BadParameter("techniques are simulated on machines with a name: say --on h100, for example")
            return measured_setup(name, **shared, progress=note)
        return machine_setup(
            name,
            self.on,
            **shared,
            tp=self.tp,
            efficiency=self.efficiency,
            host_s=(self.host_us or 0.0) / 1e6,
            method=self.method,
            draft=self.draft,
            acceptance=self.acceptance,
        )


@dataclass(frozen=True)
class FleetOptions:
    """Workers, their router and links, and faults."""

    workers: Annotated[
        int | None, _fleet(min=1, max=MAX_WORKERS, help="Engines of both strokes.", show_default="1")
    ] = None
    prefill_workers: Annotated[int, _fleet(min=0, max=MAX_WORKERS, help="Engines that prefill only.")] = 0
    decode_workers: Annotated[int, _fleet(min=0, max=MAX_WORKERS, help="Engines that decode only.")] = 0
    router: Annotated[str, _fleet(help="Which worker a request goes to.", **choice_settings(ROUTERS))] = "least-loaded"
    link_gbs: Annotated[
        Number, _fleet(callback=above_zero, help="GB/s of KV from a prefill to a decode worker.", show_default="none")
    ] = None
    link_latency_ms: Annotated[
        float, _fleet(callback=zero_or_more, help="Milliseconds that each transfer takes besides.")
    ] = 1.0
    worker_life_s: Annotated[
        Number, _fleet(callback=above_zero, help="Mean seconds until a worker dies.", show_default="never")
    ] = None
    worker_down_s: Annotated[float, _fleet(callback=zero_or_more, help="Seconds until another takes its place.")] = 10.0
    lost_transfers: Annotated[float, _fleet(min=0, max=0.99, help="Share of transfers that never arrive.")] = 0.0
    fault_seed: Annotated[int, _fleet(min=0, help="Of deaths and losses.")] = 0

    def fleet(self, setup: "EngineSetup") -> "Fleet":
        """Raises InvalidRequest."""
        from twostroke.study.simulate.fleet import Fleet, FleetFaults, KvLink

        apart = bool(self.prefill_workers or self.decode_workers)
        together = self.workers or (0 if apart else 1)
        link = None if self.link_gbs is None else KvLink(self.link_gbs * 1e9, self.link_latency_ms / 1e3)
        faults = FleetFaults(self.worker_life_s, self.worker_down_s, lost=self.lost_transfers, seed=self.fault_seed)
        return Fleet(setup, together, self.prefill_workers, self.decode_workers, self.router, link, faults)


@dataclass(frozen=True)
class OtherModel:
    """Another model of a fleet: its share of the requests, and what differs from the first one's options."""

    model: str
    share: float
    workers: int = 1
    on: str = ""
    tp: int = 0

    @classmethod
    def of(cls, text: str) -> "OtherModel":
        """Of `MODEL,share=0.3,workers=2,on=l4,tp=2`. Raises BadParameter."""
        model, *fields = text.split(",")
        try:
            given = dict(field.split("=", 1) for field in fields)
            share = float(given.pop("share"))
            found = cls(model, share, int(given.pop("workers", 1)), given.pop("on", ""), int(given.pop("tp", 0)))
        except (ValueError, KeyError):
            found, given = None, {"": ""}
        if found is None or given or not 0 < found.share < 1 or not 1 <= found.workers <= MAX_WORKERS or found.tp < 0:
            raise typer.BadParameter(f"{text!r}: write MODEL,share=0.3 with workers=, on= and tp= as wanted")
        return found


@spread
def simulate(
    model: Annotated[str, typer.Argument(help="A named model, a GGUF file, or a directory with a config.json.")],
    *,
    engine_options: EngineOptions,
    traffic_options: TrafficOptions,
    fleet_options: FleetOptions,
    slo_ttft_ms: Annotated[Number, typer.Option(callback=above_zero, help="TTFT objective, for goodput.")] = None,
    slo_itl_ms: Annotated[
        Number, typer.Option(callback=above_zero, help="ITL objective: of the 99th percentile of an answer's gaps.")
    ] = None,
    also: Annotated[
        list[str] | None,
        _fleet(
            metavar="MODEL,KEY=VALUE,...",
            help="Another model with workers of its own: share= of the requests, and workers=, on=, tp=.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve requests by the engine's own scheduler, placement and prefix index on a virtual clock. A cost model stands
    in for the kernels. Latencies, goodput and utilization over time come out in seconds."""
    from twostroke.cli.simulate_report import print_report
    from twostroke.study.traffic.objectives import Objectives

    traffic_options.check()
    objectives = Objectives.of_ms(slo_ttft_ms, slo_itl_ms)
    traffic = traffic_options.traffic()
    others = [OtherModel.of(text) for text in also or []]
    fleets = {model: fleet_options.fleet(engine_options.setup(model))}
    for one in others:
        engine = replace(engine_options, on=one.on or engine_options.on, tp=one.tp or engine_options.tp)
        together = replace(fleet_options, workers=one.workers, prefill_workers=0, decode_workers=0)
        fleets[one.model] = together.fleet(engine.setup(one.model))
    if len(fleets) <= len(others):
        raise typer.BadParameter("each model of a fleet is named once", param_hint="--also")
    shares = [1 - sum(one.share for one in others), *(one.share for one in others)]
    facts = {"model": model, "machine": engine_options.on, "seed": traffic.seed}
    facts |= {"workload": traffic_options.describe(traffic), "arrivals": traffic.pattern.describe()}
    facts |= describe(fleets[model]) | {"objectives": asdict(objectives)} | run(fleets, traffic, objectives, shares)
    print_json(facts) if as_json else print_report(facts)


def describe(fleet: "Fleet") -> dict[str, Any]:
    setup = fleet.setup
    return {
        "engine": {
            "kv_pages": setup.pages,
            "page_size": setup.page_size,
            "prefix_index": setup.index,
            "technique": setup.technique.name,
            "assumed": setup.technique.assumed,
            "host_s": setup.costs.host_s,
            "token_s": setup.costs.token_s,
            "request_s": setup.http.request_s,
            "prompt_s": setup.http.prompt_s,
            **asdict(setup.scheduler),
            "in_flight": setup.asynchronous,
        },
        "workers": {"together": fleet.together, "prefill": fleet.prefill, "decode": fleet.decode},
        "router": fleet.router,
        "link": None if fleet.link is None else asdict(fleet.link),
        "faults": asdict(fleet.faults),
    }


def run(
    fleets: "Mapping[str, Fleet]", traffic: "Traffic", objectives: "Objectives", shares: "Sequence[float]" = (1.0,)
) -> dict[str, Any]:
    """All figures, with a bar on a terminal. Each fleet serves a model, and gets its share of the requests.

    Latencies and rates are those of all; what happens over time is that of the first fleet.
    """
    from twostroke.study.simulate.figures import DEFINITIONS, SimulationFigures
    from twostroke.study.simulate.simulated_request import SimulatedRequest
    from twostroke.study.simulate.simulation import Simulation

    figures, began = SimulationFigures(objectives), time.perf_counter()
    parts = [traffic] if len(fleets) == 1 else traffic.split(shares)
    found, first = list[dict[str, Any]](), list[Simulation]()
    with progress_bar("requests", len(traffic.arrivals)) as advance:
        for (model, fleet), part in zip(fleets.items(), parts, strict=True):
            own = figures if len(fleets) == 1 else SimulationFigures(objectives)

            def ended(call: SimulatedRequest, own: SimulationFigures = own) -> None:
                own.ended(call)
                if own is not figures:
                    figures.ended(call)
                advance()

            watch = None if first else figures.watch
            first.append(Simulation(fleet, part, watch, ended, keep=False))
            first[-1].run()
            found.append(_of_fleet(model, fleet) | own.summary(first[-1]))
    wall_s, came = time.perf_counter() - began, len(traffic.arrivals)
    made = figures.summary(first[0]) | {"sent": came, "steps": sum(one["steps"] for one in found)}
    wall = {"wall_s": wall_s, "requests_per_wall_second": came / wall_s}
    return made | wall | {"fleets": found, "over_time": figures.over_time(first[0]), "definitions": DEFINITIONS}


def _of_fleet(model: str, fleet: "Fleet") -> dict[str, Any]:
    """What serves a model."""
    from twostroke.study.simulate.step_costs import RooflineCosts

    costs = fleet.setup.costs
    known = costs.roofline if isinstance(costs, RooflineCosts) else None
    return {
        "model": model,
        "machine_title": "this machine" if known is None else known.machine.title,
        "weights": f"{fleet.setup.model.weights} weights" if known is None else known.weights.title(known.machine),
        "kv_bits": fleet.setup.model.kv_bits,
        "devices": 1 if known is None else known.tp,
        "workers_in_all": fleet.size,
    }
