"""Placement makes progress: whatever arrives, grows, is cancelled or is held by others, some choice advances or ends.

The engine runs over a simulated model and a virtual clock, so a step costs no computation.
"""

from collections import Counter
from concurrent.futures import Future
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.study.simulate.chaos import CONFIG, COST, PRICES
from tests.thinning import examples
from twostroke.engine.choice_state import ACTIVE, QUEUED, TRANSITIONS, ChoiceState
from twostroke.engine.request import Choice, Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Await, Decode, Prefill, Program
from twostroke.errors import ContextLengthExceeded, OutOfPages
from twostroke.models.step_predictor import StepPredictor
from twostroke.sampling.params import SamplingParams
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.step_costs import MeasuredCosts
from twostroke.study.simulate.virtual_time import VirtualClock

PAGE, PAGES = 4, 24
IDLE_S = 0.01
# Starts of one choice while no token is made and no request ends: a few, where it doubles what it needs, and one for
# each other choice, which may need its pages.
MAX_STARTS = 12
MAX_STEPS = 4000  # until the next request has ended, once nobody holds anything any more
COSTS = MeasuredCosts(StepPredictor(COST, PRICES), 0.0, 0.0)


def plain(prompt: list[int]) -> Program:
    yield Decode((yield Prefill(prompt)))


def awaiting(future: "Future[None]", prompt: list[int]) -> Program:
    """As a value from another process: pages are needed when it has come."""
    yield Await(lambda: future)
    yield Decode((yield Prefill(prompt)))


def hoarding(prompt: list[int]) -> Program:
    """A program that keeps values which no lane has, and asks for more."""
    first = yield Prefill(prompt, fresh=True)
    second = yield Prefill(prompt, fresh=True)
    yield Decode(first)
    yield Decode(second, emit=False, max_tokens=5)


def side_by_side(prompt: list[int]) -> Program:
    kv = yield Prefill(prompt)
    runs = yield [Decode(kv, emit=False, stream=i, max_tokens=9) for i in range(3)]
    yield Decode(runs[0].kv)


def copying(prompt: list[int]) -> Program:
    """A program that takes pages itself, by joining values inside of a page."""
    kv = yield Prefill(prompt)
    half = len(kv) // 2
    yield Decode(kv[: half - 1] + kv[half:] if half > 1 else kv)


PROGRAMS = (plain, hoarding, side_by_side, copying)


class PlacementMachine(RuleBasedStateMachine):
    """Random arrivals, growth, cancels, pages in quarantine and values held by users."""

    @initialize(
        index=st.sampled_from(["radix", "off"]),
        asynchronous=st.booleans(),
        budget=st.sampled_from([3, 16, 64]),
        running=st.sampled_from([1, 3, 64]),
    )
    def open(self, index: str, asynchronous: bool, budget: int, running: int) -> None:
        config = SchedulerConfig(budget, running)
        setup = EngineSetup(ModelSpec("tiny", CONFIG), COSTS, PAGES, PAGE, index, asynchronous, config)
        self.clock = VirtualClock(0.0)
        self.engine = setup.open(self.clock)
        self.model = self.engine.models[self.engine.default]
        self.pool = self.model.pool
        self.requests: list[Request] = []
        self.futures: list[Future[None]] = []
        self.held: list[np.ndarray] = []
        self.quarantined: list[np.ndarray] = []
        self.starts: Counter[tuple[int, int]] = Counter()
        self.seen = (0, 0)
        self.states: dict[Choice, ChoiceState] = {}
        move = self.engine._queues.move  # pyright: ignore

        def moving(choice: Choice, state: ChoiceState) -> None:
            before = choice.state
            move(choice, state)
            if before in QUEUED and state in ACTIVE:
                self.starts[id(choice), choice.index] += 1

        self.engine._queues.move = moving  # pyright: ignore

    # What users and other processes do --------------------------------------------------------------------------

    @rule(
        program=st.sampled_from(PROGRAMS),
        length=st.integers(1, PAGE * (PAGES - 2)),
        tokens=st.integers(1, 40),
        choices=st.integers(1, 2),
        group=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def submit(self, program: Any, length: int, tokens: int, choices: int, group: int, priority: int) -> None:
        self._submit(partial(program, [group] * length), length, tokens, choices, priority)

    @rule(length=st.integers(1, 60), tokens=st.integers(1, 40), choices=st.integers(1, 2))
    def submit_awaiting(self, length: int, tokens: int, choices: int) -> None:
        future = Future[None]()
        self.futures.append(future)
        self._submit(lambda: awaiting(_copy(future), [5] * length), length, tokens, choices, 0)

    def _submit(self, program: Any, length: int, tokens: int, choices: int, priority: int) -> None:
        params = SamplingParams(max_tokens=tokens, n=choices, ignore_eos=True, seed=1)
        request = Request(program, params, self.model.tokenizer, length)
        request.priority = priority
        request.timings.arrival = self.clock.now
        self.requests.append(self.engine.submit(request))

    @precondition(lambda self: self.futures)
    @rule()
    def answer(self) -> None:
        self.futures.pop(0).set_result(None)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        self.engine.cancel(self.requests.pop(which % len(self.requests)))

    @rule(count=st.integers(1, PAGES))
    def hold(self, count: int) -> None:
        """A user's value."""
        if count <= self.pool.num_free:
            self.held.append(np.array(self.pool.allocate(count)))

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.pool.release(self.held.pop(0))

    @rule(count=st.integers(1, PAGES))
    def quarantine(self, count: int) -> None:
        """Pages that nobody wants, to which a read is under way."""
        if count <= self.pool.num_free:
            self.quarantined.append(np.array(self.pool.allocate(count)))
            self.pool.num_quarantined += count

    @precondition(lambda self: self.quarantined)
    @rule()
    def end_quarantine(self) -> None:
        pages = self.quarantined.pop(0)
        self.pool.num_quarantined -= len(pages)
        self.pool.release(pages)

    @rule(count=st.integers(1, 60))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    # What must hold ---------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step. None of the choices may start again and again while nothing is made."""
        worked = self.engine.step()
        if not worked:
            self.clock.advance(self.engine.idle_timeout() or IDLE_S)
        seen = self._progress()
        if seen != self.seen:
            self.seen = seen
            self.starts.clear()
        most = MAX_STARTS + sum(len(request.choices) for request in self.requests)
        assert max(self.starts.values(), default=0) <= most, "a choice starts again and again, in vain"
        return worked

    def _progress(self) -> tuple[int, int]:
        """Tokens made and requests ended; those that are entered again do not count."""
        made = sum(len(choice.output.ids) for request in self.requests for choice in request.choices)
        drafts = sum(len(record.sampled) for r in self.requests for c in r.choices for record in c.records)
        return made + drafts, sum(request.done for request in self.requests)

    @invariant()
    def queues_agree_with_states(self) -> None:
        if not hasattr(self, "engine"):
            return
        queues = self.engine._queues  # pyright: ignore
        assert queues.active == sorted([*queues.running, *queues.arriving], key=lambda choice: choice.order)
        for choice in self.engine.choices:
            assert (choice in queues.active) == (choice.state in ACTIVE)
            assert choice.state in ACTIVE or not choice.lanes, "who is queued holds no page"

    def teardown(self) -> None:
        """Once nothing is in quarantine and all that is awaited has come, every request ends, whatever users hold."""
        if not hasattr(self, "engine"):
            return
        while self.quarantined:
            self.end_quarantine()
        while self.futures:
            self.answer()
        steps = 0  # since a request ended
        while left := self.engine.num_requests:
            self._step()
            steps = steps + 1 if self.engine.num_requests == left else 0
            assert steps < MAX_STEPS, "requests that neither advance nor end"
        for request in self.requests:
            assert isinstance(request.error, OutOfPages | ContextLengthExceeded | None)
        while self.held:
            self.release()
        for request in self.requests:
            request.choices.clear()
        self.engine.close()
        assert self.pool.num_used == 0


def _copy(future: "Future[None]") -> "Future[None]":
    """A future of its own for each start: a preempted choice cancels what it waits for."""
    own = Future[None]()

    def forward(_: object) -> None:
        if own.set_running_or_notify_cancel():
            own.set_result(None)

    future.add_done_callback(forward)
    return own


PlacementMachine.TestCase.settings = settings(
    max_examples=examples(20), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_progress = PlacementMachine.TestCase


def test_every_transition_is_between_states_of_the_table() -> None:
    assert set(TRANSITIONS) == set(ChoiceState)
    assert not TRANSITIONS[ChoiceState.DONE]
    for before, after in product(ChoiceState, ChoiceState):
        if before in QUEUED and after in ACTIVE:
            assert (after in TRANSITIONS[before]) == (after is ChoiceState.RUNNING), "who starts runs at first"
