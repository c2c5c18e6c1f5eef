"""The account of a plan: all its figures as plain values, for JSON and reports. Milliseconds, bytes, FLOPs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twostroke.study.plan.advice import advise, binds, problems, without_more_devices
from twostroke.study.plan.changes import DEGREES, Advice, ChangeLimits, Made, PlanChange, changes_alone
from twostroke.study.plan.disaggregation import assess_disaggregation
from twostroke.study.plan.machines import MachineSpec
from twostroke.study.plan.plan import BATCHES, CHUNKS, Plan
from twostroke.study.plan.roofline import Roofline, StepTime
from twostroke.study.plan.specification import VALUE_BYTES


def account(plan: Plan, limits: ChangeLimits) -> dict[str, Any]:
    """All facts; `verdict` is one of three answers, "nothing to do", "misses the objective" and "does not fit"."""
    load, machine, memory = plan.workload, plan.machine, plan.memory
    advised = advise(plan, limits)
    chunk = plan.largest_chunk() if load.concurrency > 1 and load.itl_ms is not None else None
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "source": plan.model.source,
        "machine": machine.title,
        "machine_source": machine.source,
        "workload": {
            "prompt_tokens": load.prompt,
            "output_tokens": load.output,
            "concurrency": load.concurrency,
            "shared_prefix": load.shared,
            "ttft_ms": load.ttft_ms,
            "itl_ms": load.itl_ms,
        },
        "assumed": {
            "compute": machine.compute,
            "bandwidth": machine.memory_share,
            "link": machine.link_share,
            "technique": plan.technique.assumed,
        },
        "weights": plan.weights.name,
        "devices": plan.tp,
        "technique": plan.technique.name,
        "memory": {
            "weights_bytes": memory.weights,
            "kv_bytes_per_token": plan.model.kv_values * VALUE_BYTES,
            "kv_bytes_per_user": memory.kv_per_user,
            "usable_bytes": plan.capacity,
            "room_for_kv_bytes": memory.room,
            "users": memory.users,
        },
        "prefill": _step(plan.prefill, machine)
        | {"flops_by_part": plan.model.prefill_flops(load.prompt - load.shared, load.shared)},
        "decode": _step(plan.decode(), machine) | {"tokens_per_second": plan.tokens_per_second},
        "attention_overtakes_at": plan.model.crossover(),
        "kv_break_even_bytes_per_second": plan.break_even_bandwidth,
        "compute_bound_batch": plan.compute_bound_batch(),
        "batches": [
            {"batch": batch, "itl_ms": 1e3 * step.seconds, "tokens_per_second": batch / step.seconds}
            | _utilization(step, machine)
            for batch in BATCHES
            if batch <= memory.users
            for step in [plan.decode(batch)]
        ],
        "chunks": [
            {"chunk": chunk, "ttft_ms": 1e3 * plan.chunked_ttft(chunk), "longest_itl_ms": 1e3 * step.seconds}
            for chunk in CHUNKS
            if load.concurrency > 1 and chunk < load.prompt
            for step in [plan.mixed(chunk)]
        ],
        "largest_chunk": chunk,
        "ttft_in_chunks_ms": None if chunk is None else plan.ttft_beside_ms,
        "tensor_parallelism": _tensor_parallelism(plan),
        "apart": _apart(plan if plan.fits else advised.after),
        "verdict": plan.verdict,
        "missed": plan.missed(),
        "binds": {problem: binds(plan, problem) for problem in problems(plan)},
        "advice": advice_account(advised, _figures),
        "advice_without_more_devices": advice_account(without_more_devices(plan, limits), _figures),
        "levers": [change_account(one, _figures) for one in changes_alone(plan, limits)],
    }


def _step(step: StepTime, machine: MachineSpec) -> dict[str, Any]:
    return {
        "ms": 1e3 * step.seconds,
        "flops": step.flops,
        "bytes": step.bytes,
        "intensity": step.flops / step.bytes,
        "bound": step.bound,
        "link_ms": 1e3 * step.link_s,
    } | _utilization(step, machine)


def _utilization(step: StepTime, machine: MachineSpec) -> dict[str, float]:
    """Percent of the peak rate and of the bandwidth of each device."""
    compute, bandwidth = step.utilization(machine)
    return {"compute_percent": 100 * compute, "bandwidth_percent": 100 * bandwidth}


def _figures(plan: Plan) -> dict[str, Any]:
    """The figures that changes are compared by."""
    return {"ttft_ms": plan.ttft_ms, "itl_ms": plan.itl_ms, "users": plan.memory.users, "verdict": plan.verdict}


def change_account(change: PlanChange[Made], figures: Callable[[Made], dict[str, Any]]) -> dict[str, Any]:
    """A change, and the figures that it leads to."""
    return {"lever": change.name, **figures(change.after), "needs": change.needs}


def advice_account(advised: Advice[Made], figures: Callable[[Made], dict[str, Any]]) -> dict[str, Any]:
    """Each decision with the figures before and after it, and those after all of them."""
    steps = [
        {"problem": step.problem, "bound_by": step.binds, "before": figures(step.before)}
        | change_account(step.change, figures)
        for step in advised.steps
    ]
    return {"steps": steps, "changes": [one.name for one in advised.changes], **figures(advised.after)}


def _tensor_parallelism(plan: Plan) -> list[dict[str, Any]]:
    """Each degree that can be planned: times, and what crosses the links in a prefill."""
    found: list[dict[str, Any]] = []
    for tp in (1, *DEGREES):
        divided = all(kind.heads % tp == 0 for kind in plan.model.layers)
        if tp > 1 and (plan.machine.link is None or not divided):
            continue
        made = replace(plan, tp=tp)
        rows = made.technique.entered(made.workload.prompt) - made.workload.shared
        roofline = Roofline(made.model, made.machine, made.weights, tp)
        found.append(
            {
                "devices": tp,
                "ttft_ms": made.ttft_ms,
                "itl_ms": made.itl_ms,
                "all_reduces": roofline.all_reduces,
                "gb_sent": roofline.all_reduces * roofline.all_reduce_bytes(rows) / 1e9,
                "gb_if_gathered": roofline.gather_bytes(rows) / 1e9,
                "link_ms_prefill": 1e3 * made.prefill.link_s,
                "link_ms_decode": 1e3 * made.decode().link_s,
                "users": made.memory.users,
            }
        )
    return found if len(found) > 1 else []


def _apart(plan: Plan) -> dict[str, Any]:
    made = assess_disaggregation(plan)
    return {
        "devices": plan.tp,
        "pays": made.pays,
        "why": made.why,
        "kv_bytes": made.kv_bytes,
        "transfer_ms": None if made.transfer_s is None else 1e3 * made.transfer_s,
        "prefill_workers_per_decode_worker": made.prefill_per_decode,
    }
