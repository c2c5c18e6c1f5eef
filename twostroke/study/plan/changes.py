"""What may be changed about a plan, and how much each change asks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from twostroke.study.plan.plan import Plan
from twostroke.study.roofline.techniques import Technique
from twostroke.study.roofline.weight_formats import FORMATS

DEGREES = (1, 2, 4, 8, 16)
ENGINE_FORMATS = ("bf16", "int8-w8a8", "int4-w4a8")  # what this engine has
NOTHING, SAME_ANSWERS, CLOSE, FEWER_BITS, OTHER_ANSWERS, OTHER_REQUESTS = range(6)  # what a change asks


@dataclass(frozen=True)
class ChangeLimits:
    """What may be changed."""

    tp: int  # maximum devices for tensor parallelism
    formats: tuple[str, ...]  # formats that weights may be in
    techniques: Mapping[str, Technique]  # by the names of `--method`
    apart: bool = True  # whether prefill and decode may have workers of their own


@dataclass(frozen=True)
class Change:
    """One dimension of a configuration that differs from what was asked."""

    name: str
    needs: str  # its condition, in a few words
    asks: int  # what it asks of quality or of users, from `NOTHING` to `OTHER_REQUESTS`


@dataclass(frozen=True)
class PlanCandidate:
    """A configuration, and in what it differs from the one that was asked for."""

    plan: Plan
    changes: tuple[Change, ...] = ()

    @property
    def asks(self) -> int:
        """The most that one of its changes asks, then their sum: less is milder."""
        return 100 * max((one.asks for one in self.changes), default=0) + sum(one.asks for one in self.changes)

    def __add__(self, other: "PlanCandidate") -> "PlanCandidate":
        """The other's configuration, with the changes of both."""
        return PlanCandidate(other.plan, (*self.changes, *other.changes))


ONE_WORKER = Change("one worker", "", NOTHING)


def changes_alone(plan: Plan, limits: ChangeLimits) -> list[PlanCandidate]:
    """Every change of one dimension."""
    dimensions = (_formats, _kv_bits, _degrees, _techniques, other_requests)
    return [one for dimension in dimensions for one in dimension(plan, limits) if one.changes]


def change_space(plan: Plan, limits: ChangeLimits) -> list[PlanCandidate]:
    """All combinations of the dimensions of one worker. Without a change first."""
    found = [PlanCandidate(replace(plan, workers=1, prefill_workers=0))]
    for dimension in (_formats, _kv_bits, _degrees, _techniques):
        found = [one + change for one in found for change in dimension(one.plan, limits)]
    return found


def _formats(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Weights of fewer bytes whose products this machine has."""
    yield PlanCandidate(plan)
    size = plan.weights.total(plan.model)
    for name in limits.formats:
        form = FORMATS[name]
        has = form.arithmetic[0] in plan.machine.flops and (name != "mxfp4-w4a16" or plan.model.weights == name)
        if has and form.total(plan.model) < 0.95 * size:
            asks = CLOSE if form.layer >= 1 else FEWER_BITS
            yield PlanCandidate(
                replace(plan, weights=form), (Change(form.title(plan.machine), "check the answers", asks),)
            )


def _kv_bits(plan: Plan, _: ChangeLimits) -> Iterator[PlanCandidate]:
    yield PlanCandidate(plan)
    if plan.model.kv_bits > 8:
        less = replace(plan, model=plan.model.with_kv_bits(8))
        yield PlanCandidate(less, (Change("KV in 8 bits", "check the answers", CLOSE),))


def _degrees(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Divide each product among more devices, or among fewer."""
    yield PlanCandidate(plan)
    for tp in DEGREES:
        linked = tp == 1 or not plan.machine.unknown_link
        if tp != plan.tp and tp <= max(limits.tp, plan.tp) and linked and plan.model.divides(tp):
            name = f"tensor parallelism of {tp}" if tp > 1 else "no tensor parallelism"
            more = tp - plan.tp
            needs = f"{abs(more)} {'more' if more > 0 else 'fewer'} device{'s' if abs(more) > 1 else ''}"
            yield PlanCandidate(replace(plan, tp=tp), (Change(name, needs, NOTHING),))


def _techniques(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Guesses, students, PTDO for repetition, dropping and compression."""
    yield PlanCandidate(plan)
    known = limits.techniques
    wanted: dict[str, tuple[str, int]] = {}
    if plan.technique == known.get("repeat"):
        wanted = {"ptdo": ("decodes from the last copy", CLOSE)}
    elif not plan.technique.method:
        guesses = ("lookup", "speculative-mtp", "speculative-draft", "speculative-student")
        wanted = {name: (f"if {known[name].assumed}", SAME_ANSWERS) for name in guesses if name in known}
        wanted |= dict.fromkeys(("refresh", "overfill"), ("a student answers", OTHER_ANSWERS))
        if plan.workload.prompt > known["drop"].kept(plan.workload.prompt):
            wanted["drop"] = "forgets the middle", OTHER_ANSWERS
        wanted |= {name: ("half of the tokens are gone", OTHER_ANSWERS) for name in ("compress",) if name in known}
    for name, (needs, asks) in wanted.items():
        yield PlanCandidate(replace(plan, technique=known[name]), (Change(known[name].name, needs, asks),))


def other_requests(plan: Plan, limits: ChangeLimits) -> Iterator[PlanCandidate]:
    """Other requests: prompts that begin alike, fewer sequences at once, shorter prompts."""
    load = plan.workload

    def other(name: str, needs: str, **changed: int) -> PlanCandidate:
        made = replace(plan, workload=replace(load, **changed))
        return PlanCandidate(made, (Change(name, needs, OTHER_REQUESTS),))

    if load.shared < load.prompt // 2:
        yield other("prefix caching of half of the prompt", "if half is the same for all", shared=load.prompt // 2)
    if load.concurrency > 1:
        yield other(f"{load.concurrency // 2} at once", "others wait", concurrency=load.concurrency // 2)
    if load.prompt > 1:
        yield other(
            "prompts of half the length", "other prompts", prompt=ceil(load.prompt / 2), shared=load.shared // 2
        )
