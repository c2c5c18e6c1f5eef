"""What can be changed of a plan: families of changes, from the mildest to the strongest.

The order is that of source 002's decision framework, with what asks nothing of users or of quality first. Tiled
attention is taken for granted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Generic, TypeVar

from twostroke.study.plan.plan import Plan
from twostroke.study.plan.techniques import Technique
from twostroke.study.plan.weights import FORMATS

DEGREES = (2, 4, 8, 16)
ENGINE_FORMATS = ("bf16", "int8", "int4")  # what `--weights` of this engine takes

Made = TypeVar("Made")


@dataclass(frozen=True)
class PlanChange(Generic[Made]):
    """A change of a plan, or of a load.

    Attributes:
        family: changes of one family replace each other.
        after: the plan, or the load, with it.
        needs: its price or its condition, in a few words.
    """

    family: str
    name: str
    after: Made
    needs: str


@dataclass(frozen=True)
class AdviceStep(Generic[Made]):
    """One decision.

    Attributes:
        problem: "memory", "TTFT", "ITL", "both together", or the "rate" of a load that cannot be served.
        binds: what the problem is bound by: "memory", "compute", "bandwidth", "link", "queueing", or "interference".
        before: the plan, or the load, with the steps before.
        change: what is changed now.
    """

    problem: str
    binds: str
    before: Made
    change: PlanChange[Made]


@dataclass(frozen=True)
class Advice(Generic[Made]):
    """What was asked for, decisions in order, and what all of them lead to; the verdict of `after` is the answer."""

    asked: Made
    steps: tuple[AdviceStep[Made], ...]
    after: Made

    @property
    def changes(self) -> list[PlanChange[Made]]:
        """The changes that hold in the end: the last of each family."""
        last = {step.change.family: step.change for step in self.steps}
        return [step.change for step in self.steps if last[step.change.family] is step.change]


@dataclass(frozen=True)
class ChangeLimits:
    """What may be changed.

    Attributes:
        tp: maximum devices for tensor parallelism.
        formats: formats that weights may be in.
        techniques: by the names of `--method`.
        apart: whether prefill and decode may have workers of their own.
    """

    tp: int
    formats: tuple[str, ...]
    techniques: Mapping[str, Technique]
    apart: bool = True


ChangeFamily = Callable[[Plan, ChangeLimits], Iterator[PlanChange[Plan]]]


def tensor_parallelism(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Divide each product among more devices."""
    for tp in DEGREES:
        divided = all(kind.heads % tp == 0 for kind in plan.model.layers)
        if plan.tp < tp <= limits.tp and plan.machine.link is not None and divided:
            more = tp - plan.tp
            needs = f"{more} more device{'s' if more > 1 else ''}"
            yield PlanChange("devices", f"tensor parallelism of {tp}", replace(plan, tp=tp), needs)


def prefill_workers(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Prefill and decode apart: neither waits for the other (DistServe, Zhong et al. 2024, arXiv:2401.09670)."""
    if (
        limits.apart
        and not plan.disaggregated
        and plan.transfer_s is not None
        and plan.transfer_s <= plan.prefill.seconds
    ):
        name = "prefill and decode on workers of their own"
        yield PlanChange(
            "apart", name, replace(plan, disaggregated=True), f"{plan.tp} more device{'s' if plan.tp > 1 else ''}"
        )


def quantized_weights(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Store weights in fewer bytes."""
    size = plan.weights.total(plan.model)
    made = [FORMATS[name] for name in limits.formats if name != "mxfp4" or plan.model.weights == "mxfp4"]
    smaller = [one for one in made if one.total(plan.model) < 0.95 * size]
    for weights in sorted(smaller, key=lambda one: -one.total(plan.model)):
        yield PlanChange("weights", f"weights in {weights.name}", replace(plan, weights=weights), "check the answers")


def speculation(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Make the same answers in fewer steps, by guesses."""
    for name in ("lookup", "speculative-draft", "speculative-student"):
        if (technique := limits.techniques.get(name)) is not None and not plan.technique.method:
            yield PlanChange("technique", technique.name, replace(plan, technique=technique), f"if {technique.assumed}")


def students(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Let a student decode, which has fewer bytes of weights."""
    for name in ("refresh", "overfill"):
        technique = limits.techniques[name]
        assert technique.companion is not None
        smaller = technique.companion.weights.total(plan.model) < 0.7 * plan.weights.total(plan.model)
        if smaller and not plan.technique.method:
            yield PlanChange("technique", technique.name, replace(plan, technique=technique), "a student answers")


def half_of_the_kv(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Keep one copy of a repeated prompt (PTDO) in place of all."""
    if plan.technique == limits.techniques["repeat"]:
        technique = limits.techniques["ptdo"]
        yield PlanChange("technique", technique.name, replace(plan, technique=technique), "decodes from the last copy")


def dropping(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Decode from fewer entries."""
    technique = limits.techniques["drop"]
    if not plan.technique.method and technique.kept(plan.workload.prompt) < plan.workload.prompt:
        yield PlanChange("technique", technique.name, replace(plan, technique=technique), "forgets the middle")


def compression(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Prefill fewer tokens of the same prompt."""
    technique = limits.techniques.get("compress")
    if technique is not None and not plan.technique.method:
        yield PlanChange("technique", technique.name, replace(plan, technique=technique), "half of the tokens are gone")


def prefix_caching(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Let prompts begin alike, so that the prefix index has half of each."""
    load = plan.workload
    if load.shared < load.prompt // 2:
        shared = replace(load, shared=load.prompt // 2)
        name = "prefix caching of half of the prompt"
        yield PlanChange("prompts", name, replace(plan, workload=shared), "if half is the same for all")


def shorter_prompts(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Halve the prompts, the last step of source 002's framework."""
    load = plan.workload
    if load.prompt > 1:
        shorter = replace(load, prompt=ceil(load.prompt / 2), shared=load.shared // 2)
        yield PlanChange("length", "prompts of half the length", replace(plan, workload=shorter), "other prompts")


def fewer_sequences(plan: Plan, limits: ChangeLimits) -> Iterator[PlanChange[Plan]]:
    """Run fewer sequences at once; the others wait."""
    count = plan.workload.concurrency
    while count > 1:
        count = count // 2
        name = f"{count} sequence{'s' if count > 1 else ''} at once"
        changed = replace(plan, workload=replace(plan.workload, concurrency=count))
        yield PlanChange("batch", name, changed, "others wait")


# For each problem the families that may solve it, in the order in which they are tried.
FAMILIES_BY_PROBLEM: Mapping[str, tuple[ChangeFamily, ...]] = {
    "memory": (
        half_of_the_kv, tensor_parallelism, quantized_weights, fewer_sequences, dropping, compression, shorter_prompts,
    ),
    "TTFT": (tensor_parallelism, quantized_weights, prefix_caching, compression, shorter_prompts),
    "ITL": (
        half_of_the_kv, tensor_parallelism, quantized_weights, speculation, students, dropping, fewer_sequences,
        shorter_prompts,
    ),
    "both together": (tensor_parallelism, prefill_workers, quantized_weights, fewer_sequences, shorter_prompts),
}  # fmt: skip


def changes_alone(plan: Plan, limits: ChangeLimits) -> list[PlanChange[Plan]]:
    """Every change alone, and what the techniques that raise quality would cost."""
    order = (
        prefix_caching, tensor_parallelism, prefill_workers, quantized_weights, half_of_the_kv, speculation, students,
        dropping, compression, fewer_sequences, shorter_prompts,
    )  # fmt: skip
    found = [change for family in order for change in family(plan, limits)]
    if not plan.technique.method:
        for name in ("repeat", "ptdo"):
            technique = limits.techniques[name]
            fits = technique.entered(plan.workload.prompt) + plan.workload.output <= plan.model.max_position
            if fits:
                needs = "for answers that need it"
                found.append(PlanChange("technique", technique.name, replace(plan, technique=technique), needs))
    return found
