"""What an engine's lanes do in the next step, as far as that is known before it, and what a step changes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.backends.interface import STOP
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.engine import Engine
from twostroke.engine.lane import Lane
from twostroke.engine.track import Token
from twostroke.sampling.draw import Sampled


class Place(NamedTuple):
    """Where a lane's next entry goes: its last page has `room` slots left."""

    lane: Lane
    page: int
    stop: int
    room: int


@dataclass
class Lanes:
    """The strokes of an engine's running choices, in order of arrival.

    Attributes:
        decoding: make a token in the next step, and another in the step after; nothing else can become of them.
        entering: have tokens of a prompt left.
        others: of these the engine decides something.
        most: steps in which `decoding` stays as it is.
    """

    decoding: list[Place] = field(default_factory=list[Place])
    entering: list[Place] = field(default_factory=list[Place])
    others: list[Lane] = field(default_factory=list[Lane])
    most: int = 0


def lanes_of(engine: Engine, most: int) -> Lanes | None:
    """The lanes, and at most `most` steps. None if a step may do more than let each of them enter tokens, begin or end:
    choices have several strokes, wait for pages or for each other."""
    queues, in_flight = engine._queues, engine._flight.step is not None
    waits = queues.arriving or engine._forecast is not None or engine._loads or engine._placement._scarce
    if waits or not queues.running or in_flight != engine._in_flight:
        return None
    found = Lanes(most=most)
    for choice in queues.running:
        if len(choice.lanes) != 1 or choice.held is not None or choice.short_until:
            return None
        lane = choice.lanes[0]
        if lane.missing is not None or (place := _next_place(lane)) is None:
            return None
        if not isinstance(lane, DecodeLane):
            found.entering.append(place)
        elif (more := left(lane) - 1) > 0 and _steady(lane, place, in_flight):
            found.decoding.append(place)
            found.most = min(found.most, more)
        else:
            found.others.append(lane)
    return found


def _next_place(lane: Lane) -> Place | None:
    """Where the next entry of a lane goes; None if its last page is to be copied first."""
    writer, pool = lane.writer, lane.model.pool
    if not writer._num_spans:
        return Place(lane, 0, 0, 0)
    page, start, stop, position = writer._table[writer._num_spans - 1].tolist()
    if position + stop - start != writer.next_position or (stop < pool.page_size and pool.filled(page) != stop):
        return None
    return Place(lane, page, stop, pool.page_size - stop)


def _steady(lane: DecodeLane, place: Place, in_flight: bool) -> bool:
    """Whether a lane decodes from step to step, without anything to decide."""
    if lane.result is not None or lane.guesses or lane.record.complete or lane._rows or len(lane.todo) != 1:
        return False
    # See `Placement.place`: no new page is taken for the first token of an answer before it is known.
    starts = lane.started or place.room > 0 or not in_flight
    return starts and lane.track is lane.choice.track and lane._placeholder == in_flight


def left(lane: DecodeLane) -> int:
    """Tokens that a lane may still make."""
    asked = lane.track.params.max_tokens
    room = lane._room - len(lane.record.sampled)
    return room if asked is None else min(room, asked - len(lane.track.ids))


def enter(place: Place, tokens: list[int], pages: list[int]) -> None:
    """Let a lane enter tokens, in its last page and in new ones."""
    lane, count, writer, pool = place.lane, len(tokens), place.lane.writer, place.lane.model.pool
    if inside := min(count, place.room):
        writer._table[writer._num_spans - 1, STOP] += inside
        pool.unclaim(place.page, place.stop + inside)
    if pages:
        writer._own += pages
        writer._add_spans(pages, count - inside, writer.next_position + inside)
    writer.next_position += count
    writer._tokens += tokens
    lane.num_computed, lane.started = len(writer), True


def hand(lane: DecodeLane, sampled: Sampled, handed: Sequence[float], number: int | None) -> None:
    """Hand a token to a lane at each of these times; the last step in flight draws its next as the `number`-th."""
    for tokens in (lane.track.sampled, lane.record.sampled):
        tokens += [sampled] * len(handed)
    lane.track.ids += [sampled.id] * len(handed)
    request = lane.choice.request
    request.timings.tokens += handed
    if not request.events:  # nobody takes these: the engine asks only whether there is one
        request.events.append(Token(sampled.id, "", None, None, len(lane.track.ids) - 1, lane.choice.index, None))
    if number is not None:
        lane._placeholder = left(lane) > 1  # no step enters the last token
        lane.todo = [-1 - number] if lane._placeholder else []
