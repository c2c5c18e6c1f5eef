"""Source 002's decision framework as a program: what is wrong, what binds, and which change comes next."""

from collections.abc import Iterator, Sequence

from twostroke.study.plan.changes import (
    FAMILIES_BY_PROBLEM,
    Advice,
    AdviceStep,
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
MIN_RELIEF = 0.01  # the part of what is wrong that a change has to take away to be worth trying


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


def advise(plan: Plan, limits: ChangeLimits, leave_out: Sequence[ChangeFamily] = ()) -> Advice[Plan]:
    """Tackle one problem after the other, with changes on top of each other, until none is left or none helps."""
    steps: list[AdviceStep[Plan]] = []
    now = plan
    while (step := next(_next(now, limits, leave_out), None)) is not None:
        steps.append(step)
        now = step.change.after
    return Advice(plan, tuple(steps), now)


def without_more_devices(plan: Plan, limits: ChangeLimits) -> Advice[Plan]:
    """Advice that adds no device."""
    return advise(plan, limits, (tensor_parallelism, prefill_workers))


def _next(plan: Plan, limits: ChangeLimits, leave_out: Sequence[ChangeFamily]) -> Iterator[AdviceStep[Plan]]:
    """The next decision, if a change helps with any problem."""
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


def _helps(plan: Plan, change: PlanChange[Plan], problem: str, wrong: Sequence[str]) -> bool:
    """Whether a change takes away a part of a problem and makes no new one."""
    better = amount(change.after, problem) < (1 - MIN_RELIEF) * amount(plan, problem)
    new = set(problems(change.after)) - set(wrong)
    return better and (not new or new == {"both together"})  # which is told only where each alone is kept
