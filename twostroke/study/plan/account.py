"""All figures of a plan and of its load as plain values, for JSON and reports. Milliseconds, bytes, requests/s."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from twostroke.study.plan.changes import DEGREES, ChangeLimits, changes_alone
from twostroke.study.plan.plan import Plan
from twostroke.study.plan.search import Advice, WayOut
from twostroke.study.plan.service import FLOOR, LoadSimulator, Service
from twostroke.study.roofline.machines import MachineSpec
from twostroke.study.roofline.roofline import StepTime

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (128, 256, 512, 1024, 2048, 4096)


def account(
    advice: Advice, limits: ChangeLimits, load: LoadSimulator | None = None, price: float | None = None
) -> dict[str, Any]:
    """All facts. `price` is that of a device and hour.

    `verdict` is the hardest of four answers: "nothing to do", "misses the objective", "cannot be served" and "does not
    fit"; with a load it is the load's.
    """
    plan, asked = advice.asked.plan, advice.asked
    ways = {
        name: None if way is None else _way(way, load, price)
        for name, way in (("same_devices", advice.same), ("more_devices", advice.more), ("cheapest", advice.cheapest))
    }
    return {
        **_asked(plan),
        **_strokes(plan),
        **_tables(plan, limits),
        "verdict": plan.verdict if asked.service is None else asked.service.verdict,
        "missed": plan.missed() if asked.service is None else asked.service.missed,
        "binds": plan.binds if asked.service is None else asked.service.binds,
        "ways_out": ways,
        "load": None if load is None or asked.service is None else _load(asked.service, load, advice),
    }


def _asked(plan: Plan) -> dict[str, Any]:
    """The configuration, its workload, and what is assumed."""
    load, machine, memory = plan.workload, plan.machine, plan.memory
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
            "speed_range": list(machine.spread),
            "bandwidth": machine.memory_share,
            "link": machine.link_share,
            "technique": plan.technique.assumed,
        },
        "weights": plan.weights.name,
        "weights_title": plan.weights.title(machine),
        "kv_bits": plan.model.kv_bits,
        "devices": plan.devices,
        "technique": plan.technique.name,
        "memory": {
            "weights_bytes": memory.weights,
            "kv_bytes_per_token": plan.model.kv_bytes(1),
            "kv_bytes_per_user": memory.kv_per_user,
            "snapshot_bytes": memory.snapshot,
            "snapshots_kept": memory.snapshots(load.concurrency),
            "usable_bytes": plan.capacity,
            "room_for_kv_bytes": memory.room,
            "users": memory.users,
        },
    }


def _strokes(plan: Plan) -> dict[str, Any]:
    """Both strokes without queueing, and where they turn."""
    load, machine = plan.workload, plan.machine
    chunk = plan.largest_chunk() if load.concurrency > 1 and load.itl_ms is not None else None
    return {
        "prefill": _step(plan.prefill, machine)
        | {"flops_by_part": plan.model.prefill_flops(load.prompt - load.shared, load.shared)},
        "decode": _step(plan.decode(), machine) | {"tokens_per_second": load.concurrency / plan.decode().seconds},
        "attention_overtakes_at": plan.model.crossover(),
        "kv_break_even_bytes_per_second": plan.break_even_bandwidth,
        "largest_chunk": chunk,
        "ttft_in_chunks_ms": None if chunk is None else plan.ttft_beside_ms,
        "tiers": _tiers(plan),
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


def _tiers(plan: Plan) -> list[dict[str, Any]]:
    """For each place whose bandwidth is known: whether reading a prompt's KV is faster than computing it."""
    machine, needed = plan.machine, plan.break_even_bandwidth
    places = (
        ("host memory", machine.host, machine.link_share),
        ("another device", machine.link, machine.link_share),
        ("disk", machine.disk, 1.0),
        ("loopback", machine.loopback, 1.0),
    )
    return [
        {"tier": name, "bytes_per_second": rate * share, "pays": rate * share > needed, "times": rate * share / needed}
        for name, rate, share in places
        if rate is not None
    ]


def _tables(plan: Plan, limits: ChangeLimits) -> dict[str, list[dict[str, Any]]]:
    """What `--all` shows besides."""
    load, machine = plan.workload, plan.machine
    return {
        "levers": [
            {
                "lever": one.changes[0].name,
                "needs": one.changes[0].needs,
                "ttft_ms": one.plan.ttft_ms,
                "itl_ms": one.plan.itl_ms,
                "users": one.plan.memory.users,
                "verdict": one.plan.verdict,
            }
            for one in changes_alone(plan, limits)
        ],
        "batches": [
            {"batch": batch, "itl_ms": 1e3 * step.seconds, "tokens_per_second": batch / step.seconds}
            | _utilization(step, machine)
            for batch in BATCHES
            if batch <= plan.memory.users
            for step in [plan.decode(batch)]
        ],
        "chunks": [
            {"chunk": chunk, "ttft_ms": 1e3 * plan.chunked_ttft(chunk), "longest_itl_ms": 1e3 * step.seconds}
            for chunk in CHUNKS
            if load.concurrency > 1 and chunk < load.prompt
            for step in [plan.mixed(chunk)]
        ],
        "tensor_parallelism": list(_tensor_parallelism(plan)),
    }


def _tensor_parallelism(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each degree that can be planned: times, and what crosses the links in a prefill."""
    if plan.machine.unknown_link:
        return
    for tp in DEGREES:
        if plan.model.divides(tp):
            made = replace(plan, tp=tp)
            rows, roofline = made.technique.entered(made.workload.prompt) - made.workload.shared, made.roofline
            yield {
                "devices": tp,
                "ttft_ms": made.ttft_ms,
                "itl_ms": made.itl_ms,
                "gb_sent": roofline.all_reduces * roofline.all_reduce_bytes(rows) / 1e9,
                "gb_if_gathered": roofline.gather_bytes(rows) / 1e9,
                "link_ms": 1e3 * made.prefill.link_s,
                "link_ms_decode": 1e3 * made.decode().link_s,
                "users": made.memory.users,
            }


def _way(way: WayOut, load: LoadSimulator | None, price: float | None) -> dict[str, Any]:
    """A configuration that is advised, its price, and what it serves."""
    plan, machine, service = way.plan, way.plan.machine, way.service
    found = {
        "changes": [one.name for one in way.candidate.changes],
        "needs": [one.needs for one in way.candidate.changes if one.needs],
        "devices": plan.devices,
        "tensor_parallelism": plan.tp,
        "workers": plan.workers,
        "prefill_workers": plan.prefill_workers,
        "weights": plan.weights.name,
        "kv_bits": plan.model.kv_bits,
        "max_step_tokens": plan.budget,
        "watts": None if machine.watts is None else plan.devices * machine.watts,
        "price_per_hour": None if price is None else plan.devices * price,
        "enough": way.enough,
        "users": plan.workers * plan.memory.users,
    }
    if service is None or load is None:
        return found | {"ttft_ms": plan.ttft_ms, "itl_ms": plan.itl_ms, "requests_per_second": None}
    return found | _served(service, load) | {"requests_per_second": service.within}


def _served(service: Service, load: LoadSimulator) -> dict[str, Any]:
    """The percentile of the objectives, others, and means, in milliseconds; None for TTFT if the queue never ends."""
    percent, made = load.objectives.percent, dict[str, Any]()
    lost = service.verdict in ("does not fit", "cannot be served")
    for name, values, unknown in (("ttft", "ttft", lost), ("itl", "gaps", not service.trials)):
        found = {"mean": service.mean(values)} | {f"p{one:g}": service.at(values, one) for one in (50, 90, 99, percent)}
        shown = {key: None if unknown else 1e3 * value for key, value in found.items()}
        made |= {f"{name}_ms": shown[f"p{percent:g}"], f"{name}_percentiles_ms": shown}
    return made


def _load(service: Service, load: LoadSimulator, advice: Advice) -> dict[str, Any]:
    """What the load asks, and what the configuration that was asked for serves of it."""
    traffic, plan, percent = load.traffic, service.plan, load.objectives.percent
    prompts, outputs, shared = traffic.prompts, traffic.outputs, traffic.shared
    spread = {
        name: None if not service.trials else [1e3 * one for one in service.spread(values, percent)]
        for name, values in (("ttft_ms", "ttft"), ("itl_ms", "gaps"))
    }
    return {
        "verdict": service.verdict,
        "percentile": percent,
        "requests_per_second": load.rate,
        "users": traffic.concurrency,
        "lengths": {
            "requests": len(prompts),
            **{f"prompt_{name}": value for name, value in _lengths(prompts).items()},
            **{f"output_{name}": value for name, value in _lengths(outputs).items()},
            "shared_part": float(shared.sum() / prompts.sum()),
        },
        "served": _served(service, load) | {"sequences": service.sequences},
        "most_requests_per_second": service.highest,
        "most_within_objectives": service.within,
        "searched_from": None if service.highest is None else FLOOR * service.highest,
        "sure": {
            "requests_simulated": load.requests,
            "draws": max(len(service.trials), len(service.tails)),
            "between": spread,
        },
        "range": [factor * ((advice.best.service or service).within or 0.0) for factor in plan.machine.spread],
        "frontier": [
            {"devices": devices, "requests_per_second": rate, "how": how} for devices, rate, how in advice.frontier
        ],
    }


def _lengths(counts: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(counts)), "p50": float(np.median(counts)), "p99": float(np.percentile(counts, 99))}
