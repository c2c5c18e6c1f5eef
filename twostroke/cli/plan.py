"""`twostroke plan`: what it will take, before it is bought."""

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.plan_options import ConfigurationOptions, HereOptions, WorkloadOptions
from twostroke.cli.report import note, print_json
from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.models.checkpoints.checkpoint import Checkpoint
    from twostroke.study.plan.changes import Advice, ChangeLimits
    from twostroke.study.plan.load import PlannedLoad
    from twostroke.study.plan.plan import Plan


@spread
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A named model, a GGUF file, or a directory with a config.json.")
    ] = None,
    *,
    configuration: ConfigurationOptions,
    asked: WorkloadOptions,
    here: HereOptions,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots into this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict memory, TTFT, ITL and what to change, from a model's config and a machine's peaks."""
    if here.measure:
        from twostroke.cli.plan_measure import run as run_measure

        run_measure(here.threads, here.output, as_json)
    elif here.verify:
        from twostroke.cli.plan_verify import run as run_verify

        models = [*([model] if model else []), *(here.models or [])]
        run_verify(models, here.quick, here.seconds, here.threads, here.output, as_json)
    else:
        made = _make(model, configuration, asked)
        facts = _facts(made)
        if html is not None:
            _write_page(html, made, facts)
        print_json(facts) if as_json else _print(facts)


@dataclass(frozen=True)
class _Made:
    """A plan, and what belongs to it.

    Attributes:
        name: of the model, as it was asked for.
        checkpoint: its files; None if it is known by its sizes alone.
        limits: what advice may change.
        load: the plan under a load; None if none is asked for.
        stored: what to call its weights for this engine.
        draft: the companion's name. asked, on, method: what was asked for, the machine, the technique's name.
    """

    name: str
    checkpoint: "Checkpoint | None"
    plan: "Plan"
    limits: "ChangeLimits"
    load: "PlannedLoad | None"
    stored: str
    draft: str | None
    asked: WorkloadOptions
    on: str
    method: str

    @property
    def by_this_engine(self) -> bool:
        """Whether it can be started here as it is planned."""
        return _is_here(self.checkpoint, self.plan)

    @cached_property
    def load_advice(self) -> "Advice[PlannedLoad] | None":
        """What to change under the load; None without one."""
        from twostroke.study.plan.load_advice import advise_load

        return None if self.load is None else advise_load(self.load, self.limits)


def _is_here(checkpoint: "Checkpoint | None", made: "Plan") -> bool:
    return checkpoint is not None and made.machine.kind == "cpu" and made.tp == 1


def _make(model: str | None, configuration: ConfigurationOptions, asked: WorkloadOptions) -> _Made:
    """The plan. Raises InvalidRequest, UnknownModel."""
    machine_name = configuration.on
    if model is None or machine_name is None:
        missing = "a model" if model is None else "--on MACHINE"
        raise InvalidRequest(f"a plan needs {missing}, as in: twostroke plan llama-3-70b --on h100")
    from twostroke.study.plan.changes import ENGINE_FORMATS, ChangeLimits
    from twostroke.study.plan.load import make_load, mean_profile, require_positions
    from twostroke.study.plan.local_engine import stored_format
    from twostroke.study.plan.local_machine import machine_for
    from twostroke.study.plan.models import companion_of, find_model
    from twostroke.study.plan.plan import make_plan
    from twostroke.study.plan.techniques import choose_technique, techniques
    from twostroke.study.plan.weights import FORMATS, weight_format

    found, checkpoint = find_model(model)
    machine = machine_for(machine_name, configuration.efficiency, note)
    weights = configuration.weights
    stored = weights is None and checkpoint is not None
    form = stored_format(checkpoint) if stored and checkpoint else weight_format(weights or found.weights)
    known = techniques(found, companion_of(configuration.draft), configuration.acceptance)
    technique = choose_technique(known, configuration.method)
    shape, traffic, load = asked.shape(), asked.traffic(), None
    if traffic is not None:
        require_positions(found, traffic, technique)
        shape = mean_profile(traffic, asked.ttft_ms, asked.itl_ms)
    made = make_plan(found, machine, form, configuration.tp, shape, technique)
    if traffic is not None:
        load = make_load(made, traffic, asked.objectives())
        beside = load.sequences if asked.concurrency is None else asked.concurrency
        made = replace(made, workload=replace(shape, concurrency=beside))
    engine = _is_here(checkpoint, made)
    limits = (
        ChangeLimits(1, ENGINE_FORMATS, known, apart=False)
        if engine
        else ChangeLimits(configuration.max_tp, tuple(FORMATS), known)
    )
    return _Made(
        model,
        checkpoint,
        made,
        limits,
        load,
        weights or "stored",
        configuration.draft,
        asked,
        machine_name,
        configuration.method,
    )


def _facts(made: _Made) -> dict[str, Any]:
    """The account of a plan, and of its load and engine if there are any."""
    from twostroke.study.plan.account import account
    from twostroke.study.plan.load_account import load_facts

    facts = account(made.plan, made.limits)
    if (advised := made.load_advice) is not None:
        load = load_facts(advised.asked, made.limits, advised)
        facts["load"] = load | {"commands": _commands(made, advised.asked, advised.after)}
    if made.by_this_engine:
        facts["engine"] = _engine(made)
    return facts


def _write_page(path: Path, made: _Made, facts: dict[str, Any]) -> None:
    from twostroke.study.plan.advice import advise
    from twostroke.study.plan.page import write_page

    advised = advise(made.plan, made.limits)
    write_page(path, made.plan, advised.after if advised.steps else None, facts, made.load_advice)
    note(f"wrote {path}")


def _print(facts: dict[str, Any]) -> None:
    from twostroke.cli.plan_report import print_blocks
    from twostroke.study.plan.report import report

    print_blocks(report(facts))


def _commands(made: _Made, load: "PlannedLoad", advised: "PlannedLoad") -> dict[str, str]:
    """The command that simulates the load, that which simulates what is advised, and that which starts it here."""
    found: dict[str, list[str] | None] = {}
    if load.fits:
        found["to simulate it"] = _simulate(made, load)
    if advised is not load and advised.fits:
        found["to simulate what is advised"] = _simulate(made, advised)
    if made.by_this_engine and advised.fits:
        found["to start a worker like that" if advised.replicas > 1 else "to start it"] = _serve(made, advised)
    return {title: shlex.join(words) for title, words in found.items() if words is not None}


def _simulate(made: _Made, load: "PlannedLoad") -> list[str] | None:
    """None for prompts that no option of the command describes."""
    from twostroke.study.plan.load import SEED

    plan, asked, traffic = load.plan, made.asked, load.traffic
    drawn = asked.trace is None and asked.workload == "synthetic"
    words = ["twostroke", "simulate", made.name, "--on", made.on, "--tp", str(plan.tp)]
    words = words[:-2] if plan.tp == 1 else words
    if plan.weights.name not in ("stored", plan.model.weights):
        words += ["--weights", plan.weights.name]
    words += ["--method", made.method] if made.method != "plain" else []
    words += ["--max-step-tokens", str(load.budget)]
    if load.replicas > 1:
        words += ["--workers", str(load.replicas)]
    words += ["--rate", f"{load.rate:.4g}"] if load.rate is not None else ["--concurrency", str(traffic.concurrency)]
    if drawn:
        first = traffic.arrivals[0]
        shared = first.pieces[0].tokens if len(first.pieces) > 1 else 0
        words += ["--input-tokens", str(first.prompt_tokens - shared), "--output-tokens", str(first.output_tokens)]
        words += ["--prefix-tokens", str(shared)] if shared else []
    elif made.load is not None and traffic.shared.sum() != made.load.traffic.shared.sum():
        return None
    else:
        words += ["--workload", "sharegpt"] if asked.trace is None else ["--trace", str(asked.trace)]
    if asked.trace is None:
        words += ["--requests", "1000", "--seed", str(SEED)]
        words += ["--burstiness", f"{asked.burstiness:g}"] if asked.burstiness != 1 and load.rate is not None else []
    for name, limit in (("ttft", asked.ttft_ms), ("itl", asked.itl_ms)):
        words += [] if limit is None else [f"--slo-{name}-ms", f"{limit:g}"]
    return words


def _serve(made: _Made, load: "PlannedLoad") -> list[str]:
    """The command that starts each worker of a load on this engine."""
    from twostroke.study.plan.local_engine import engine_memory, serve_command

    assert made.checkpoint is not None
    plan = replace(load.plan, workload=replace(made.plan.workload, concurrency=load.peak))
    form = made.stored if plan.weights.name == made.plan.weights.name else plan.weights.name
    return serve_command(plan, made.name, form, engine_memory(made.checkpoint, form), made.draft, load.budget)


def _engine(made: _Made) -> dict[str, Any]:
    """What this engine allocates for the plan and for what is advised, exactly, and the commands that start them."""
    from twostroke.study.plan.advice import advise
    from twostroke.study.plan.local_engine import engine_memory, pool_bytes, serve_command

    assert made.checkpoint is not None
    checkpoint = made.checkpoint

    def facts(plan: "Plan") -> dict[str, Any]:
        form = made.stored if plan.weights.name == made.plan.weights.name else plan.weights.name
        memory = engine_memory(checkpoint, form)
        command = serve_command(plan, made.name, form, memory, made.draft)
        return {
            "backend": memory.backend,
            "weights_bytes": memory.matrices + memory.vectors,
            "pool_bytes": pool_bytes(plan, memory),
            "command": shlex.join(command),
            "method": dict(plan.technique.method),
        }

    advised = advise(made.plan, made.limits)
    return facts(made.plan) | {"advised": facts(advised.after) if advised.steps else None}
