"""A request and its choices: programs being driven, and what they have made so far."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.engine.lane import DecodeRecord, Lane
from twostroke.engine.strokes import Program
from twostroke.engine.timings import Timings
from twostroke.engine.track import Token, Track
from twostroke.kv.pool import PagePool
from twostroke.sampling.params import SamplingParams

_arrivals = itertools.count()
WAITING_FOR = object()  # the result of a stroke that is still in flight
PATIENCE = 10.0  # seconds: a request counts as arrived so much later per unit of priority


class Choice:
    """One of a request's n answers: a program, the strokes it waits for, and the tokens it made.

    A preempted choice drops its program and all values; started again, it asks for the same strokes, and every
    decode enters what `records` holds instead of sampling.
    """

    def __init__(self, request: Request, index: int) -> None:
        # Weak, or a finished request would be a circle, and what it holds be freed only by the garbage collector.
        self._request = weakref.ref(request)
        self.index = index
        self.track = Track(request.params, request.tokenizer, index)
        self.program: Program | None = None
        self.lanes: list[Lane] = []
        self.results: list[Any] = []
        self.side_by_side = False
        self.records: list[DecodeRecord] = []
        self.num_decodes = self.num_emits = self.emits_done = 0
        self.needs: dict[PagePool, int] = {}  # pages in each pool that it starts again with, once it was preempted
        self.result: Any = None
        self.done = False

    @property
    def request(self) -> Request:
        request = self._request()
        assert request is not None, "the engine keeps a request until it is done"
        return request

    @property
    def resumable(self) -> bool:
        """All results its program waits for are there."""
        return bool(self.results) and not any(result is WAITING_FOR for result in self.results)

    def answer(self) -> Any:
        """What the program receives; taken once."""
        results, self.results = self.results, []
        return results if self.side_by_side else results[0]

    @property
    def order(self) -> tuple[float, int, int]:
        """First come, first served; the youngest is preempted first.

        A priority moves the arrival, so it never starves anybody: what waits longer than `PATIENCE` per unit of
        difference comes before what arrives now.
        """
        request = self.request
        return request.timings.arrival + PATIENCE * request.priority, request.arrival_order, self.index

    def seed(self, stream: int) -> bytes:
        """Of a random stream: a function of the request's seed, the choice and the stream alone."""
        text = f"{self.request.seed} {self.index} {stream}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def next_record(self) -> DecodeRecord:
        """The record of the decode stroke that the program asks for now."""
        self.num_decodes += 1
        if self.num_decodes > len(self.records):
            self.records.append(DecodeRecord())
        return self.records[self.num_decodes - 1]

    def release(self) -> None:
        """Drop the program and every value and page it holds."""
        for lane in self.lanes:
            lane.close()
        self.lanes, self.results = [], []
        program, self.program = self.program, None
        if program is not None:
            program.close()

    def finish(self, result: Any) -> None:
        """Done, with what its program returned."""
        self.result, self.done = result, True
        self.release()


class Request:
    """What the caller asked for.

    Attributes:
        make_program: starts a choice's program; called again after a preemption.
        events: tokens in the order they were made, for the caller to take.
        priority: lower is served sooner; 0 is ordinary. Set it before the request is submitted.
        error: why the request failed, if it did.
        result: what the first choice's program returned.
        prefilled_tokens: tokens that its prefills asked for, a repeated prompt as often as it is repeated.
        cached_tokens: how many of them came from the prefix index.
        kv_bytes: K and V of the value that the first choice's last stroke ended with.
    """

    def __init__(
        self,
        make_program: Callable[[], Program],
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt_tokens: int = 0,
    ) -> None:
        self.make_program, self.params, self.tokenizer = make_program, params, tokenizer
        self.prompt_tokens = prompt_tokens
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.arrival_order = next(_arrivals)
        self.priority = 0
        self.timings = Timings()
        self.events: deque[Token] = deque()
        self.error: Exception | None = None
        self.cancelled = False
        self.prefilled_tokens = self.cached_tokens = self.kv_bytes = 0
        self.preemptions = 0
        self.choices = [Choice(self, i) for i in range(params.n)]
        self.shared: dict[Any, SharedPrefill] = {}

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.choices)

    @property
    def result(self) -> Any:
        return self.choices[0].result

    def raise_error(self) -> None:
        """Raise what made the request fail, if anything did; once."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # a traceback must hold neither its own error nor a request that does: pages would wait for gc


@dataclass
class SharedPrefill:
    """A prefill that several choices of a request ask for: computed once, its pages shared.

    `takers` counts the choices that have not asked yet; the last one takes it off the request's list.
    """

    takers: int
    value: Any = WAITING_FOR
    waiting: list[tuple[Choice, int]] = field(default_factory=list)

    def arrived(self, value: Any) -> None:
        self.value = value
        for choice, slot in self.waiting:
            choice.results[slot] = value
        self.waiting = []
