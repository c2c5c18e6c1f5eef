"""What to change where a load misses its objectives or cannot be served, with the queue that each change leads to."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf

import numpy as np

from twostroke.study.plan.changes import (
    Advice,
    AdviceStep,
    ChangeLimits,
    PlanChange,
    quantized_weights,
    tensor_parallelism,
)
from twostroke.study.plan.load import PlannedLoad
from twostroke.study.traffic.arrivals import ClosedLoop
from twostroke.study.traffic.requests import PromptPiece, Traffic, TrafficRequest

BUDGETS = (128, 256, 1024, 2048)  # tokens of a step, besides the engine's own 512
STEPS = 3  # decisions at most
GAIN = 1.1  # times as many requests within the objectives that another chunk has to bring
MIN_RELIEF = 0.02  # the part of what is wrong that a change has to take away to be worth a step
COMMON = (1 << 32) - 1  # the name of tokens that all prompts begin with
# Ratios of a rate that cannot be served are worse than any that can.
LOST = 1e6


def load_changes(load: PlannedLoad, limits: ChangeLimits) -> Iterator[PlanChange[PlannedLoad]]:
    """All changes, from what costs nothing to what users notice: chunks, workers, devices, weights, prompts, rate."""
    yield from _chunks(load)
    yield from _workers(load)
    for family in (tensor_parallelism, quantized_weights):
        for one in family(load.plan, limits):
            yield PlanChange(one.family, one.name, replace(load, plan=one.after), one.needs)
    yield from _prefix_caching(load)
    yield from _lower_rate(load)


def load_changes_alone(load: PlannedLoad, limits: ChangeLimits) -> list[PlanChange[PlannedLoad]]:
    """Every change alone; of chunks the best one, in place of a row for each."""
    found = list(load_changes(load, limits))
    chunks = [one for one in found if one.family == "chunks"]
    best = min(chunks, key=lambda one: excess(one.after), default=None)
    return [one for one in found if one.family != "chunks" or one is best]


def advise_load(load: PlannedLoad, limits: ChangeLimits) -> Advice[PlannedLoad]:
    """Take the first change that is enough; else the one that brings most, and then again.

    Chunks cost nothing, so before anything else the size is taken at which a worker carries most, if that is a tenth
    more: other changes then need less.
    """
    steps: list[AdviceStep[PlannedLoad]] = []
    now = load
    while now.verdict != "nothing to do" and len(steps) < STEPS:
        taken = {step.change.family for step in steps}
        options = [one for one in load_changes(now, limits) if one.family not in taken]
        best = _next(now, options)
        if best is None:
            break
        problem = _worst(now)
        steps.append(AdviceStep(problem, now.binds[problem], now, best))
        now = best.after
    return Advice(load, tuple(steps), now)


def _next(now: PlannedLoad, options: Sequence[PlanChange[PlannedLoad]]) -> PlanChange[PlannedLoad] | None:
    chunks = [one for one in options if one.family == "chunks"]
    solving = [one for one in options if one.after.verdict == "nothing to do"]
    if chunks and now.rate is not None and not (solving and solving[0].family == "chunks"):
        most = max(chunks, key=lambda one: one.after.max_rate_within)
        if most.after.max_rate_within > GAIN * now.max_rate_within:
            return most
    if solving:
        return solving[0]
    best = min(options, key=lambda one: excess(one.after), default=None)
    helps = best is not None and excess(best.after) < inf and excess(best.after) <= (1 - MIN_RELIEF) * excess(now)
    return best if helps else None


def excess(load: PlannedLoad) -> float:
    """How far a load is over its objectives: the largest ratio to a limit; `LOST` times the ratio to the highest rate
    if it cannot be served."""
    if not load.parts:
        rate = (load.rate or 0.0) / load.replicas
        return LOST * rate / load.max_rate if load.max_rate > 0 else inf
    return max(_ratios(load).values(), default=0.0)


def _ratios(load: PlannedLoad) -> dict[str, float]:
    limits = {"TTFT": load.objectives.ttft_s, "ITL": load.objectives.itl_s}
    return {name: sum(load.parts[name]) / limit for name, limit in limits.items() if limit is not None}


def _worst(load: PlannedLoad) -> str:
    """The objective that is missed by the largest ratio, or the "rate" of a load that cannot be served."""
    ratios = _ratios(load) if load.parts else {"rate": inf}
    return max(ratios, key=lambda name: ratios[name])


def _chunks(load: PlannedLoad) -> Iterator[PlanChange[PlannedLoad]]:
    """Change the chunk: larger ones read weights less often, smaller ones keep others waiting less."""
    for budget in BUDGETS:
        name = f"steps of {budget:,} tokens"
        yield PlanChange("chunks", name, replace(load, budget=budget), f"{load.budget:,} now")


def _workers(load: PlannedLoad) -> Iterator[PlanChange[PlannedLoad]]:
    """Add as few workers as keep the objectives; twice as many where no number is enough."""
    rate, within = load.rate, load.max_rate_within
    enough = ceil(rate / within) if rate is not None and within > 0 else 2 * load.replicas
    count = max(load.replicas + 1, enough)
    more = (count - load.replicas) * load.plan.tp
    needs = f"{more:,} more device{'s' if more > 1 else ''}"
    yield PlanChange("workers", f"{count:,} workers like this one", replace(load, replicas=count), needs)


def _prefix_caching(load: PlannedLoad) -> Iterator[PlanChange[PlannedLoad]]:
    """Let prompts begin alike, for half of the mean prompt."""
    common = int(np.mean(load.traffic.prompts)) // 2
    if common and float(np.mean(load.traffic.shared)) < 0.9 * common:
        name = f"prefix caching of {common:,} tokens"
        yield PlanChange("prompts", name, replace(load, traffic=sharing(load.traffic, common)), "if all begin alike")


def _lower_rate(load: PlannedLoad) -> Iterator[PlanChange[PlannedLoad]]:
    """Lower the rate to what these workers carry; halve the number of users."""
    rate, users = load.rate, load.traffic.concurrency
    if users is not None and users > 1:
        fewer = Traffic(load.traffic.arrivals, ClosedLoop(users // 2), load.traffic.seed)
        yield PlanChange("rate", f"{users // 2:,} users at once", replace(load, traffic=fewer), "others are refused")
    carried = load.max_rate_within * load.replicas
    if rate is not None and 0 < carried < rate:
        slower = replace(load, traffic=load.traffic.at_rate(carried))
        yield PlanChange("rate", f"{carried:,.3g} requests/s", slower, "others are refused")


def sharing(traffic: Traffic, common: int) -> Traffic:
    """The same requests, whose first `common` tokens are the same where a prompt is longer."""

    def changed(one: TrafficRequest) -> TrafficRequest:
        if one.prompt_tokens <= common:
            return one
        pieces, left = [PromptPiece(COMMON, common)], common
        for piece in one.pieces:
            gone = min(left, piece.tokens)
            left -= gone
            if piece.tokens > gone:
                pieces.append(PromptPiece(piece.name, piece.tokens - gone))
        return replace(one, pieces=tuple(pieces))

    return Traffic([changed(one) for one in traffic.arrivals], traffic.pattern, traffic.seed)
