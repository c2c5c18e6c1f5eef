"""What a worker could carry at most, by arithmetic alone: it orders what is worth simulating, and answers nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from twostroke.models.cost import SequenceRows
from twostroke.study.plan.plan import MAX_RUNNING, Plan

BUDGETS = (256, 512, 1024, 2048)  # tokens of a step that are tried


@dataclass(frozen=True)
class Capacity:
    """The highest rate of all workers whose steps keep the objective for ITL, and the sequences that decode then."""

    rate: float
    batch: int


def capacity(plan: Plan) -> Capacity:
    """A request takes the steps of its chunks, beside which others decode, and its part of the other decode steps."""
    if plan.prefill_workers:
        prefill = plan.prefill_workers / plan.prefill.seconds
        decode = max((_apart(plan, batch) for batch in _batches(plan)), default=Capacity(0.0, 1), key=lambda c: c.rate)
        return Capacity(min(prefill, decode.rate), decode.batch)
    return max((_together(plan, batch) for batch in _batches(plan)), default=Capacity(0.0, 1), key=lambda c: c.rate)


def _apart(plan: Plan, batch: int) -> Capacity:
    seconds = plan.workload.output * plan.decode(batch).seconds / batch
    return Capacity((plan.workers - plan.prefill_workers) / seconds, batch)


def _together(plan: Plan, batch: int) -> Capacity:
    chunks, beside = _chunks(plan, batch)
    if not _keeps(plan, beside):
        return Capacity(0.0, batch)
    seconds = chunks * beside + max(0.0, plan.workload.output / batch - chunks) * plan.decode(batch).seconds
    return Capacity(plan.workers / seconds, batch)


def _batches(plan: Plan) -> Iterator[int]:
    """Powers of four and the largest number, as far as they fit and keep the objective for ITL."""
    most = min(plan.max_running, plan.memory.users)
    for batch in [*(4**i for i in range(10) if 4**i < most), *([most] if most else [])]:
        if not _keeps(plan, plan.decode(batch).seconds):
            return
        yield batch


def _keeps(plan: Plan, seconds: float) -> bool:
    return plan.workload.itl_ms is None or 1e3 * seconds <= plan.workload.itl_ms


def _chunks(plan: Plan, batch: int) -> tuple[float, float]:
    """How many steps a prompt takes, less than one where a step takes several prompts, and the mean seconds of such a
    step beside so many that decode."""
    entered = plan.technique.entered(plan.workload.prompt) - plan.workload.shared
    left = max(1, plan.budget - batch)
    chunk, prompts = min(entered, left), max(1, left // entered)
    if plan.technique.companion is None:
        known = plan.workload.shared + (entered - chunk) // 2
        rows = {SequenceRows(chunk, known, 1): prompts, SequenceRows(1, plan.context, 1): batch}
        seconds = plan.roofline.step(rows).seconds
    else:
        seconds = plan.prefill.seconds * prompts * chunk / entered + plan.decode(batch).seconds
    return entered / chunk / prompts, seconds


def in_flight(plan: Plan, rate: float) -> int:
    """How many sequences each worker that decodes has at a rate of all of them: rate x seconds of an answer."""
    most, batch = min(plan.max_running, plan.memory.users), 1
    rate /= max(1, plan.workers - plan.prefill_workers)
    for _ in range(20):
        decode = plan.decode(batch).seconds
        chunks, beside = (0.0, decode) if plan.prefill_workers else _chunks(plan, batch)
        # Where each step has a chunk, a request leaves after as many steps as it has tokens.
        full = min(most, round(plan.workload.output / chunks)) if chunks else most
        idle = 1 - rate * chunks * (beside - decode)
        wanted = min(full, round(rate * plan.workload.output * decode / idle)) if idle > 0 else full
        batch, before = max(1, wanted), batch
        if batch == before:
            break
    return batch if most else 0


def prompt_seconds(plan: Plan, rate: float) -> float:
    """Seconds in which a worker's steps have a mean prompt's chunks, beside as many that decode at that rate."""
    if plan.prefill_workers:
        return plan.prefill.seconds / plan.prefill_workers
    chunks, beside = _chunks(plan, in_flight(plan, rate))
    return chunks * beside


def tuned(plan: Plan) -> Plan:
    """The plan with the tokens of a step and the sequences at once that could carry most."""
    if plan.prefill_workers:
        return plan
    options = [replace(plan, budget=budget) for budget in dict.fromkeys((plan.budget, *BUDGETS))]
    best = max(options, key=lambda one: capacity(one).rate)
    return replace(best, max_running=max(1, min(MAX_RUNNING, plan.memory.users)))
