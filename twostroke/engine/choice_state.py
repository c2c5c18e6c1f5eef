"""The states of a choice and the transitions between them: admission, preemption and parking, in one table."""

from dataclasses import dataclass
from enum import Enum


class ChoiceState(Enum):
    """The state of a choice between its request's arrival and its end."""

    NEW = "new"  # not queued yet
    WAITING = "waiting"  # queued, and never started
    RUNNING = "running"  # started: steps work on it
    ARRIVING = "arriving"  # started: all of its strokes wait for pages from other tiers, or for other threads
    PREEMPTED = "preempted"  # queued again without pages: it starts when its reservation fits
    PARKED = "parked"  # as preempted, for pages that others hold: younger choices may start before it meanwhile
    DONE = "done"


NEW, WAITING, RUNNING, ARRIVING = ChoiceState.NEW, ChoiceState.WAITING, ChoiceState.RUNNING, ChoiceState.ARRIVING
PREEMPTED, PARKED, DONE = ChoiceState.PREEMPTED, ChoiceState.PARKED, ChoiceState.DONE

ACTIVE = frozenset({RUNNING, ARRIVING})  # started: these hold pages
QUEUED = frozenset({WAITING, PREEMPTED, PARKED})  # these hold none

TRANSITIONS = {
    NEW: frozenset({WAITING, DONE}),
    WAITING: frozenset({RUNNING, DONE}),  # admitted
    RUNNING: frozenset({ARRIVING, PREEMPTED, PARKED, DONE}),
    ARRIVING: frozenset({RUNNING, PREEMPTED, PARKED, DONE}),
    PREEMPTED: frozenset({RUNNING, PARKED, DONE}),  # admitted again: its reservation fits, or nothing else runs
    PARKED: frozenset({RUNNING, DONE}),  # as above, not before its shortage says to look again
    DONE: frozenset[ChoiceState](),
}


@dataclass
class Shortage:
    """Pages that a choice did not find, and for which it may wait since others hold them. A token made ends it."""

    until: float  # when the choice no longer waits
    retry_at: float = 0.0  # when a parked choice looks for them next
