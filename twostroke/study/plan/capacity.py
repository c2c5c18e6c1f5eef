"""What a worker could carry at most, by arithmetic alone: it orders what is worth simulating, and answers nothing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twostroke.models.cost import SequenceRows
from twostroke.study.plan.plan import MAX_RUNNING, Plan

BUDGETS = (256, 512, 1024, 2048)  # tokens of a step that are tried


def capacity(plan: Plan, decode_s: Mapping[int, float] | None = None) -> float:
    """The highest rate of all workers whose steps keep the objective for ITL.

    A request takes the steps of its chunks, beside which others decode, and its part of the other decode steps.
    `decode_s`: seconds of a decode step by sequences at once, as `_decode_seconds` has them; None to count them.
    """
    decode_s = _decode_seconds(plan) if decode_s is None else decode_s
    if plan.prefill_workers:
        decoders, output = plan.workers - plan.prefill_workers, plan.workload.output
        decode = max((decoders * batch / (output * seconds) for batch, seconds in decode_s.items()), default=0.0)
        return min(plan.prefill_workers / plan.prefill.seconds, decode)
    return max((_together(plan, batch, seconds) for batch, seconds in decode_s.items()), default=0.0)


def _together(plan: Plan, batch: int, decode_s: float) -> float:
    chunks, beside = _chunks(plan, batch, decode_s)
    if not _keeps(plan, beside):
        return 0.0
    return plan.workers / (chunks * beside + max(0.0, plan.workload.output / batch - chunks) * decode_s)


def _decode_seconds(plan: Plan) -> dict[int, float]:
    """At powers of four and the largest number, as far as they fit and keep the objective for ITL."""
    most, found = min(plan.max_running, plan.memory.users), dict[int, float]()
    for batch in [*(4**i for i in range(10) if 4**i < most), *([most] if most else [])]:
        if not _keeps(plan, seconds := plan.decode(batch).seconds):
            break
        found[batch] = seconds
    return found


def _keeps(plan: Plan, seconds: float) -> bool:
    return plan.workload.itl_ms is None or 1e3 * seconds <= plan.workload.itl_ms


def _chunks(plan: Plan, batch: int, decode_s: float) -> tuple[float, float]:
    """How many steps a prompt takes, less than one where a step takes several prompts, and the mean seconds of such a
    step beside so many that decode, which take `decode_s` alone."""
    entered = plan.technique.entered(plan.workload.prompt) - plan.workload.shared
    left = max(1, plan.budget - batch)
    chunk, prompts = min(entered, left), max(1, left // entered)
    if plan.technique.companion is None:
        known = plan.workload.shared + (entered - chunk) // 2
        rows = {SequenceRows(chunk, known, 1): prompts, SequenceRows(1, plan.context, 1): batch}
        seconds = plan.roofline.step(rows).seconds
    else:
        seconds = plan.prefill.seconds * prompts * chunk / entered + decode_s
    return entered / chunk / prompts, seconds


@dataclass(frozen=True)
class WorkerPace:
    """What one worker does while n requests are in flight, at place n; all that decode, where strokes are apart."""

    leaving: Sequence[float]  # requests that end a second, up to as many in flight as there can be
    prompt_s: Sequence[float]  # seconds in which steps have a mean prompt's chunks

    @property
    def slots(self) -> int:
        """How many requests are in flight at most."""
        return len(self.leaving) - 1

    def steady(self, rate: float) -> int:
        """The fewest in flight that end as many a second as come."""
        return min(int(np.searchsorted(self.leaving, rate)), self.slots)


def pace(plan: Plan) -> WorkerPace:
    """At powers of 1.3 and the most that have room; straight between them. Where each step is full, prompts leave room
    for no more than end meanwhile."""
    decoders, load = _decoders(plan), plan.workload
    entered = 0 if plan.prefill_workers else plan.technique.entered(load.prompt) - load.shared
    full = math.ceil(plan.budget * load.output / (entered + load.output))
    most = min(plan.max_running, plan.memory.users, full)
    known = sorted({1, most, *(round(1.3**i) for i in range(99) if 1.3**i < most)}) if most else []
    leaving, prompt_s = [0.0], list[float]()
    for batch in known:
        decode = plan.decode(batch).seconds
        chunks, beside = (0.0, 0.0) if plan.prefill_workers else _chunks(plan, batch, decode)
        taken = load.output * decode / batch + chunks * (beside - decode)
        leaving.append(decoders / max(taken, chunks * beside))
        prompt_s.append(plan.prefill.seconds / plan.prefill_workers if plan.prefill_workers else chunks * beside)
    places = np.arange(decoders * most + 1) / decoders
    rates = np.maximum.accumulate(np.interp(places, [0, *known], leaving))
    return WorkerPace(rates.tolist(), np.interp(places, [0, *known], [*prompt_s[:1], *prompt_s] or [0.0]).tolist())


def in_flight(plan: Plan, pace: WorkerPace, rate: float) -> int:
    """How many sequences each worker that decodes has at a rate of all of them; a step has one for each at most."""
    part = rate if plan.prefill_workers else rate / plan.workers
    return math.ceil(pace.steady(part) / _decoders(plan))


def _decoders(plan: Plan) -> int:
    """Workers that decode the requests of a pace."""
    return plan.workers - plan.prefill_workers if plan.prefill_workers else 1


def tuned(plan: Plan) -> Plan:
    """The plan with the tokens of a step and the sequences at once that could carry most."""
    if plan.prefill_workers:
        return plan
    options = [replace(plan, budget=budget) for budget in dict.fromkeys((plan.budget, *BUDGETS))]
    decode_s = _decode_seconds(plan)  # which the tokens of a step do not change
    best = max(options, key=lambda one: capacity(one, decode_s))
    return replace(best, max_running=max(1, min(MAX_RUNNING, plan.memory.users)))
