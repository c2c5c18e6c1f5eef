"""An engine on a machine that is described by its peaks."""

from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import companion_of, find_model
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.techniques import PLAIN, Technique, choose_technique, techniques
from twostroke.study.simulate.engine_setup import EngineSetup, kv_geometry
from twostroke.study.simulate.step_costs import RooflineCosts


def machine_setup(
    # name, on: a model and a machine, as for `twostroke plan`
    name: str,
    on: str,
    *,
    weights: str | None = None,  # a format of `roofline.weight_formats`; None is that of the files, or as published
    kv_bits: int = 16,  # of a number in the KV cache
    tp: int = 1,
    efficiency: float | None = None,
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,
    host_s: float = 0.0,
    # method, draft, acceptance: a technique of `roofline.techniques`, its companion, the share of guesses that stand
    method: str = "plain",
    draft: str | None = None,
    acceptance: float | None = None,
) -> EngineSetup:
    """An engine of `tp` devices, by the names of its model and its machine.

    Raises:
        InvalidRequest, UnknownModel: unknown names; no room for KV.
    """
    found = find_model(name)
    technique = choose_technique(techniques(found.model, companion_of(draft, found.model), acceptance), method)
    form = found.form(weights)
    roofline = Roofline(found.model.with_kv_bits(kv_bits), find_machine(on, efficiency), form, tp)
    return roofline_setup(
        roofline,
        technique,
        kv_bytes=kv_bytes,
        page_size=page_size,
        index=index,
        scheduler=scheduler or SchedulerConfig(),
        host_s=host_s,
    )


def roofline_setup(
    roofline: Roofline,
    technique: Technique = PLAIN,
    *,
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,
    host_s: float = 0.0,
) -> EngineSetup:
    """An engine whose steps a roofline times. Everything but a CPU keeps a step in flight.

    `kv_bytes`: bytes for KV, on all devices together; None is what the weights leave of 90% of the memory.
    Raises InvalidRequest if there is no room for KV.
    """
    model, machine, used = roofline.model, roofline.machine, technique.companion
    total, companion_costs = roofline.weights.total(model), None
    page = kv_geometry(model).page_bytes(page_size)
    if used is not None:
        companion_costs = RooflineCosts(used.roofline(roofline), host_s)
        total += used.total(roofline.weights)
        page += kv_geometry(used.model).page_bytes(page_size) if technique.role != "student" else 0  # as many pages
    room = kv_bytes
    if room is None:
        room = int((int(roofline.tp * machine.usable_memory) - total) / roofline.kv_copies)
        if room < page // page_size:
            raise InvalidRequest(
                f"the weights of {model.name} leave no room for KV: use more devices (--tp), smaller weights, or "
                f"say --kv-bytes"
            )
    pages = room // page
    if pages < 1:
        raise InvalidRequest(
            f"a page of {page_size:,} entries takes {page:,} bytes, and there are {room:,} for KV: "
            f"make pages smaller (--page-size), or give more (--kv-bytes)"
        )
    return EngineSetup(
        model=model,
        costs=RooflineCosts(roofline, host_s),
        pages=pages,
        page_size=page_size,
        index=index,
        asynchronous=machine.kind != "cpu",
        scheduler=scheduler or SchedulerConfig(),
        technique=technique,
        companion_costs=companion_costs,
    )
