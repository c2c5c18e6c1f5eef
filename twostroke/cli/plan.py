"""`twostroke plan`: what it will take, before it is bought."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag
from twostroke.cli.report import note, print_json
from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.checkpoints.checkpoint import Checkpoint
    from twostroke.planning.plan import Plan


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
    concurrency: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 1,
    shared_prefix: Annotated[int, typer.Option(help="First tokens of each prompt that are in the prefix index.")] = 0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective for TTFT, in milliseconds.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Objective for ITL, in milliseconds.")] = None,
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
    from twostroke.cli.plan_tables import print_tables
    from twostroke.planning.account import account
    from twostroke.planning.here import stored_format
    from twostroke.planning.levers import ENGINE_FORMATS, Limits
    from twostroke.planning.measured import machine_for
    from twostroke.planning.models import find_model
    from twostroke.planning.plan import Workload, make_plan
    from twostroke.planning.techniques import Companion, techniques
    from twostroke.planning.weights import FORMATS, weight_format

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
    workload = Workload(prompt_tokens, output_tokens, concurrency, shared_prefix, ttft_ms, itl_ms)
    made = make_plan(found, machine, form, tp, workload, known[method])
    engine = checkpoint is not None and machine.kind == "cpu" and tp == 1
    limits = Limits(1, ENGINE_FORMATS, known, apart=False) if engine else Limits(max_tp, tuple(FORMATS), known)
    facts = account(made, limits)
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
    else:
        print_tables(facts)


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
