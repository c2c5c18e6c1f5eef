"""`twostroke plan`: what it will take, before it is bought."""

import gc
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.parsers import require_directory
from twostroke.cli.plan_options import ConfigurationOptions, HereOptions, WorkloadOptions
from twostroke.cli.report import note, print_json
from twostroke.errors import InvalidRequest
from twostroke.system.atomic_files import atomic_replace

if TYPE_CHECKING:
    from twostroke.models.checkpoints.checkpoint import Checkpoint
    from twostroke.study.plan.changes import ChangeLimits
    from twostroke.study.plan.plan import Plan
    from twostroke.study.plan.search import Advice
    from twostroke.study.plan.service import LoadSimulator


@spread
def plan(
    model: Annotated[
        str | None, typer.Argument(help="A named model, a GGUF file, or a directory with a config.json.")
    ] = None,
    *,
    configuration: ConfigurationOptions,
    asked: WorkloadOptions,
    here: HereOptions,
    every: Annotated[bool, typer.Option("--all", help="Show all tables.")] = False,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots into this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict memory, TTFT, ITL and what to change, from a model's config and a machine's peaks."""
    here.check(model)
    if here.measure:
        from twostroke.cli.plan_verify import run_measure

        run_measure(here.threads, here.output, as_json)
    elif here.verify:
        from twostroke.cli.plan_verify import run as run_verify

        models = [*([model] if model else []), *(here.models or [])]
        run_verify(models, here.quick, here.seconds, here.threads, here.output, as_json)
    else:
        require_directory("--html", html)
        made = _make(model, configuration, asked)
        facts = _facts(made)
        if html is not None:
            from twostroke.study.plan.page.page import render

            with atomic_replace(html) as file:
                file.write(render(made.advice, facts, made.load).encode())
            note(f"wrote {html}")
        if as_json:
            print_json(facts)
            return
        from twostroke.cli.plan_report import print_blocks
        from twostroke.study.plan.report import report

        print_blocks(report(facts, every))


@dataclass(frozen=True)
class _Made:
    """A plan, and what belongs to it."""

    name: str  # of the model, as it was asked for
    checkpoint: "Checkpoint | None"  # its files; None if it is known by its sizes alone
    advice: "Advice"
    limits: "ChangeLimits"  # what advice may change
    load: "LoadSimulator | None"  # simulates the load; None if none is asked for
    stored: str  # what to call its weights for this engine
    configuration: ConfigurationOptions
    asked: WorkloadOptions

    @property
    def plan(self) -> "Plan":
        return self.advice.asked.plan

    @property
    def advised(self) -> "Plan":
        """What is advised; the plan itself where nothing is."""
        return self.advice.best.plan


def _is_here(checkpoint: "Checkpoint | None", made: "Plan") -> bool:
    """Whether it can be started here as it is planned."""
    return checkpoint is not None and made.machine.kind == "cpu" and made.tp == 1


def _make(model: str | None, configuration: ConfigurationOptions, asked: WorkloadOptions) -> _Made:
    """The plan and the advice. Raises InvalidRequest, UnknownModel."""
    if model is None or configuration.on is None:
        missing = "a model" if model is None else "--on MACHINE"
        raise InvalidRequest(f"a plan needs {missing}, as in: twostroke plan llama-3-70b --on h100")
    from twostroke.study.plan.changes import ENGINE_FORMATS, ChangeLimits
    from twostroke.study.plan.loads import mean_profile, require_load
    from twostroke.study.plan.local_machine import machine_for
    from twostroke.study.plan.plan import make_plan
    from twostroke.study.plan.search import LoadSearch, advise
    from twostroke.study.plan.service import LoadSimulator
    from twostroke.study.roofline.named_models import companion_of, find_model
    from twostroke.study.roofline.techniques import choose_technique, techniques
    from twostroke.study.roofline.weight_formats import FORMATS

    files, weights = find_model(model), configuration.weights
    found, checkpoint = files
    machine, form = machine_for(configuration.on, configuration.efficiency, note), files.form(weights)
    known = techniques(found, companion_of(configuration.draft, found), configuration.acceptance)
    technique = choose_technique(known, configuration.method)
    shape, traffic = asked.shape(), asked.traffic()
    if traffic is not None:
        require_load(found, traffic, technique)
        shape = mean_profile(traffic, asked.ttft_ms, asked.itl_ms)
    made = make_plan(found.with_kv_bits(configuration.kv_bits), machine, form, configuration.tp, shape, technique)
    made = replace(made, workers=configuration.workers, budget=configuration.max_step_tokens)
    limits = (
        ChangeLimits(1, ENGINE_FORMATS, known, apart=False)
        if _is_here(checkpoint, made)
        else ChangeLimits(configuration.max_tp, tuple(FORMATS), known)
    )
    load = None if traffic is None else LoadSimulator(traffic, asked.objectives())
    gc.set_threshold(20_000)  # simulations make many objects that stay, which each collection looks at
    advice = advise(made, limits) if load is None else LoadSearch(made, limits, load).advice()
    return _Made(model, checkpoint, advice, limits, load, weights or "stored", configuration, asked)


def _facts(made: _Made) -> dict[str, Any]:
    """The account of a plan, of its load and engine if there are any, and commands."""
    from twostroke.study.plan.account import account

    facts = account(made.advice, made.limits, made.load, made.configuration.device_price)
    if facts["load"] is not None:
        facts["load"]["commands"] = _commands(made)
    if _is_here(made.checkpoint, made.plan):
        facts["engine"] = _engine(made)
    if (budget := made.configuration.memory_budget) is not None:
        from twostroke.study.plan.pairs import pair_advice

        facts["pair"] = pair_advice(made.plan, budget)
    return facts


def _commands(made: _Made) -> dict[str, str]:
    """The commands that simulate the load, as planned and as advised."""
    plans = {"to simulate it": made.plan, "to simulate what is advised": made.advised}
    wanted = {title: plan for title, plan in plans.items() if title == "to simulate it" or plan is not made.plan}
    return {title: shlex.join(_simulate(made, plan)) for title, plan in wanted.items() if plan.memory.users}


def _simulate(made: _Made, plan: "Plan") -> list[str]:
    """The command that simulates a plan under the load."""
    from twostroke.study.roofline.techniques import WITH_DRAFT

    asked, chosen, machine, load = made.asked, made.configuration, plan.machine, made.load
    assert load is not None
    drawn, together = asked.trace is None and asked.workload == "synthetic", plan.workers - plan.prefill_workers
    technique = next(name for name, one in made.limits.techniques.items() if one == plan.technique)
    link = plan.tp * (machine.link or machine.host or 0.0) * machine.link_share / 1e9
    rate = None if load.rate is None else float(f"{load.rate:.4g}")
    options: dict[str, tuple[object, object]] = {  # and what goes without saying
        "on": (chosen.on, None),
        "tp": (plan.tp, 1),
        "weights": (plan.weights.name, plan.model.weights),
        "kv-bits": (plan.model.kv_bits, 16),
        "efficiency": (chosen.efficiency, None),
        "method": (technique, "plain"),
        "draft": (chosen.draft if technique in WITH_DRAFT else None, None),
        "acceptance": (chosen.acceptance if "speculative" in technique else None, None),
        "max-step-tokens": (plan.budget, None),
        "max-running": (plan.max_running, None),
        "prefill-workers": (plan.prefill_workers, 0),
        "decode-workers" if plan.prefill_workers else "workers": (together, 0 if plan.prefill_workers else 1),
        "link-gbs": (link if plan.prefill_workers else None, None),
        "rate": (rate, None),
        "concurrency": (load.traffic.concurrency, None),
        "input-tokens": (asked.prompt_tokens - asked.shared_prefix if drawn else None, None),
        "output-tokens": (asked.output_tokens if drawn else None, None),
        "prefix-tokens": (asked.shared_prefix, 0),
        "workload": (asked.workload, "synthetic"),
        "trace": (asked.trace, None),
        "requests": (1000 if asked.trace is None else None, None),
        "seed": (1 if asked.trace is None else None, None),
        "burstiness": (asked.burstiness, 1.0),
        "slo-ttft-ms": (asked.ttft_ms, None),
        "slo-itl-ms": (asked.itl_ms, None),
    }
    words = ["twostroke", "simulate", made.name]
    for name, (value, default) in options.items():
        words += (
            [] if value in (default, None) else [f"--{name}", f"{value:g}" if isinstance(value, float) else f"{value}"]
        )
    return words


def _engine(made: _Made) -> dict[str, Any]:
    """What this engine allocates for the plan and for what is advised, exactly, and the commands that start them."""
    from twostroke.study.plan.local_engine import engine_memory, pool_bytes, serve_command

    assert made.checkpoint is not None
    checkpoint = made.checkpoint

    def facts(plan: "Plan") -> dict[str, Any]:
        if made.load is not None:  # room for three deviations more sequences than the mean
            from twostroke.study.plan.service import peak_sequences

            plan = replace(plan, workload=replace(plan.workload, concurrency=peak_sequences(plan, made.load)))
        form = made.stored if plan.weights.name == made.plan.weights.name else plan.weights.engine
        memory = engine_memory(checkpoint, form, kv_dtype=plan.model.stored.name if plan.model.kv_bits < 16 else "auto")
        command = serve_command(plan, made.name, form, memory, made.configuration.draft)
        return {
            "backend": memory.backend,
            "weights_bytes": memory.matrices + memory.vectors,
            "pool_bytes": pool_bytes(plan, memory),
            "command": shlex.join(command),
            "method": dict(plan.technique.method),
        }

    advised = None if made.advised is made.plan else facts(made.advised)
    return facts(made.plan) | {"advised": advised}
