"""Counts a worker's pages: each has a holder, and one that a value arrives in has no other."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from types import CellType, GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.page_audit import leaked_pages
from twostroke.cluster.wire.receiver import ReceivedValue
from twostroke.engine.strokes import Decoded, Prefilled
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import POOL

if TYPE_CHECKING:
    from tests.chaos.worker import Worker

FRAMES = (GeneratorType, CellType)  # a cell has a variable of an inner function
LISTS = (list, tuple)
RESULTS = (Decoded, Prefilled, ReceivedValue)


def audit(worker: Worker) -> None:
    """Raises AssertionError."""
    pool, engine, name = worker.llm.pool, worker.llm.engine, worker.process.name
    values: list[KVCache | None] = []
    for one in worker.offers:
        final = one._final
        values += [one._kv, *one._longer, None if final is None else final.kv]
    values += [load.known for load in engine.loads.unfinished]
    for choice in engine.choices:
        shared = [one.value for one in choice.request.shared_prefills.values()]
        values += [getattr(result, "kv", result) for result in (*choice.results, *shared)]
        for errand in choice.futures:
            if errand.future.done() and not errand.future.cancelled() and errand.future.exception() is None:
                values += _held_by((errand.future.result(),))
    if _leaked(worker, values):  # a technique that goes on has values besides those that its strokes read
        values += [kv for choice in engine.choices for kv in _held_by(choice.program)]
        for request in worker.elsewhere:
            values += [request.result, *_held_by(request.make_program)]
        lost = _leaked(worker, values)
        # A transfer that sends holds its value itself, also when the lease has ended, and so does one that ends here.
        assert lost == 0 or worker.sends or worker.takes, f"{name}: {lost} pages that nobody holds"
    reservation = [page for one in worker.reservations for page in one.pages]
    if reservation:
        assert len(set(reservation)) == len(reservation), "a page is reserved twice"
        assert all(pool.num_references(page) == 1 for page in reservation), (
            "a page that a value arrives in has another holder"
        )
        assert not _read(engine.lanes).intersection(reservation), "a lane reads a page that a value arrives in"
    frames = pool.all_frames()
    here = frames[frames >= 0].tolist()
    assert len(set(here)) == len(here) == pool.num_pages - len(pool.frames.free), f"{name}: a frame is in two hands"


def _leaked(worker: Worker, values: list[KVCache | None]) -> int:
    held = [kv for kv in values if isinstance(kv, KVCache) and kv.tier == POOL]
    return leaked_pages(worker.llm.engine, worker.llm.pool, held)


def _held_by(holder: Any) -> Iterator[KVCache]:
    """The values that a program's frames name, and those in what they name."""
    for held in gc.get_referents(holder):
        kind = type(held)
        if kind is KVCache:
            yield held
        elif kind in FRAMES or (kind in LISTS and held and type(held[0]) is not int):
            yield from _held_by(held)
        elif kind in RESULTS:
            yield held.kv


def _read(lanes: Sequence[Any]) -> set[int]:
    tables = [spans.held_pages(lane.writer.table) for lane in lanes]
    return set(np.concatenate(tables).tolist()) if tables else set()
