"""The account of a load: all its figures as plain values, for JSON and reports. Milliseconds, bytes, requests/s."""

from dataclasses import asdict
from math import ceil
from typing import Any

import numpy as np

from twostroke.study.plan.account import advice_account, change_account
from twostroke.study.plan.changes import Advice, ChangeLimits
from twostroke.study.plan.load import PlannedLoad
from twostroke.study.plan.load_advice import load_changes_alone
from twostroke.study.plan.plan import Plan
from twostroke.study.plan.service_level import OpenLoopService


def load_facts(load: PlannedLoad, limits: ChangeLimits, advised: Advice[PlannedLoad]) -> dict[str, Any]:
    """All facts; `limits` is what may be changed, and `advised` what should be."""
    prompts, outputs, shared = load.traffic.prompts, load.traffic.outputs, load.traffic.shared
    pays, why = load.apart
    size = load.plan.model.kv_bytes(ceil(float(np.mean(prompts))))
    served, closed = load.served, load.closed
    alone = [] if load.verdict == "nothing to do" else load_changes_alone(load, limits)
    return {
        "verdict": load.verdict,
        "missed": load.missed,
        "binds": load.binds,
        "parts_ms": _parts_ms(load),
        "percentile": load.objectives.percent,
        "requests_per_second": load.rate,
        "users": load.traffic.concurrency,
        "lengths": {
            "requests": len(prompts),
            **{f"prompt_{name}": value for name, value in _lengths(prompts).items()},
            **{f"output_{name}": value for name, value in _lengths(outputs).items()},
            "shared_part": float(shared.sum() / prompts.sum()),
        },
        "served": None if served is None else {**_served(served), "utilization": utilization(load, served)},
        "closed": None if closed is None else asdict(closed),
        "most_requests_per_second": load.max_rate,
        "most_within_objectives": load.max_rate_within if load.objectives.given else None,
        "workers_needed": load.workers,
        "apart": {
            "pays": pays,
            "why": why,
            "prefill_worker_requests_per_second": load.prefill_rate,
            "decode_worker_requests_per_second": load.decode_rate,
            "workers": load.workers_apart,
            "prefill_workers_per_decode_worker": load.decode_rate / load.prefill_rate if load.prefill_rate else None,
            "requests_per_second_and_worker": load.rate_apart,
            "together_requests_per_second_and_worker": load.max_rate_within,
            "kv_bytes_per_prompt": size,
            "link_bytes_per_second": None if load.rate is None else load.rate * size,
            "transfer_ms": None if load.transfer_s is None else 1e3 * load.transfer_s,
        },
        "tiers": _tiers(load.plan),
        "advice": _advice(advised),
        "levers": [change_account(one, _figures) for one in alone],
    }


def _advice(advised: Advice[PlannedLoad]) -> dict[str, Any]:
    made = advice_account(advised, _figures)
    missed = [{"missed": step.before.missed} for step in advised.steps]
    return made | {"steps": [one | more for one, more in zip(made["steps"], missed, strict=True)]}


def _figures(load: PlannedLoad) -> dict[str, Any]:
    """The figures that changes are compared by: a percentile, or means for users; None if the rate cannot be served."""
    parts = _parts_ms(load)
    return {
        "ttft_ms": parts["ttft_waiting"] + parts["ttft_prefill"] if parts else None,
        "waiting_ms": parts.get("ttft_waiting"),
        "itl_ms": parts["itl_decode"] + parts["itl_chunk"] if parts else None,
        "verdict": load.verdict,
    }


def _parts_ms(load: PlannedLoad) -> dict[str, float]:
    if not load.parts:
        return {}
    (waiting, prefill), (decode, chunk) = load.parts["TTFT"], load.parts["ITL"]
    parts = {"ttft_waiting": waiting, "ttft_prefill": prefill, "itl_decode": decode, "itl_chunk": chunk}
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def _lengths(counts: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(counts)), "p50": float(np.median(counts)), "p99": float(np.percentile(counts, 99))}


def _served(served: OpenLoopService) -> dict[str, Any]:
    def ms(spread: Any) -> dict[str, float]:
        return {name: 1e3 * value for name, value in asdict(spread).items()}

    return {
        "sequences": served.sequences,
        "waiting_ms": 1e3 * served.waiting_s,
        "ttft_ms": ms(served.ttft),
        "itl_ms": ms(served.itl),
    }


def utilization(load: PlannedLoad, served: OpenLoopService) -> dict[str, dict[str, float]]:
    """Parts of the time that each stroke takes, and of the peaks that it uses meanwhile."""
    plan, found = load.plan, dict[str, dict[str, float]]()
    decode = plan.decode(max(1, ceil(served.sequences)))
    for name, share, step in (("prefill", served.prefill_share, plan.prefill), ("decode", served.decode_share, decode)):
        compute, bandwidth = step.utilization(plan.machine)
        found[name] = {"time": share, "compute": compute, "bandwidth": bandwidth}
    return found


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
