"""Counts pages: every used page of a pool must have a holder."""

from collections.abc import Iterable
from typing import Any

from twostroke.engine.engine import Engine
from twostroke.engine.strokes import Prefill
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import NOWHERE
from twostroke.kv.pool import PagePool
from twostroke.study.simulate.simulation import Simulation


def leaked_pages(engine: Engine, pool: PagePool, others: Iterable[Any] = ()) -> int:
    """Number of the pool's used pages that nobody holds. Between two steps it is 0.

    Holders are the prefix indexes, what is pinned, the strokes in flight with the values that they extend, results of
    choices that the step in flight has ended, and `others`.
    """
    held = pool.pins.pages()
    values: list[Any] = list(others)
    for model in dict.fromkeys(engine.models.values()):
        if model.index is not None and model.pool is pool:
            held.update(model.index.pages)
    for choice in engine.choices:
        for lane in choice.lanes:
            held.update(lane.writer.pages.tolist())
            base = lane.stroke.after if isinstance(lane.stroke, Prefill) else lane.stroke.kv
            values += [] if base is None else [base]
    flying = engine.flight.step
    values += [] if flying is None else [chunk.choice.result for chunk in flying.chunks]
    for kv in values:
        if isinstance(kv, KVCache) and kv.pool is pool:
            held.update(kv.entry_table.pages.tolist())
    here = sum(pool.frame(page) != NOWHERE for page in held)  # others are in the host, or on their way from there
    return pool.num_used - pool.num_arriving - here


def leaked(simulation: Simulation) -> int:
    """Number of used pages of all workers that nobody holds. Between two events it is 0."""
    moving, found = simulation.transfers.held(), 0
    for worker in simulation.workers:
        made = [request.result for request in worker.calls.values()]
        found += leaked_pages(worker.engine, worker.pool, [*moving, *made, *worker.arrived()])
    return found
