"""What the page's feed asks of the engine: functions that run where the engine is, and what they return."""

from typing import Any, NamedTuple

import numpy as np
from pydantic_core import to_json

from twostroke.api.llm import LLM
from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.engine.engine import Engine
from twostroke.kv import spans
from twostroke.server.page.snapshot import EngineSnapshot
from twostroke.server.page.step_recorder import StepRecord, StepRecorder

MAX_SPANS = 4096  # page spans that one message lists, of all lanes together


class Seen(NamedTuple):
    """What is new."""

    steps: list[StepRecord]  # records since the last time
    pages: bytes | None  # a newer snapshot, as JSON, if there is one
    counts: dict[str, int]  # numbers that `/metrics` has too, read as it reads them


def watch(llm: LLM) -> Seen:
    """What happened since the last call. The first one begins to record."""
    engine = llm.engine
    if not isinstance(engine.observer, StepRecorder):
        engine.observer = StepRecorder()
    steps, snapshot = engine.observer.take()
    counts = {
        "running": engine.num_running,
        "waiting": engine.num_waiting,
        "arriving": engine.num_arriving,
        "preemptions": engine.preemptions,
        "evicted": engine.evicted_pages,
    }
    return Seen(steps, None if snapshot is None else to_json(snapshot_data(snapshot)), counts)


def take_look(engine: Engine) -> None:
    """Leave a snapshot for the next `watch`. The engine must be at rest."""
    if isinstance(engine.observer, StepRecorder):
        engine.observer.snapshot(engine)


def end_watch(llm: LLM) -> None:
    """Record nothing any more."""
    llm.engine.observer = None


def pools_of(llm: LLM) -> list[dict[str, int]]:
    """The sizes of the pools, the main model's first."""
    pools = dict.fromkeys(model.pool for model in llm.engine.models.values())
    return [{"pages": pool.num_pages, "page_size": pool.page_size} for pool in pools]


def snapshot_data(snapshot: EngineSnapshot) -> dict[str, Any]:
    """A snapshot as the page draws it: cells as runs, and where the entries of named requests are.

    `pools[i].runs` are pairs of a number of frames and what they hold (`server/page/snapshot.py`). A lane's `spans` are
    four numbers for each of its pages in the first group of layers: the frame, the first and the last slot + 1, the
    position of the first entry.
    """
    pools = [
        {"roles": pool.roles, "runs": run_lengths(pool.cells(snapshot.lanes)), "arriving": len(pool.arriving)}
        for pool in snapshot.pools
    ]
    where, left = {id(pool.pool): pool for pool in snapshot.pools}, MAX_SPANS
    lanes: list[dict[str, Any]] = []
    for lane in snapshot.lanes:
        facts: dict[str, Any] = {"owner": lane.owner, "model": lane.model, "decodes": lane.decodes}
        facts |= {"entries": lane.entries, "todo": lane.todo, "arriving": lane.arriving}
        facts |= {"pages": len(spans.held_pages(lane.table)), "bytes": lane.pool.geometry.table_bytes(lane.table)}
        facts["pool"] = list(where).index(id(lane.pool))
        if snapshot.owners[lane.owner][0] and len(lane.table) <= left:
            left -= len(lane.table)
            table = lane.table[:, [PAGE, START, STOP, POSITION]]
            table[:, 0] = where[id(lane.pool)].placed(table[:, 0])
            facts["spans"] = table.ravel().tolist()
        lanes.append(facts)
    facts = {"owners": snapshot.owners, "waiting": snapshot.waiting, "tiers": snapshot.tiers}
    return {"pools": pools, "lanes": lanes, **facts}


def run_lengths(cells: np.ndarray) -> list[int]:
    """Run-length encoding: [count, value, count, value, ...]."""
    if not len(cells):
        return []
    stops = np.append(np.flatnonzero(cells[1:] != cells[:-1]) + 1, len(cells))
    counts = np.diff(stops, prepend=0)
    return np.stack([counts, cells[stops - 1]], axis=1).ravel().tolist()
