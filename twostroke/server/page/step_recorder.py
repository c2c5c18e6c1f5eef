"""Records of the engine's steps, for somebody who watches the page.

An engine that nobody watches has no observer, and checks for one once a step. The recorder keeps a small record of
each step in a ring, and from time to time a snapshot of its pages. Whoever watches takes them from there, in another
thread, and does with them what takes time. A ring that nobody empties forgets its oldest records.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from twostroke.engine.engine import Engine
from twostroke.engine.step import Chunk
from twostroke.engine.timings import Timings
from twostroke.server.page.snapshot import EngineSnapshot, take_snapshot

RING = 4096  # records
SNAPSHOT_S = 0.5  # minimum seconds between two snapshots
MAX_SHARE = 1 / 1000  # part of the time that snapshots may take


class StepRecord(NamedTuple):
    """A step, with the state after it."""

    number: int  # how many steps came before, since watching began
    at_us: int  # when it began; took_us: its duration. Microseconds; the first since watching began.
    took_us: int
    # prefill, decode: tokens computed in chunks and in decoding lanes, as in `StepReport`
    prefill: int
    decode: int
    lanes: int  # strokes that it computed for
    # running, waiting, arriving: choices in each state
    running: int
    waiting: int
    arriving: int
    # used, cached, free: pages of the main model's pool: held by requests or values alone, held by prefix indexes, free
    used: int
    cached: int
    free: int
    # preemptions, evicted: totals so far: choices that lost their pages, pages of prefix indexes that lost their frames
    preemptions: int
    evicted: int
    # TTFT of each request that got its first token; itl_us: gap before each further token. Of first choices, by the
    # definitions of `engine/timings.py`.
    ttft_us: tuple[int, ...]
    itl_us: tuple[int, ...]


class _RecordedTokens:
    """How many of a request's tokens are in records."""

    __slots__ = ("count", "timings")

    def __init__(self, timings: Timings) -> None:
        made = len(timings.tokens)  # those before watching began are not news, but for the first
        self.timings, self.count = timings, 0 if made == 1 else made

    def add_new(self, first: list[int], gaps: list[int]) -> None:
        """Add the TTFT and the gaps of the tokens that are new, in microseconds."""
        timings, count = self.timings, self.count
        times = timings.tokens
        if len(times) == count:
            return
        self.count = len(times)
        if not count:
            first.append(int((times[0] - timings.arrival) * 1e6))
        if not timings.in_bulk:
            gaps.extend(int((b - a) * 1e6) for a, b in pairwise(times[max(0, count - 1) :]))


class StepRecorder:
    """The ring of one engine: `engine.observer = StepRecorder()` begins, `engine.observer = None` ends.

    The engine's thread writes, one other thread takes.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._steps: deque[StepRecord] = deque(maxlen=RING)
        self._snapshots: deque[EngineSnapshot] = deque(maxlen=1)
        self._next_snapshot = 0.0
        self._number = 0
        self._open: dict[int, _RecordedTokens] = {}  # of each request that is not over, by the id of its timings

    def record(self, engine: Engine, chunks: Sequence[Chunk], began: float) -> None:
        """Record a step that began at time `began` and is over now. Called by the engine."""
        now, report, pool = time.perf_counter(), engine.report, engine.models[engine.default].pool
        first: list[int] = []
        gaps: list[int] = []
        for chunk in chunks:
            request = chunk.choice.request_if_kept
            if request is not None and id(request.timings) not in self._open:
                self._open[id(request.timings)] = _RecordedTokens(request.timings)
        for recorded in list(self._open.values()):
            recorded.add_new(first, gaps)
            if recorded.timings.finished is not None:
                del self._open[id(recorded.timings)]
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
        if now >= self._next_snapshot:
            self.snapshot(engine)

    def snapshot(self, engine: Engine) -> None:
        """Take a snapshot now. The engine must be at rest."""
        began = time.perf_counter()
        self._snapshots.append(take_snapshot(engine))
        now = time.perf_counter()
        self._next_snapshot = now + max(SNAPSHOT_S, (now - began) / MAX_SHARE)

    def take(self) -> tuple[list[StepRecord], EngineSnapshot | None]:
        """The records since the last call, and the newest snapshot if there is a new one."""
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        try:
            return steps, self._snapshots.popleft()
        except IndexError:
            return steps, None
