"""A worker: one engine on a clock of its own, which is ahead of the others' by at most the step that it is in."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from twostroke.engine.choice_state import PARKED, PREEMPTED
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import OutOfPages, TwostrokeError
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.kv_events import Change, KvEventLog
from twostroke.kv.pool import PagePool
from twostroke.kv.writer import KVWriter
from twostroke.methods import Prompt, method
from twostroke.models.cost import SequenceRows
from twostroke.sampling.params import SamplingParams
from twostroke.study.simulate.engine_setup import ROLE, EngineSetup
from twostroke.study.simulate.simulated_model import NullLogits
from twostroke.study.simulate.simulated_request import SimulatedRequest, prompt_tokens
from twostroke.study.simulate.step_costs import StepCost
from twostroke.study.simulate.timeline import TimelineInterval
from twostroke.study.simulate.virtual_time import STEP_RANK, EventQueue, VirtualClock

IDLE_S = 0.01  # pause after a step without work while there are requests
MAX_IDLE_STEPS = 10_000  # such steps in a row: more mean that a request waits for what never comes

Over = Callable[["SimulatedWorker", SimulatedRequest, Request], None]
Changes = list[Change]
StepObserver = Callable[
    ["SimulatedWorker", float, float, TimelineInterval], None
]  # when a step begins and ends, and its work
Tell = Callable[["SimulatedWorker", Changes], None]


class EngineStalled(TwostrokeError):
    """An engine has requests and nothing to do: a mistake in the engine, found by a simulation."""


class SimulatedWorker:
    """Steps an engine as the engine's thread does: commands are taken between steps.

    A step is computed when it begins, and what it has made is known to others when it ends.

    Attributes:
        number: which worker.
        calls: the calls that it serves, each with its request of the engine.
        orphans: calls that it had when it died, or that were sent to it afterwards.
        expected: transfers that are on their way here.
        sends_until, receives_until: when its links are free.
        steps: steps that had something to do.
    """

    def __init__(
        self, number: int, setup: EngineSetup, events: EventQueue, over: Over, watch: StepObserver | None = None
    ) -> None:
        """`over` is called when a request has ended, with the call; `watch` at each step."""
        self.number, self.setup = number, setup
        self._events, self._over, self._watch = events, over, watch
        self.clock = VirtualClock(events.now)
        self._technique = method(**{"name": "plain", **setup.technique.method})
        self.engine = setup.open(self.clock, None if watch is None else self._see)
        self.model = self.engine.models[ROLE]
        self.pool = self.model.pool
        self.calls: dict[SimulatedRequest, Request] = {}
        self.orphans: list[SimulatedRequest] = []
        self.expected = self.steps = 0
        self.sends_until = self.receives_until = 0.0
        self.alive = True
        self._arrived: dict[SimulatedRequest, list[KVCache]] = {}  # KV that no stroke has taken yet
        self._announcer: KvEventLog | None = None
        self._tell_router: Tell | None = None
        self._in_engine: set[SimulatedRequest] = set()  # whose requests are not known to have ended
        self._awake = False
        self._idle = 0
        self._requeued: dict[Request, float] = {}  # since when a preempted request waits
        self._preempted_before = 0

    # Requests ---------------------------------------------------------------------------------------------------

    def answer(self, call: SimulatedRequest) -> None:
        """Prefill its prompt and decode its answer, or what is left of it."""
        tokens, made = tokens_of(call, self.setup.vocab), self._technique
        prompt = Prompt(tokens, self.model.tokenizer)
        self._submit(call, lambda: made.program(prompt), call.left, len(tokens))

    def prefill(self, call: SimulatedRequest) -> None:
        """Prefill alone: the request's result is the KV."""
        tokens = tokens_of(call, self.setup.vocab)

        def program() -> Program:
            return (yield Prefill(tokens))

        self._submit(call, program, 1, len(tokens))

    def decode(self, call: SimulatedRequest, arrived: list[KVCache]) -> None:
        """Decode after KV that has arrived, a list of one, which is taken from it. If it is preempted, it prefills."""
        tokens = tokens_of(call, self.setup.vocab)
        self._arrived[call] = arrived

        def program() -> Program:
            yield Decode(arrived.pop() if arrived else (yield Prefill(tokens)))

        self._submit(call, program, call.left, len(tokens))

    def _submit(self, call: SimulatedRequest, program: Callable[[], Program], tokens: int, prompt: int) -> None:
        request = Request(program, params_of(tokens), self.model.tokenizer, prompt)
        request.timings.arrival = self._events.now
        self.calls[call] = request
        self._in_engine.add(call)
        self.engine.submit(request)
        self.wake()

    def leave(self, call: SimulatedRequest) -> None:
        """Forget a request that has ended."""
        del self.calls[call]
        self._arrived.pop(call, None)

    # Time -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Plan a step, unless one is planned."""
        if not self._awake:
            self._awake = True
            self._events.at(self.clock.now, self._step, STEP_RANK + self.number)

    def _step(self) -> None:
        if not self.alive:
            return
        self._awake = False
        self.clock.until(self._events.now)
        worked = self.engine.step()
        self.steps += worked
        self._count_requeued()
        self._tell_changes(self.clock.now)
        if self.engine.num_requests < len(self._in_engine):
            self._find_ended()
        if self._in_engine:
            self._idle = 0 if worked else self._idle + 1
            if self._idle > MAX_IDLE_STEPS:
                raise EngineStalled(f"worker {self.number} has {len(self._in_engine)} requests and nothing to do")
            if not worked:
                self.clock.advance(self.engine.idle_timeout() or IDLE_S)
            self.wake()
        elif worked:
            self.wake()

    def _count_requeued(self) -> None:
        """Let the time go on of those that were preempted and do not run again yet."""
        now, queued = self.clock.now, set[Request]()
        for choice in self.engine.choices if self.engine.preemptions > self._preempted_before or self._requeued else ():
            if choice.state in (PREEMPTED, PARKED):
                queued.add(choice.request)
        self._preempted_before = self.engine.preemptions
        for request in [one for one in self._requeued if one not in queued]:
            since = self._requeued.pop(request)
            for call, own in self.calls.items():
                if own is request:
                    call.requeued_s += now - since
        for request in queued:
            self._requeued.setdefault(request, now)

    def _find_ended(self) -> None:
        ended = [call for call in self._in_engine if self.calls[call].done]
        for call in sorted(ended, key=lambda call: call.number):
            self._in_engine.discard(call)
            self._events.at(self.clock.now, partial(self._tell, call), self.number)

    def _tell(self, call: SimulatedRequest) -> None:
        if self.alive:
            self._over(self, call, self.calls[call])

    def _see(self, began: float, ended: float, rows: Sequence[SequenceRows], taken: StepCost) -> None:
        """Observe a step of the engine."""
        if self._watch is None:
            return
        decode = sum(one.count for one in rows if one.logits == one.count)  # guesses included
        prefill = sum(one.count for one in rows) - decode
        engine, (seconds, flops, read) = self.engine, taken
        running, waiting, used = (
            seconds * count for count in (engine.num_running, engine.num_waiting, self.pool.num_used)
        )
        self._watch(self, began, ended, TimelineInterval(seconds, prefill, decode, flops, read, running, waiting, used))

    # What others know of it -------------------------------------------------------------------------------------

    def announce(self, tell: Tell) -> None:
        """Report what its prefix index holds, at the end of each step."""
        assert self.model.index is not None
        self._announcer, self._tell_router = KvEventLog(self.model.index), tell

    def _tell_changes(self, moment: float) -> None:
        """Report what has changed in the index, by a step that ends then."""
        if self._announcer is None or not (changes := self._announcer.take()):
            return
        if moment <= self._events.now:
            self._report(changes)
        else:
            self._events.at(moment, partial(self._report, changes), self.number)

    def _report(self, changes: Changes) -> None:
        if self.alive and self._tell_router is not None:
            self._tell_router(self, changes)

    def has_room(self, kv: KVCache) -> bool:
        """Whether a value and a page to continue it fit, and its choice may run.

        A value that takes all pages fits as well: requests that need more than the pool has were refused.
        """
        index, wanted = self.model.index, min(kv.num_pages + 1, self.pool.num_pages)
        missing = wanted - self.pool.num_free
        fits = missing <= 0 or (index is not None and index.can_evict(missing))
        return fits and len(self.calls) + self.expected < self.setup.scheduler.max_running

    def arrived(self) -> list[KVCache]:
        """Values that have arrived and are not yet decoded from."""
        return [kv for values in self._arrived.values() for kv in values]

    def die(self) -> None:
        """Release everything that it holds. `alive` is False by then, so its planned events have no effect."""
        self.calls.clear()
        self._arrived.clear()
        self.engine.close()


def tokens_of(call: SimulatedRequest, vocab: int) -> list[int]:
    """A call's prompt, and the tokens that it has got."""
    return prompt_tokens(call.asked.pieces, vocab).tolist() + [vocab - 1] * len(call.tokens)


def made_in_no_time(setup: EngineSetup, pool: PagePool, call: SimulatedRequest) -> KVCache:
    """The KV that a call has by now, in a pool: what a prefill makes, in no time."""
    writer = KVWriter(KVCache.empty(pool), setup.model.name)
    writer.append(tokens_of(call, setup.vocab))
    made = writer.freeze(Tail(setup.model.name, NullLogits(1)))
    writer.close()
    return made


@lru_cache(maxsize=1 << 14)
def params_of(tokens: int) -> SamplingParams:
    """Parameters of an answer of exactly so many tokens. Cached: validating them is a large part of a request."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)


def failed(request: Request) -> bool:
    """Whether the pool had no room for a request. Raises any other error of it: that is a mistake."""
    if request.error is not None and not isinstance(request.error, OutOfPages):
        raise request.error
    return request.error is not None
