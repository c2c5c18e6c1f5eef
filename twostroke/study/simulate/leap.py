"""Steps in which nothing is decided, taken together.

While lanes decode or are in the midst of a prompt, and nobody waits, begins or ends, a step decides nothing: who goes
is known, and how many tokens each enters (`scheduler.share`), pages are free or can be freed, and no result comes. Such
steps are counted beforehand, and the engine gets what they make all at once. If something happens meanwhile, it gets
what the steps have made that have begun by then.

So a leap is no other scheduler: the engine is in the state in which its own steps would have left it, and tests compare
every time and every page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.engine import Engine
from twostroke.engine.flight import Drawing, Flight
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.engine.scheduler import share
from twostroke.models.cost import Rows
from twostroke.study.simulate.clock import VirtualClock
from twostroke.study.simulate.costs import Taken
from twostroke.study.simulate.device import SimulatedModel, Tokens
from twostroke.study.simulate.lanes import Lanes, enter, hand

MOST = 64  # steps of a leap: more may be counted in vain


class Steps(NamedTuple):
    """Times of steps: when each begins and ends for Python, when its tokens are handed over, and on the device."""

    began: Sequence[float] = ()
    ended: Sequence[float] = ()
    handed: Sequence[float] = ()
    device_began: Sequence[float] = ()
    device_ended: Sequence[float] = ()
    taken: Sequence[Taken] = ()


class Leap:
    """Steps that are to come.

    Attributes:
        steps: their times.
        prefill: tokens of prompts that each of them enters. decode: how many lanes decode.
        used: pages in use at each of them, once they are taken.
        evicts: whether some of them take pages from the prefix index.
    """

    def __init__(
        self,
        model: Model,
        clock: VirtualClock,
        lanes: Lanes,
        flight: Flight,
        chunks: Sequence[Sequence[int]],
    ) -> None:
        """Lanes that decode, and lanes that enter `chunks` [steps, lanes] of their prompts.

        `flight` has the step in flight, if there is one.
        """
        self._model, self._clock, self._flight = model, clock, flight
        self._drawing = _drawing(flight, model)
        self._places, self.decode = [*lanes.decoding, *lanes.entering], len(lanes.decoding)
        self._compiled: SimulatedModel = model.compiled  # pyright: ignore[reportAttributeAccessIssue]
        self._chunks = chunks
        self.prefill = [sum(one) for one in chunks]
        self.used: list[int] = []
        self.evicts = False
        self._needs = self._pages_needed()
        self.steps = self._times(self._affordable())

    def _pages_needed(self) -> list[tuple[int, int, int]]:
        """(step, lane, how many pages it takes then), in the order in which the steps allocate them."""
        size, found = self._model.pool.page_size, list[tuple[int, int, int]]()
        for lane, place in enumerate(self._places[: self.decode]):
            found += [(step, lane, 1) for step in range(place.room, len(self._chunks), size)]
        for i, place in enumerate(self._places[self.decode :]):
            beyond = -place.room  # tokens that the pages so far have no room for
            for step, chunks in enumerate(self._chunks):
                if (beyond := beyond + chunks[i]) > 0:
                    pages = -(-beyond // size)
                    found.append((step, self.decode + i, pages))
                    beyond -= pages * size
        return sorted(found)

    def _affordable(self) -> int:
        """Steps for which pages are there, and one is left for what follows."""
        pool, index, needed = self._model.pool, self._model.index, sum(pages for _, _, pages in self._needs)
        free, steps = pool.num_free, len(self._chunks)
        if needed < free:
            return steps
        if index is not None and index.can_free(needed + 1 - free):
            self.evicts = True
            return steps
        totals = accumulate(pages for _, _, pages in self._needs)
        return next((step for (step, _, _), total in zip(self._needs, totals, strict=True) if total >= free), 0)

    def _times(self, count: int) -> Steps:
        """What the clock would be: see `SimulatedModel`, and `Flight` for the order of a step."""
        costs, lanes, now, free_at = self._compiled.costs, self.decode, self._clock.now, self._compiled.free_at
        tokens = None if self._drawing is None else self._drawing.drawn
        ready = tokens.ready if isinstance(tokens, Tokens) else None
        host_s, token_s, stalls = costs.host_s, costs.token_s * lanes, bool(costs.stalls)
        steps: list[tuple[float, float, float, float, float, Taken]] = []
        for ahead, alone in enumerate(self._costs(count)):
            taken = self._compiled.stalled(alone, ahead) if stalls else alone
            began, now = now, now + host_s
            device_began = max(now, free_at)
            free_at = device_began + taken.seconds
            if ready is None:
                now = handed = max(now, free_at) + token_s
            else:
                handed = max(now, ready)
                now, ready = handed + token_s, free_at
            steps.append((began, now, handed, device_began, free_at, taken))
        return Steps(*zip(*steps, strict=True))

    def _costs(self, count: int) -> list[Taken]:
        """What each step takes, without stalls."""
        costs, lanes = self._compiled.costs, self.decode
        contexts = [place.lane.writer.next_position for place in self._places]
        if lanes == len(contexts):
            return costs.decode(np.array(contexts), count)
        found: list[Taken] = []
        for ahead, chunks in enumerate(self._chunks[:count]):
            rows = [Rows(1, context + ahead, 1) for context in contexts[:lanes]]
            rows += [Rows(n, context, 0) for n, context in zip(chunks, contexts[lanes:], strict=True) if n]
            contexts[lanes:] = [context + n for n, context in zip(chunks, contexts[lanes:], strict=True)]
            found.append(costs.step(rows))
        return found

    @property
    def ends(self) -> float:
        return self.steps.ended[-1]

    def begun(self, now: float) -> int:
        """Steps that have begun before `now`; the first has."""
        return max(1, bisect_left(self.steps.began, now))

    def take(self, count: int, told: Callable[[float], None]) -> None:
        """The engine has taken the first `count` steps. `told` is called when pages may have been evicted, with the
        end of their step."""
        sampled, ended = self._compiled.token, self.steps.device_ended[count - 1]
        pages, handed = self._pages(count, told), self.steps.handed[:count]
        for number, (place, mine) in enumerate(zip(self._places, pages, strict=True)):
            lane = place.lane
            if isinstance(lane, DecodeLane):
                enter(place, [sampled.id] * count, mine)
                hand(lane, sampled, handed, None if self._drawing is None else number)
            elif entered := sum(chunks[number - self.decode] for chunks in self._chunks[:count]):
                enter(place, lane.todo[:entered], mine)
                del lane.todo[:entered]
        self._clock.now, self._compiled.free_at = self.steps.ended[count - 1], ended
        self._compiled.steps += count
        if self._drawing is not None:
            self._drawing.drawn = Tokens(self._clock, ended, [sampled] * len(self._drawing.lanes))

    def _pages(self, count: int, told: Callable[[float], None]) -> list[list[int]]:
        """New pages of each lane, allocated in the order in which the steps would have."""
        pool, pages = self._model.pool, [list[int]() for _ in self._places]
        for step, needs in groupby(self._needs, key=itemgetter(0)):
            if step >= count:
                break
            self._pass_by(step)
            for _, lane, fresh in needs:
                pages[lane] += pool.allocate(fresh)
                if self.evicts:
                    told(self.steps.ended[step])
        self._pass_by(count)
        return pages

    def _pass_by(self, step: int) -> None:
        """Count the pages in use at each step before this one. What the first lands does not keep its pages: lanes that
        have ended with the step before it."""
        pool = self._model.pool
        if step and not self.used:
            self.used.append(pool.num_used)
            if (landed := self._flight.step) is not None:
                mine = {place.lane for place in self._places}
                self._flight.step = replace(landed, chunks=[chunk for chunk in landed.chunks if chunk.lane in mine])
        self.used += [pool.num_used] * (step - len(self.used))


def plan_leap(engine: Engine, model: Model, clock: VirtualClock, lanes: Lanes) -> Leap | None:
    """The next steps if nothing is to be decided in them; None if the next decides something."""
    queues, flight = engine._queues, engine._flight
    if lanes.others or (queues.waiting and len(queues.running) < engine.config.max_running):
        return None
    drawing = _drawing(flight, model)
    if flight.step is not None and (drawing is None or [place.lane for place in lanes.decoding] != drawing.lanes):
        return None
    chunks = _chunks(
        [place.lane for place in lanes.entering], engine.config.max_step_tokens - len(lanes.decoding), lanes.most
    )
    leap = Leap(model, clock, lanes, flight, chunks) if chunks else None
    return leap if leap is not None and leap.steps.began else None


def _drawing(flight: Flight, model: Model) -> Drawing | None:
    """What draws the tokens of the step in flight, if there is one."""
    return None if flight.step is None else flight._drawings.get(model)


def _chunks(lanes: list[Lane], budget: int, most: int) -> list[list[int]]:
    """Tokens that each lane enters in the next steps, at most `most`, before one of them begins or has entered all."""
    left = [len(lane.todo) for lane in lanes]
    if not left:
        return [left] * most
    steps: list[list[int]] = []
    while len(steps) < most:
        counts = share(left, max(1, budget))
        left = [tokens - count for tokens, count in zip(left, counts, strict=True)]
        if not all(left) or any(count and not lane.started for count, lane in zip(counts, lanes, strict=True)):
            break
        steps.append(counts)
    return steps
