"""`twostroke plan`: what it will take, before it is bought."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag
from twostroke.cli.report import note, print_json
from twostroke.cli.traffic import above_zero
from twostroke.errors import InvalidRequest
from twostroke.fields import LARGE

if TYPE_CHECKING:
    from twostroke.checkpoints.checkpoint import Checkpoint
    from twostroke.planning.plan import Plan, Workload
    from twostroke.traffic.requests import Traffic


def _load(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Load", **settings)


def _here(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="This machine", **settings)


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A named model, a GGUF file, or a directory with a config.json.")
    ] = None,
    *,
    on: Annotated[
        str | None, typer.Option(help="A named machine, such as h100; a TOML or JSON file of one; or here.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    concurrency: Annotated[
        int | None, typer.Option(help="Sequences that decode at once.", show_default="1, or what the rate needs")
    ] = None,
    shared_prefix: Annotated[int, typer.Option(help="First tokens of each prompt that are in the prefix index.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective for TTFT, in milliseconds.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Objective for ITL, in milliseconds.")] = None,
    percentile: Annotated[float, _load(help="Of TTFT and ITL, which has to keep the objectives.")] = 99.0,
    rate: Annotated[float | None, _load(help="Requests per second, at random times.")] = None,
    burstiness: Annotated[
        float,
        _load(callback=above_zero, help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts."),
    ] = 1.0,
    users: Annotated[int | None, _load(min=1, help="Users who ask again as soon as they are answered.")] = None,
    workload: Annotated[
        str, _load(help="synthetic, or sharegpt: lengths as in its conversations, in place of the tokens above.")
    ] = "synthetic",
    trace: Annotated[
        Path | None, _load(metavar="FILE", help="Requests as lines of JSON in Mooncake's format.", show_default="none")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="bf16, fp8, int8, int4, int4-g128 or mxfp4.", show_default="as published")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share each product (tensor parallelism).")] = 1,
    max_tp: Annotated[int, typer.Option(min=1, help="Most devices that advice may ask for.")] = 8,
    method: Annotated[
        str,
        typer.Option(
            help="How answers are made: plain, repeat, ptdo, drop, overfill, refresh, lookup, speculative-student; "
            "with --draft also speculative-draft and compress."
        ),
    ] = "plain",
    draft: Annotated[str | None, typer.Option(help="A smaller model with the same tokenizer, named as MODEL.")] = None,
    acceptance: Annotated[
        float | None, typer.Option(help="Share of guesses that stand.", show_default="as measured, by kind of draft")
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Fraction of the peak rate that products reach.", show_default="the machine's")
    ] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots into this file.")] = None,
    measure: Annotated[
        bool, _here("--measure", help="Instead: measure this machine, in 40 s, for plans --on here.")
    ] = False,
    verify: Annotated[
        bool, _here("--verify", help="Instead: run this engine here, and show how far off its predictions are.")
    ] = False,
    models: Annotated[
        list[str] | None,
        _here(metavar="MODEL", help="What is verified: names, with commas between.", show_default="three small ones"),
    ] = None,
    quick: Annotated[bool, _here("--quick", help="Fewer and shorter cells: 90 s a model, not 6 minutes.")] = False,
    seconds: Annotated[float | None, _here(help="For each model.", show_default="330, or 80 if --quick")] = None,
    threads: Annotated[int | None, _here(help="CPU threads.", show_default="one for each core")] = None,
    output: Annotated[
        Path | None, _here(dir_okay=False, metavar="FILE", help="Keep raw numbers in this file, model by model.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict memory, TTFT, ITL and what to change, from a model's config and a machine's peaks."""
    if measure:
        from twostroke.cli.plan_measure import run as run_measure

        run_measure(threads, output, as_json)
        return
    if verify:
        from twostroke.cli.plan_verify import run as run_verify

        run_verify([*([model] if model else []), *(models or [])], quick, seconds, threads, output, as_json)
        return
    if model is None or on is None:
        missing = "a model" if model is None else "--on MACHINE"
        raise InvalidRequest(f"a plan needs {missing}, as in: twostroke plan llama-3-70b --on h100")
    from twostroke.cli.plan_load import print_load
    from twostroke.cli.plan_tables import print_tables
    from twostroke.planning.account import account
    from twostroke.planning.here import stored_format
    from twostroke.planning.levers import ENGINE_FORMATS, Limits
    from twostroke.planning.load import load_facts, make_load, shape_of
    from twostroke.planning.measured import machine_for
    from twostroke.planning.models import find_model
    from twostroke.planning.plan import Workload, make_plan
    from twostroke.planning.techniques import Companion, techniques
    from twostroke.planning.weights import FORMATS, weight_format
    from twostroke.traffic.objectives import Objectives

    found, checkpoint = find_model(model)
    machine = machine_for(on, efficiency, note)
    form = stored_format(checkpoint) if weights is None and checkpoint is not None else None
    form = form or weight_format(weights or found.weights)
    companion = None
    if draft is not None:
        other = find_model(draft)
        drafted = weight_format(other.model.weights) if other.checkpoint is None else stored_format(other.checkpoint)
        companion = Companion(other.model, drafted)
    known = techniques(found, companion, acceptance)
    if method not in known:
        raise InvalidRequest(f"there is no plan for the method {method!r}; there is one for {', '.join(known)}")
    shape = Workload(prompt_tokens, output_tokens, concurrency or 1, shared_prefix, ttft_ms, itl_ms)
    traffic = _traffic(shape, rate, users, burstiness, workload, trace)
    if traffic is not None and known[method].method:
        raise InvalidRequest("a load is planned for plain generation: leave out --method, or the rate")
    if traffic is not None:
        shape = shape_of(traffic, ttft_ms, itl_ms)
    made = make_plan(found, machine, form, tp, shape, known[method])
    load = None
    if traffic is not None:
        ttft_s, itl_s = (None if ms is None else ms / 1e3 for ms in (ttft_ms, itl_ms))
        load = make_load(made, traffic, Objectives(ttft_s, itl_s, percentile))
        made = replace(made, workload=replace(shape, concurrency=concurrency or load.sequences))
    engine = checkpoint is not None and machine.kind == "cpu" and tp == 1
    limits = Limits(1, ENGINE_FORMATS, known, apart=False) if engine else Limits(max_tp, tuple(FORMATS), known)
    facts = account(made, limits)
    if load is not None:
        facts["load"] = load_facts(load)
    if engine:
        assert checkpoint is not None
        facts["engine"] = _engine(model, checkpoint, weights or "stored", made, limits, draft)
    if html is not None:
        from twostroke.planning.advice import advise
        from twostroke.planning.page import write_page

        advised = advise(made, limits)
        write_page(html, made, advised.plan if advised.steps else None, facts)
        note(f"wrote {html}")
    if as_json:
        print_json(facts)
        return
    print_tables(facts)
    if load is not None:
        print_load(facts["load"])


def _traffic(
    shape: "Workload", rate: float | None, users: int | None, burstiness: float, workload: str, trace: Path | None
) -> "Traffic | None":
    """The requests, if a load is asked for. Raises InvalidRequest."""
    from twostroke.planning.load import drawn
    from twostroke.traffic.arrivals import ClosedLoop
    from twostroke.traffic.trace import read_trace

    if rate is not None and not 0 < rate < LARGE:
        raise InvalidRequest(f"--rate must be above 0 requests a second, not {rate:g}")
    if rate is not None and users is not None:
        raise InvalidRequest("say --rate or --users, not both")
    if workload not in ("synthetic", "sharegpt"):
        raise InvalidRequest(f"--workload is synthetic or sharegpt, not {workload!r}")
    if trace is not None:
        found = read_trace(trace)
        if users is not None:
            return found.closed(ClosedLoop(users))
        return found if rate is None else found.at_rate(rate)
    if rate is None and users is None:
        if workload != "synthetic":
            raise InvalidRequest("--workload sharegpt needs --rate or --users")
        return None
    return drawn(shape, rate, users, burstiness, workload == "sharegpt")


def _engine(
    name: str, checkpoint: "Checkpoint", weights: str, made: "Plan", limits: Any, draft: str | None
) -> dict[str, Any]:
    """What this engine allocates for the plan and for what is advised, exactly, and the commands that start them."""
    from twostroke.planning.advice import advise
    from twostroke.planning.here import engine_memory, pool_bytes, serve_command

    def facts(plan: "Plan") -> dict[str, Any]:
        form = weights if plan.weights.name == made.weights.name else plan.weights.name
        memory = engine_memory(checkpoint, form)
        command = serve_command(plan, name, form, memory, draft)
        return {
            "backend": memory.backend,
            "weights_bytes": memory.matrices + memory.vectors,
            "pool_bytes": pool_bytes(plan, memory),
            "command": shlex.join(command),
            "method": dict(plan.technique.method),
        }

    advised = advise(made, limits)
    return facts(made) | {"advised": facts(advised.plan) if advised.steps else None}
