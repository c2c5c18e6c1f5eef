"""Steps in which nothing is decided, taken together.

While all lanes decode and nobody waits, a step enters one token for each of them. Nothing is to be decided: who goes is
known, pages are free or can be freed, and nobody ends. Such steps are counted beforehand, and the engine gets what they
make all at once. If something happens meanwhile, it gets what the steps have made that have begun by then.

So a leap is no other scheduler: the engine is in the state in which its own steps would have left it, and tests compare
every time and every page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.backends.interface import STOP
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.engine import Engine
from twostroke.engine.flight import Drawing
from twostroke.engine.model import Model
from twostroke.engine.track import Token
from twostroke.sampling.draw import Sampled
from twostroke.simulation.clock import VirtualClock
from twostroke.simulation.costs import Taken
from twostroke.simulation.device import SimulatedModel, Tokens

MOST, LEAST = 64, 2  # steps of a leap: more may be counted in vain, and fewer are not worth it


class Step(NamedTuple):
    """Times of a step: when it begins and ends for Python, when its tokens are handed over, and on the device."""

    began: float
    ended: float
    handed: float
    device_began: float
    device_ended: float
    taken: Taken


@dataclass(frozen=True)
class Place:
    """Where a lane's next entry goes: its last page has `room` slots left."""

    lane: DecodeLane
    page: int
    stop: int
    room: int


class Leap:
    """Steps that are to come.

    Attributes:
        steps: their times.
        used: pages in use at each of them.
        evicts: whether some of them take pages from the prefix index.
    """

    def __init__(
        self, engine: Engine, clock: VirtualClock, places: list[Place], drawing: Drawing | None, most: int
    ) -> None:
        """At most `most` steps; `drawing` draws the tokens of the step in flight, if there is one."""
        self._clock, self._places, self._drawing = clock, places, drawing
        self._model = model = places[0].lane.model
        self._compiled: SimulatedModel = model.compiled  # pyright: ignore[reportAttributeAccessIssue]
        self._size = model.pool.page_size
        rooms = np.array([place.room for place in places])
        # A lane with room for r more entries needs a page in step r, and every `size` steps after it.
        steps = np.arange(most)
        needed = ((steps >= rooms[:, None]) & ((steps - rooms[:, None]) % self._size == 0)).sum(0)
        self.used = (model.pool.num_used + needed.cumsum()).tolist()
        self.evicts = False
        self.steps = self._times(self._affordable(needed.cumsum()))

    def _affordable(self, needed: np.ndarray) -> int:
        """Steps for which pages are there, and one is left for what follows."""
        pool, index = self._model.pool, self._model.index
        count = int(np.searchsorted(needed, pool.num_free))
        if count == len(needed) or index is None or not index.can_free(int(needed[-1]) + 1 - pool.num_free):
            return count
        self.evicts = True
        self.used = [min(used, pool.num_pages) for used in self.used]
        return len(needed)

    def _times(self, count: int) -> list[Step]:
        """What the clock would be: see `SimulatedModel`, and `Flight` for the order of a step."""
        costs, lanes, now, free_at = self._compiled.costs, len(self._places), self._clock.now, self._compiled.free_at
        contexts = np.array([place.lane.writer.next_position for place in self._places])
        tokens = None if self._drawing is None else self._drawing.drawn
        ready = tokens.ready if isinstance(tokens, Tokens) else None
        steps: list[Step] = []
        for ahead, alone in enumerate(costs.decode(contexts, count)):
            taken = self._compiled.stalled(alone, ahead)
            began, now = now, now + costs.host_s
            device_began = max(now, free_at)
            free_at = device_began + taken.seconds
            if ready is None:
                now = handed = max(now, free_at) + costs.token_s * lanes
            else:
                handed = max(now, ready)
                now, ready = handed + costs.token_s * lanes, free_at
            steps.append(Step(began, now, handed, device_began, free_at, taken))
        return steps

    @property
    def ends(self) -> float:
        return self.steps[-1].ended

    def begun(self, now: float) -> int:
        """Steps that have begun before `now`; the first has."""
        return max(1, bisect_left(self.steps, now, key=lambda step: step.began))

    def take(self, count: int, told: Callable[[float], None]) -> None:
        """The engine has taken the first `count` steps. `told` is called when pages may have been evicted, with the
        end of their step."""
        last, sampled = self.steps[count - 1], self._compiled.token
        pages = self._pages(count, told)
        handed = [step.handed for step in self.steps[:count]]
        for place, mine in zip(self._places, pages, strict=True):
            _advance(place, count, mine, sampled, handed)
        self._clock.now, self._compiled.free_at = last.ended, last.device_ended
        self._compiled.steps += count
        if self._drawing is not None:
            self._drawing.drawn = Tokens(self._clock, last.device_ended, [sampled] * len(self._places))

    def _pages(self, count: int, told: Callable[[float], None]) -> list[list[int]]:
        """New pages of each lane, allocated in the order in which the steps would have."""
        pool = self._model.pool
        wanted = [(at, i) for i, place in enumerate(self._places) for at in range(place.room, count, self._size)]
        pages: list[list[int]] = [[] for _ in self._places]
        for at, i in sorted(wanted):
            pages[i] += pool.allocate(1)
            if self.evicts:
                told(self.steps[at].ended)
        return pages


def _advance(place: Place, count: int, pages: list[int], sampled: Sampled, handed: list[float]) -> None:
    """Let a lane enter `count` tokens, and as many be handed over."""
    lane, writer, pool = place.lane, place.lane.writer, place.lane.model.pool
    if inside := min(count, place.room):
        writer._table[writer._num_spans - 1, STOP] += inside
        pool.unclaim(place.page, place.stop + inside)
    if pages:
        writer._own += pages
        writer._add_spans(pages, count - inside, writer.next_position + inside)
    writer.next_position += count
    writer._tokens += [sampled.id] * count
    lane.num_computed = len(writer)
    for tokens in (lane.track.sampled, lane.record.sampled):
        tokens += [sampled] * count
    lane.track.ids += [sampled.id] * count
    request = lane.choice.request
    request.timings.tokens += handed
    # Nobody takes these: the engine looks at the last alone.
    request.events.append(Token(sampled.id, "", None, None, len(lane.track.ids) - 1, lane.choice.index, None))


def plan_leap(engine: Engine, model: Model, clock: VirtualClock) -> Leap | None:
    """The next steps if nothing is to be decided in them; None if there are too few."""
    queues = engine._queues
    if queues.waiting or queues.arriving or not queues.running or engine._forecast is not None or engine._loads:
        return None
    flight = engine._flight
    drawing = flight._drawings.get(model)
    places, most = list[Place](), MOST
    for choice in queues.running:
        lane = choice.lanes[0] if len(choice.lanes) == 1 else None
        if not isinstance(lane, DecodeLane) or choice.held is not None or choice.short_until:
            return None
        place = _steady(lane)
        if place is None or lane._placeholder == (flight.step is None):
            return None
        places.append(place)
        most = min(most, _left(lane) - (1 if flight.step is None else 2))
        if most < LEAST:
            return None
    if flight.step is not None and (drawing is None or [place.lane for place in places] != drawing.lanes):
        return None
    leap = Leap(engine, clock, places, drawing if flight.step is not None else None, most)
    return leap if len(leap.steps) >= LEAST else None


def _steady(lane: DecodeLane) -> Place | None:
    """Where the next entry of a lane goes that decodes from step to step, without anything to decide; else None."""
    waits = lane.result is not None or lane.missing is not None or lane.guesses or lane.record.complete or lane._rows
    if waits or not lane.started or len(lane.todo) != 1 or lane.track is not lane.choice.track:
        return None
    writer, pool = lane.writer, lane.model.pool
    page, start, stop, position = writer.table[-1].tolist()
    if position + stop - start != writer.next_position or (stop < pool.page_size and pool.filled(page) != stop):
        return None
    return Place(lane, page, stop, pool.page_size - stop)


def _left(lane: DecodeLane) -> int:
    """Tokens that the lane may still make."""
    asked = lane.track.params.max_tokens
    room = lane._room - len(lane.record.sampled)
    return room if asked is None else min(room, asked - len(lane.track.ids))
