"""What the engine does, step by step, for somebody who watches it.

An engine that nobody watches has no `Watch`, and checks for it once a step. A watched one leaves a small record of
each step in a ring, and from time to time a picture of its pages. Whoever watches takes them from there, in another
thread, and does with them what takes time. A ring that nobody empties forgets its oldest records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from twostroke.engine.picture import Picture, take_picture

if TYPE_CHECKING:
    from twostroke.engine.engine import Engine
    from twostroke.engine.request import Request
    from twostroke.engine.runner import Chunk

RING = 4096  # records
PICTURE_S = 0.2  # least seconds between two pictures
SHARE = 1 / 300  # most of the time that pictures may take


class StepRecord(NamedTuple):
    """A step, with the state after it.

    Attributes:
        number: how many steps came before, since watching began.
        at_us: when it began; took_us: its duration. Microseconds; the first since watching began.
        prefill, decode: tokens computed in chunks and in decoding lanes, as in `StepReport`.
        lanes: strokes that it computed for.
        running, waiting, arriving: choices in each state.
        used, cached, free: pages of the main model's pool: held by requests or values alone, held by prefix indexes,
            free.
        preemptions, evicted: totals so far: choices that lost their pages, pages of prefix indexes that lost their
            frames.
        ttft_us: TTFT of each request that got its first token; itl_us: gap before each further token. Of first
            choices, by the definitions of `engine/timings.py`.
    """

    number: int
    at_us: int
    took_us: int
    prefill: int
    decode: int
    lanes: int
    running: int
    waiting: int
    arriving: int
    used: int
    cached: int
    free: int
    preemptions: int
    evicted: int
    ttft_us: tuple[int, ...]
    itl_us: tuple[int, ...]


class Watch:
    """The ring of one engine: `engine.watch = Watch()` begins, `engine.watch = None` ends.

    The engine's thread writes, one other thread takes.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._steps: deque[StepRecord] = deque(maxlen=RING)
        self._pictures: deque[Picture] = deque(maxlen=1)
        self._next_picture = 0.0
        self._number = 0
        self._told: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # tokens of each that are in records
        self._before: WeakSet[Request] = (
            WeakSet()
        )  # in the step before: on some backends its tokens come with this step

    def step(self, engine: Engine, chunks: Sequence[Chunk], began: float) -> None:
        """Record a step that began at time `began` and is over now. Called by the engine."""
        now, report, pool = time.perf_counter(), engine.report, engine.models[engine.default].pool
        requests = {one for chunk in chunks if (one := chunk.lane.choice.request_if_kept) is not None}
        first, gaps = list[int](), list[int]()
        for request in requests.union(self._before):
            for is_first, seconds in self._news(request):
                (first if is_first else gaps).append(int(seconds * 1e6))
        self._before = WeakSet(requests)
        free, cached = pool.num_free, engine.cached_pages(pool)
        self._steps.append(
            StepRecord(
                self._number,
                int((began - self._began) * 1e6),
                int((now - began) * 1e6),
                report.prefill,
                report.decode,
                len(chunks),
                engine.num_running,
                engine.num_waiting,
                engine.num_arriving,
                max(0, pool.num_pages - free - cached),
                cached,
                free,
                engine.preemptions,
                engine.evicted_pages,
                tuple(first),
                tuple(gaps),
            )
        )
        self._number += 1
        if now >= self._next_picture:
            self.look(engine)

    def _news(self, request: Request) -> Iterator[tuple[bool, float]]:
        """(whether it is a first token, TTFT or the gap before it) of the tokens that are new."""
        timings, told = request.timings, self._told.get(request)
        times = timings.tokens
        self._told[request] = len(times)
        if told is None:
            told = 0 if len(times) == 1 else len(times)  # those before watching began are not news
        if told == 0 and times:
            yield True, times[0] - timings.arrival
        if len(times) > told and not timings.in_bulk:
            for a, b in pairwise(times[max(0, told - 1) :]):
                yield False, b - a

    def look(self, engine: Engine) -> None:
        """Take a picture now. The engine must be at rest."""
        began = time.perf_counter()
        self._pictures.append(take_picture(engine))
        now = time.perf_counter()
        self._next_picture = now + max(PICTURE_S, (now - began) / SHARE)

    def take(self) -> tuple[list[StepRecord], Picture | None]:
        """The records since the last call, and the newest picture if there is a new one."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        try:
            return steps, self._pictures.popleft()
        except IndexError:
            return steps, None
