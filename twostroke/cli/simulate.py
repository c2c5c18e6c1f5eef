"""`twostroke simulate`: the engine, or many of them behind a router, on a virtual clock."""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, choice_settings, option, spread
from twostroke.cli.parsers import parse_size
from twostroke.cli.report import latency_table, note, print_json, stderr_console
from twostroke.cli.traffic import WEIGHTS_HELP, TrafficOptions, above_zero, zero_or_more
from twostroke.engine.options import LLMOptions
from twostroke.fields import rules

if TYPE_CHECKING:
    from twostroke.study.simulate.engine_setup import EngineSetup
    from twostroke.study.simulate.fleet import Fleet
    from twostroke.study.traffic.objectives import Objectives
    from twostroke.study.traffic.requests import Traffic

HERE = "here"
ROUTERS = ("round-robin", "least-loaded", "kv-aware")
Number = float | None


def _engine(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Engine", **settings)


def _fleet(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Workers", **settings)


def _declared(name: str) -> Any:
    """An option with the rule of the real engine's."""
    return option(rules(LLMOptions)[name], panel="Engine")


@dataclass(frozen=True)
class EngineOptions:
    """One engine and the machine that it runs on."""

    on: Annotated[str, _engine(help="A named machine, such as h100, a file of one, or here: measured for seconds.")]
    weights: Annotated[str | None, _engine(help=WEIGHTS_HELP, show_default="as published")] = None
    kv_bits: Annotated[int, _engine(help="Bits of a number in the KV cache, 16 or 8.")] = 16
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
            "--draft also speculative-draft and compress."
        ),
    ] = "plain"
    draft: Annotated[str | None, _engine(help="A smaller model with the same tokenizer, named as MODEL.")] = None
    acceptance: Annotated[
        Number, _engine(help="Share of guesses that stand.", show_default="as measured, by kind of draft")
    ] = None

    def setup(self, name: str) -> "EngineSetup":
        """Raises InvalidRequest, UnknownModel."""
        from twostroke.engine.scheduler import SchedulerConfig
        from twostroke.study.simulate.machine_setup import machine_setup

        scheduler = SchedulerConfig(self.max_step_tokens, self.max_running, self.itl_ms)
        if self.on == HERE:
            from twostroke.study.simulate.local_setup import measured_setup

            if self.tp > 1 or self.efficiency is not None or self.host_us is not None:
                raise typer.BadParameter("this machine is measured: leave out --tp, --efficiency and --host-us")
            if self.method != "plain":
                raise typer.BadParameter("techniques are simulated on machines with a name: say --on h100, for example")
            return measured_setup(
                name, self.weights, self.kv_bytes, self.page_size, self.prefix_index, scheduler, progress=note
            )
        return machine_setup(
            name,
            self.on,
            weights=self.weights,
            kv_bits=self.kv_bits,
            tp=self.tp,
            efficiency=self.efficiency,
            kv_bytes=self.kv_bytes,
            page_size=self.page_size,
            index=self.prefix_index,
            scheduler=scheduler,
            host_s=(self.host_us or 0.0) / 1e6,
            method=self.method,
            draft=self.draft,
            acceptance=self.acceptance,
        )


@dataclass(frozen=True)
class FleetOptions:
    """Workers, their router and links, and faults."""

    workers: Annotated[int | None, _fleet(min=1, help="Engines of both strokes.", show_default="1")] = None
    prefill_workers: Annotated[int, _fleet(min=0, help="Engines that prefill only.")] = 0
    decode_workers: Annotated[int, _fleet(min=0, help="Engines that decode only.")] = 0
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
    as_json: JsonFlag = False,
) -> None:
    """Serve requests by the engine's own scheduler, placement and prefix index on a virtual clock. A cost model stands
    in for the kernels. Latencies, goodput and utilization over time come out in seconds."""
    from twostroke.study.traffic.objectives import Objectives

    traffic_options.check()
    ttft_s, itl_s = (None if ms is None else ms / 1e3 for ms in (slo_ttft_ms, slo_itl_ms))
    objectives = Objectives(ttft_s, itl_s)
    traffic = traffic_options.traffic()
    fleet = fleet_options.fleet(engine_options.setup(model))
    facts = {"model": model, "machine": engine_options.on, "seed": traffic.seed}
    facts |= {"workload": traffic_options.describe(traffic), "arrivals": traffic.pattern.describe()}
    facts |= describe(fleet) | {"objectives": asdict(objectives)} | run(fleet, traffic, objectives)
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


def run(fleet: "Fleet", traffic: "Traffic", objectives: "Objectives") -> dict[str, Any]:
    """All figures, with a bar on a terminal."""
    from rich.progress import Progress

    from twostroke.study.simulate.figures import DEFINITIONS, SimulationFigures
    from twostroke.study.simulate.simulated_request import SimulatedRequest
    from twostroke.study.simulate.simulation import Simulation

    figures, began = SimulationFigures(objectives), time.perf_counter()
    with Progress(console=stderr_console(), transient=True, disable=not stderr_console().is_terminal) as bar:
        task = bar.add_task("requests", total=len(traffic.arrivals))

        def ended(call: SimulatedRequest) -> None:
            figures.ended(call)
            bar.advance(task)

        service = Simulation(fleet, traffic, figures.watch, ended, keep=False)
        service.run()
    wall_s = time.perf_counter() - began
    wall = {"wall_s": wall_s, "requests_per_wall_second": service.came / wall_s}
    return figures.summary(service) | wall | {"over_time": figures.over_time(service), "definitions": DEFINITIONS}


def print_report(facts: dict[str, Any]) -> None:
    """Latencies, rates, and utilization over time."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(latency_table(facts, ",.2f"))
    console.print(_over_time(facts["over_time"]))
    for line in remarks(facts):
        console.print(line, soft_wrap=True, markup=False)


def _over_time(rows: list[dict[str, Any]], most: int = 16) -> Any:
    """A table of at most `most` rows, each the mean of neighbouring intervals."""
    from rich.table import Table

    table = Table(title="over time", box=None, header_style="bold", title_justify="left")
    for name in (
        "from, s",
        "busy",
        "compute",
        "bandwidth",
        "running",
        "waiting",
        "KV used",
        "prefill tok/s",
        "decode tok/s",
    ):
        table.add_column(name, justify="right")
    some = -(-len(rows) // most) or 1
    for start in range(0, len(rows), some):
        group = rows[start : start + some]

        def average(name: str, group: list[dict[str, Any]] = group) -> float | None:
            values = [row[name] for row in group]
            return None if values[0] is None else sum(values) / len(values)

        shares = ("busy", "compute", "bandwidth")
        cells = ["-" if (one := average(name)) is None else f"{one:.0%}" for name in shares]
        counts = [f"{average(name) or 0:,.1f}" for name in ("running", "waiting")]
        rates = [f"{average(f'{kind}_tokens_per_second') or 0:,.0f}" for kind in ("prefill", "decode")]
        table.add_row(f"{group[0]['at_s']:g}", *cells, *counts, f"{average('kv') or 0:.0%}", *rates)
    return table


def remarks(facts: dict[str, Any]) -> list[str]:
    """Lines of text: rates, what was assumed, and how long it took."""
    engine, workers = facts["engine"], facts["workers"]
    lines = [
        f"{facts['completed']:,} of {facts['sent']:,} requests in {facts['duration_s']:,.1f} s: "
        f"{facts['requests_per_second'] or 0:,.2f} requests/s, {facts['output_tokens_per_second'] or 0:,.1f} generated "
        f"and {facts['total_tokens_per_second'] or 0:,.1f} tokens/s in all"
    ]
    if facts["goodput"] is not None:
        met = {key: facts["objectives"][key] for key in ("ttft_s", "itl_s") if facts["objectives"][key] is not None}
        wanted = " and ".join(f"{key.removesuffix('_s').upper()} of {value * 1e3:g} ms" for key, value in met.items())
        lines.append(f"goodput {facts['goodput']:,.2f} requests/s within {wanted} ({facts['met']:.1%} of all)")
    lines.append(
        f"prefix hits {facts['hit_rate'] or 0:.1%} of prefilled tokens, {facts['preemptions']:,} preemptions, "
        f"{facts['steps']:,} steps"
    )
    fleet = (
        f"{workers['together']} of both strokes"
        if workers["together"]
        else (
            f"{workers['prefill']} that prefill, {workers['decode']} that decode, "
            f"{facts['moved_bytes'] / 1e9:,.2f} GB of KV moved at {facts['link']['rate'] / 1e9:g} GB/s"
        )
    )
    lines.append(
        f"workers: {fleet}; router {facts['router']}; each {engine['kv_pages']:,} pages of {engine['page_size']}, "
        f"steps of {engine['max_step_tokens']} tokens, {'a step in flight' if engine['in_flight'] else 'step by step'}"
    )
    if facts["deaths"] or facts["lost_transfers"]:
        lines.append(
            f"{facts['deaths']} workers died and {facts['lost_transfers']} transfers were lost: {facts['moves']} times "
            f"a request began again elsewhere, fault seed {facts['faults']['seed']}"
        )
    if engine["technique"] != "plain":
        assumed = f", {engine['assumed']}" if engine["assumed"] else ""
        lines.append(f"answers by {engine['technique']}{assumed}")
    lines.append(
        f"assumed: Python takes {engine['host_s'] * 1e6:,.0f} us a step and {engine['token_s'] * 1e6:,.0f} us a token; "
        f"answers are as long as asked for"
    )
    lines.append(
        f"simulated in {facts['wall_s']:,.1f} s: {facts['requests_per_wall_second']:,.0f} requests a second of wall "
        f"time, seed {facts['seed']}"
    )
    return lines
