"""Which page is whose: copied quickly while the engine rests, sorted out later by whoever looks at it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from twostroke.engine.choice_state import QUEUED
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.engine import Engine
from twostroke.engine.lane import Lane
from twostroke.engine.request import Choice
from twostroke.kv import spans
from twostroke.kv.pages import NOWHERE
from twostroke.kv.pool import PagePool

# What a frame holds: nothing; a page that only a prefix index knows; a page of several choices; a page of a value that
# no lane has, such as a context; a page on its way from another tier; from OWNER on, a page of the i-th choice.
FREE, PREFIX, SHARED, HELD, ARRIVING, OWNER = range(6)
INDEXED = 1 << 14  # added to the code of a page that is in use and in a prefix index


@dataclass(frozen=True)
class LanePages:
    """A stroke in flight and the pages of its entries."""

    pool: PagePool
    owner: int  # index of its choice among the snapshot's owners
    model: str  # the role of its model
    decodes: bool  # whether it is a decode
    entries: int  # number of entries so far
    todo: int  # number of tokens that are known and not entered yet
    arriving: bool  # whether it waits for pages from another tier
    table: np.ndarray  # [P, 3 + groups] int32 spans, with page ids


@dataclass(frozen=True)
class PoolSnapshot:
    """A pool's pages."""

    pool: PagePool
    roles: tuple[str, ...]  # of the models that use it
    frames: np.ndarray  # [ids] int32: the frame of each page id, NOWHERE for one that is not in the pool
    indexed: np.ndarray  # page ids that prefix indexes hold
    arriving: list[int]  # frames that are kept for pages on their way

    def cells(self, lanes: Iterable[LanePages]) -> np.ndarray:
        """[num_pages] uint16: what each frame holds."""
        cells = np.zeros(self.pool.num_pages, np.uint16)
        cells[self.frames[self.frames != NOWHERE]] = HELD
        for lane in lanes:
            if lane.pool is self.pool:
                at = self.placed(spans.held_pages(lane.table))
                at = at[at != NOWHERE]
                mine, whose = OWNER + lane.owner, cells[at]
                cells[at] = np.where((whose == HELD) | (whose == mine), mine, SHARED)
        at = self.placed(self.indexed)
        at = at[at != NOWHERE]
        cells[at] = np.where(cells[at] == HELD, PREFIX, cells[at] | INDEXED)
        cells[self.arriving] = ARRIVING
        return cells

    def placed(self, pages: np.ndarray) -> np.ndarray:
        """The frames of page ids; NOWHERE also for no page, and for an id that is newer than the snapshot."""
        known = (pages >= 0) & (pages < len(self.frames))
        return np.where(known, self.frames[np.where(known, pages, 0)] if len(self.frames) else NOWHERE, NOWHERE)


@dataclass(frozen=True)
class EngineSnapshot:
    """The pages of an engine between two steps."""

    # the choices that have started: (the request's name or "", its number, index of the choice)
    owners: tuple[tuple[str, int, int], ...]
    # the names of those that wait to start or to start again, in their order, and their states
    waiting: tuple[tuple[str, str], ...]
    lanes: tuple[LanePages, ...]
    pools: tuple[PoolSnapshot, ...]
    # of each tier below the pool: its name, the bytes in it, and the most it may hold; None if not known
    tiers: tuple[tuple[str, int | None, int | None], ...]


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Copy what a snapshot needs. The engine must be at rest; nothing is sorted out here."""
    roles = {id(model): role for role, model in reversed(engine.models.items())}
    owners: dict[tuple[str, int, int], int] = {}
    lanes = tuple(
        _lane(choice, lane, owners, roles.get(id(lane.model), "")) for choice in engine.choices for lane in choice.lanes
    )
    waiting = tuple((one.request.name, one.state.value) for one in engine.choices if one.state in QUEUED)
    return EngineSnapshot(tuple(owners), waiting, lanes, tuple(_pools(engine)), tuple(_tiers(engine)))


def _lane(choice: Choice, lane: Lane, owners: dict[tuple[str, int, int], int], role: str) -> LanePages:
    request = choice.request
    owner = owners.setdefault((request.name, request.arrival_order, choice.index), len(owners))
    writer, decodes, todo = lane.writer, isinstance(lane, DecodeLane), len(lane.todo)
    arriving = lane.missing is not None
    return LanePages(lane.model.pool, owner, role, decodes, len(writer), todo, arriving, writer.table.copy())


def _pools(engine: Engine) -> Iterator[PoolSnapshot]:
    for pool in dict.fromkeys(model.pool for model in engine.models.values()):
        roles = tuple(role for role, model in engine.models.items() if model.pool is pool)
        indexes = {model.index for model in engine.models.values() if model.index is not None and model.pool is pool}
        with pool.lock:
            indexed = np.concatenate([np.zeros(0, np.int64), *(index.pages_in_pool() for index in indexes)])
            yield PoolSnapshot(pool, roles, pool.all_frames(), indexed, list(pool.frames.reserved))


def _tiers(engine: Engine) -> Iterator[tuple[str, int | None, int | None]]:
    pools = dict.fromkeys(model.pool for model in engine.models.values())
    yield "host", sum(pool.num_copies * pool.page_bytes for pool in pools), engine.tiers.host_bytes
    for store in engine.tiers.stores:
        yield store.tier, store.used_bytes, store.most_bytes
