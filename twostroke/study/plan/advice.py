"""Source 002's decision framework as a program: what is wrong, what binds, which lever next, and what it brings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twostroke.study.plan.changes import (
    FAMILIES_BY_PROBLEM,
    ChangeFamily,
    ChangeLimits,
    PlanChange,
    prefill_workers,
    tensor_parallelism,
)
from twostroke.study.plan.plan import Plan

PROBLEMS = {  # in words
    "memory": "It does not fit",
    "TTFT": "TTFT is over its objective",
    "ITL": "ITL is over its objective",
    "both together": "Each objective is kept alone, but not both where prefill and decode share steps",
}
MIN_RELIEF = 0.01  # the part of what is wrong that a lever has to take away to be worth trying


@dataclass(frozen=True)
class AdviceStep:
    """One decision.

    Attributes:
        problem: "memory", "TTFT", "ITL", or "both together".
        binds: what the problem is bound by: "memory", "compute", "bandwidth", "link", or "interference" of strokes.
        before: the plan with the steps before.
        lever: what is changed; its plan has all changes so far.
    """

    problem: str
    binds: str
    before: Plan
    lever: PlanChange[Plan]


@dataclass(frozen=True)
class Advice:
    """Steps in order, and the plan with all of them.

    `plan.verdict` is the answer; where it is not "nothing to do", no levers are left that help.
    """

    steps: tuple[AdviceStep, ...]
    plan: Plan

    @property
    def changes(self) -> list[PlanChange[Plan]]:
        """The levers that count in the end: of one family, and of lengths each."""
        last = {step.lever.family: step.lever for step in self.steps}
        return [step.lever for step in self.steps if last[step.lever.family] is step.lever]


def problems(plan: Plan) -> list[str]:
    """The problems of a plan in the order in which they are tackled: "memory", "TTFT", "ITL", "both together"."""
    return [*([] if plan.fits else ["memory"]), *plan.missed()]


def binds(plan: Plan, problem: str) -> str:
    """What a problem is bound by."""
    if problem == "memory":
        return "memory"
    if problem == "both together":
        return "interference"
    return (plan.prefill if problem == "TTFT" else plan.decode()).bound


def amount(plan: Plan, problem: str) -> float:
    """The size of a problem, where less is better: bytes needed for each byte that there is, or milliseconds."""
    if problem == "memory":
        memory = plan.memory
        return (memory.weights + memory.passing + plan.workload.concurrency * memory.kv_per_user) / plan.capacity
    return {"TTFT": plan.ttft_ms, "ITL": plan.itl_ms, "both together": plan.ttft_beside_ms}[problem]


def advise(plan: Plan, limits: ChangeLimits, leave_out: Sequence[ChangeFamily] = ()) -> Advice:
    """Tackle one problem after the other, with levers on top of each other, until none is left or none helps."""
    steps: list[AdviceStep] = []
    now = plan
    while (step := next(_next(now, limits, leave_out), None)) is not None:
        steps.append(step)
        now = step.lever.after
    return Advice(tuple(steps), now)


def without_more_devices(plan: Plan, limits: ChangeLimits) -> Advice:
    """Advice that adds no device."""
    return advise(plan, limits, (tensor_parallelism, prefill_workers))


def _next(plan: Plan, limits: ChangeLimits, leave_out: Sequence[ChangeFamily]) -> Iterator[AdviceStep]:
    """The next decision, if a lever helps with any problem."""
    wrong = problems(plan)
    for problem in wrong:
        for family in FAMILIES_BY_PROBLEM[problem]:
            if family in leave_out:
                continue
            options = [one for one in family(plan, limits) if _helps(plan, one, problem, wrong)]
            if options:
                solved = (one for one in options if problem not in problems(one.after))
                best = min(options, key=lambda one: amount(one.after, problem))
                yield AdviceStep(problem, binds(plan, problem), plan, next(solved, best))
        if problem == "memory":  # what does not fit has no times
            return


def _helps(plan: Plan, lever: PlanChange[Plan], problem: str, wrong: Sequence[str]) -> bool:
    """Whether a lever takes away a part of a problem and makes no new one."""
    better = amount(lever.after, problem) < (1 - MIN_RELIEF) * amount(plan, problem)
    new = set(problems(lever.after)) - set(wrong)
    return better and (not new or new == {"both together"})  # which is told only where each alone is kept
