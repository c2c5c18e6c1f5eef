"""An engine on a machine that is described by its peaks."""

from __future__ import annotations

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.study.plan.local_engine import stored_format
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import companion_of, find_model
from twostroke.study.plan.plan import RESERVED_SHARE
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.techniques import choose_technique, techniques
from twostroke.study.plan.weights import weight_format
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.step_costs import RooflineCosts


def machine_setup(
    name: str,
    on: str,
    *,
    weights: str | None = None,
    tp: int = 1,
    efficiency: float | None = None,
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,
    host_s: float = 0.0,
    method: str = "plain",
    draft: str | None = None,
    acceptance: float | None = None,
) -> EngineSetup:
    """An engine of `tp` devices. Everything but a CPU keeps a step in flight.

    Args:
        name, on: a model and a machine, as for `twostroke plan`.
        weights: a format of `planning.weights`; None is that of the files, or as published.
        kv_bytes: bytes for KV, on all devices together; None is what the weights leave of 90% of the memory.
        method, draft, acceptance: a technique of `planning.techniques`, its companion, the share of guesses that stand.

    Raises:
        InvalidRequest, UnknownModel: unknown names; no room for KV.
    """
    found = find_model(name)
    technique = choose_technique(techniques(found.model, companion_of(draft), acceptance), method)
    stored = weights is None and found.checkpoint is not None
    form = (
        stored_format(found.checkpoint)
        if stored and found.checkpoint
        else weight_format(weights or found.model.weights)
    )
    machine = find_machine(on, efficiency)
    roofline = Roofline(found.model, machine, form, tp)
    used, total, entry = technique.companion, form.total(found.model), found.model.kv_values
    companion_costs = None
    if used is not None:
        companion_costs = RooflineCosts(used.roofline(roofline), host_s)
        total += used.weights.total(used.model)
        entry += used.model.kv_values if technique.role == "draft" else 0  # its pool has as many pages
    room = kv_bytes
    if room is None:
        copies = max(1, tp // min(kind.kv_heads for kind in found.model.layers))  # fewer KV heads than devices
        room = int(tp * machine.memory * (1 - RESERVED_SHARE) - total) // copies
        if room < 2 * entry:
            raise InvalidRequest(
                f"the weights of {found.model.name} leave no room for KV: use more devices (--tp), smaller weights, or "
                f"say --kv-bytes"
            )
    pages = room // (2 * entry * page_size)
    if pages < 1:
        raise InvalidRequest(
            f"a page of {page_size:,} entries takes {2 * entry * page_size:,} bytes, and there are {room:,} for KV: "
            f"make pages smaller (--page-size), or give more (--kv-bytes)"
        )
    return EngineSetup(
        model=found.model,
        costs=RooflineCosts(roofline, host_s),
        pages=pages,
        page_size=page_size,
        index=index,
        asynchronous=machine.kind != "cpu",
        scheduler=scheduler or SchedulerConfig(),
        technique=technique,
        companion_costs=companion_costs,
    )
