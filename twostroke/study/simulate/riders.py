"""Steps in which some lanes begin or end, while the others only decode on.

The engine takes such a step itself, without those others: they ride along. They get their pages first, as in any step
(`engine/scheduler.py`), their rows are computed together with the engine's, and they get their tokens when it hands
over its own. So the engine decides as it does with them, and tests compare every time and every page.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.engine import Engine
from twostroke.engine.flight import Drawing
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.step import Step
from twostroke.models.cost import Rows
from twostroke.study.simulate.clock import VirtualClock
from twostroke.study.simulate.device import SimulatedModel, Tokens
from twostroke.study.simulate.lanes import Lanes, enter, hand

LEAST = 3  # with fewer riders the step is as quick without


def may_ride(engine: Engine, model: Model, lanes: Lanes) -> bool:
    """Whether the next step is the same for the others if those that decode ride along.

    That is so if a step is in flight, all lanes find pages, and no other enters a token before one of theirs.
    """
    queues, pool, riders = engine._queues, model.pool, lanes.decoding
    rest = [*lanes.others, *(place.lane for place in lanes.entering)]
    if len(riders) < LEAST or not rest or model not in engine._flight._drawings:
        return False
    if queues.waiting and len(queues.running) < engine.config.max_running:  # what waits now waits for pages
        return False
    last = riders[-1].lane.choice.order
    if any(lane.todo and lane.choice.order < last for lane in lanes.others):
        return False
    pages = sum(not place.room for place in riders) + sum(-(-len(lane.todo) // pool.page_size) + 1 for lane in rest)
    return engine._placement._could_hold(pool, pages)


def ride(engine: Engine, model: Model, clock: VirtualClock, lanes: Lanes) -> bool:
    """A step of the engine in which `lanes.decoding` ride along. Returns whether there was something to do."""
    queues, flight = engine._queues, engine._flight
    compiled: SimulatedModel = model.compiled  # pyright: ignore[reportAssignmentType]
    riders = {place.lane: place for place in lanes.decoding}
    before, began, config, running = flight._drawings[model], clock.now, engine._config, queues.running
    ready = before.drawn.ready if isinstance(before.drawn, Tokens) else began
    compiled.riders = [Rows(1, lane.writer.next_position, 1) for lane in riders]
    for place in lanes.decoding:
        enter(place, [compiled.token.id], [] if place.room else model.pool.allocate(1))
    queues.running = [choice for choice in running if choice.lanes[0] not in riders]
    engine._config = _without(config, len(riders))
    flight._drawings[model] = _drawing([lane for lane in before.lanes if lane not in riders], compiled, clock, ready)
    if not lanes.entering and not any(map(_enters, lanes.others)):
        compiled.compute([])  # the engine needs no pass
    worked = engine.step()
    if flight.step is None:  # and has drawn nothing
        compiled.sample([], [])
        flight.step = Step((), None, began)
    engine._config, compiled.riders, stayed = config, [], set(queues.running)
    queues.running = [choice for choice in running if choice in stayed or (choice.lanes and choice.lanes[0] in riders)]
    drew = {*riders, *(flight._drawings[model].lanes if model in flight._drawings else ())}
    lanes_now = (lane for choice in queues.running for lane in choice.lanes if lane in drew)
    drawn = [lane for lane in lanes_now if isinstance(lane, DecodeLane)]
    handed = [max(began + compiled.costs.host_s, ready)]
    for number, lane in enumerate(drawn):
        if lane in riders:
            hand(lane, compiled.token, handed, number)
        elif lane._placeholder:
            lane.todo = [-1 - number]
    flight._drawings[model] = _drawing(drawn, compiled, clock, compiled.free_at)
    return worked


def _enters(lane: Lane) -> bool:
    """Whether a lane enters a token: see `Placement.place`."""
    return bool(lane.todo) and (not lane.ahead or lane.started or lane.writer.has_slot)


def _drawing(lanes: list[DecodeLane], compiled: SimulatedModel, clock: VirtualClock, ready: float) -> Drawing:
    return Drawing(lanes, Tokens(clock, ready, [compiled.token] * len(lanes)))


@lru_cache
def _without(config: SchedulerConfig, riders: int) -> SchedulerConfig:
    """What riders leave of the limits of a step."""
    tokens = max(1, config.max_step_tokens - riders)  # a prompt enters at least one
    return replace(config, max_step_tokens=tokens, max_running=config.max_running - riders)
