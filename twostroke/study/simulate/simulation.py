"""A fleet under traffic: calls come, are routed, prefilled, moved, decoded, and survive the deaths of workers."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from twostroke.engine.request import Request
from twostroke.engine.router import LeastLoaded, RoundRobin, Router
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.study.simulate.fleet import Fleet, make_router, routed
from twostroke.study.simulate.kv_transfers import KvTransfers
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.virtual_time import EventQueue
from twostroke.study.simulate.worker import SimulatedWorker, StepObserver, failed, made_in_no_time
from twostroke.study.traffic.requests import Traffic, TrafficRequest

FAULTS = (
    "death", "death of a busy worker", "death of a sender", "death of a receiver", "sent to a dead worker", "no worker",
    "no room", "cut answer", "lost transfer",
)  # fmt: skip
MAX_DEATHS = 1000  # of workers that serve one request, beyond the tokens that it has
RETRY_S = 0.1  # until a call is routed again for which an engine had no room


class BegunRequest(NamedTuple):
    """A request of which `made` tokens, at least one, have been decoded."""

    asked: TrafficRequest
    made: int


class Simulation:
    """Runs traffic on a fleet.

    Attributes:
        came: how many calls have come.
        calls: these, in order; none unless they are kept. begun: those that were decoded from the start.
        steps: steps of workers that are gone. stranded: pages that these still counted as used: always 0.
    """

    def __init__(
        self,
        fleet: Fleet,
        traffic: Traffic,
        watch: StepObserver | None = None,
        ended: Callable[[SimulatedRequest], None] | None = None,
        keep: bool = True,
        begun: Sequence[BegunRequest] = (),
    ) -> None:
        """`watch` is told of each engine's steps, `ended` of each call that has got all its tokens.
        `keep`: whether `calls` has them; a million of them with all their tokens take gigabytes.
        `begun`: what workers decode when time begins, as many as have room; `ended` is not told of them.

        Raises InvalidRequest: a request does not fit.
        """
        entered = [fleet.setup.technique.entered(int(count)) for count in traffic.prompts]
        longest, most = int((np.maximum(entered, traffic.prompts) + traffic.outputs).max()), fleet.setup.max_tokens
        if longest > most:
            raise InvalidRequest(
                f"the longest request has {longest:,} tokens, and an engine has room for {most:,} (positions of "
                f"{fleet.setup.model.name}, or its KV)"
            )
        self.fleet, self.traffic = fleet, traffic
        self.events = EventQueue()  # what happens when
        self.came, self.calls, self.begun = 0, list[SimulatedRequest](), list[SimulatedRequest]()
        self.happened: Counter[str] = Counter()  # how often each of `FAULTS` has happened
        self.steps = self.stranded = 0
        self.workers: list[SimulatedWorker] = []  # those that live
        self._watch, self._ended, self._keep = watch, ended, keep
        self._arrivals = iter(traffic.arrivals)
        self._open = 0
        self._waiting: list[Callable[[], None]] = []  # what needs a worker, while there is none
        self._routers: dict[SimulatedWorker, Router[SimulatedWorker]] = {}
        self.transfers = KvTransfers(fleet, self.events, self.happened, self._again, self._drop)
        self._lives = random.Random(f"lives {fleet.faults.seed}")
        self.router = make_router(fleet.router)
        self._decoders: Router[SimulatedWorker] | None = None
        self._numbers = 0
        for _ in range(fleet.prefill or fleet.together):
            self.begin_worker(self.router)
        if fleet.disaggregated:
            self._decoders = RoundRobin() if fleet.router == "round-robin" else LeastLoaded()
            for _ in range(fleet.decode):
                self.begin_worker(self._decoders)
        self._resume(begun)
        if traffic.concurrency is None:
            self._plan_next()
        else:
            for asked in islice(self._arrivals, traffic.concurrency - len(self.begun)):
                self.events.at(0.0, partial(self._arrive, asked))

    # Running ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every request has all its tokens.

        Raises InvalidRequest: workers die too soon for any to get them.
        """
        while self.left and self.events.step():
            pass

    @property
    def left(self) -> int:
        """Number of requests that have not ended, those that have not come included."""
        return len(self.traffic.arrivals) - self.came + self._open

    @property
    def num_steps(self) -> int:
        """Steps of all workers, those that died included."""
        return self.steps + sum(worker.steps for worker in self.workers)

    def _resume(self, begun: Sequence[BegunRequest]) -> None:
        """Decode requests from where they are. Those for which there is no room are left out."""
        router = self._decoders or self.router
        calls = [SimulatedRequest(-1 - i, one.asked, 0.0, [0.0] * one.made) for i, one in enumerate(begun)]
        setup, pool = self.fleet.setup, self.fleet.setup.open_pool()
        for call in calls:
            kv, worker = made_in_no_time(setup, pool, call), router.choose(routed(call, setup))
            if worker is None or not worker.has_room(kv):
                if worker is not None:
                    router.done(worker, routed(call, setup).pages)
                return
            self.begun.append(call)
            self._open += 1
            worker.decode(call, [kv.copy_to(worker.pool)])
            del kv  # the next one may need its pages

    # Workers ----------------------------------------------------------------------------------------------------

    def begin_worker(self, router: Router[SimulatedWorker]) -> None:
        """Start a worker."""
        worker = SimulatedWorker(self._numbers, self.fleet.setup, self.events, self._over, self._watch)
        self._numbers += 1
        self.workers.append(worker)
        self.transfers.join(worker)
        self._routers[worker] = router
        router.join(worker)
        if self.fleet.router == "kv-aware" and router is self.router:
            worker.announce(router.tell)
        if (life_s := self.fleet.faults.life_s) is not None:
            dies_at = self.events.now + self._lives.expovariate(1 / life_s)
            if dies_at <= self.fleet.faults.until_s:
                self.events.at(dies_at, partial(self._die, worker))
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()

    def _die(self, worker: SimulatedWorker) -> None:
        """Kill a worker. Its users keep the tokens that they have; the rest is computed elsewhere."""
        now, faults = self.events.now, self.fleet.faults
        self.happened["death"] += 1
        self.happened["death of a busy worker"] += bool(worker.calls)
        worker.alive = False
        for call, request in worker.calls.items():
            self._take_tokens(call, request, now)
            del request  # it holds pages
        worker.orphans += worker.calls
        worker.orphans += self.transfers.leave(worker)
        self.workers.remove(worker)
        self.steps += worker.steps
        worker.die()
        self.stranded += worker.pool.num_used
        self.events.at(now + faults.notice_s, partial(self._notice, worker))

    def _notice(self, worker: SimulatedWorker) -> None:
        """Tell the router of a death, and give the worker's requests to others."""
        router = self._routers.pop(worker)
        router.leave(worker)
        self.events.at(self.events.now + self.fleet.faults.down_s, partial(self.begin_worker, router))
        for call in sorted(worker.orphans, key=lambda call: call.number):
            call.deaths += 1
            if call.deaths - len(call.tokens) > MAX_DEATHS:
                raise InvalidRequest(
                    f"request {call.number} would never end: {MAX_DEATHS:,} workers died before it had another token; "
                    f"workers must live longer than {self.fleet.faults.life_s:g} s"
                )
            self._again(call)

    # Calls ------------------------------------------------------------------------------------------------------

    def _plan_next(self) -> None:
        """Plan the next arrival of an open loop."""
        if (asked := next(self._arrivals, None)) is not None:
            self.events.at(asked.at, partial(self._arrive, asked))

    def _arrive(self, asked: TrafficRequest) -> None:
        call = SimulatedRequest(self.came, asked, self.events.now)
        self.came += 1
        if self._keep:
            self.calls.append(call)
        self._open += 1
        if self.traffic.concurrency is None:
            self._plan_next()
        way_s = self.fleet.setup.http.request_delay(asked.prompt_tokens)
        self.events.at(self.events.now + way_s, partial(self._place, call))

    def _place(self, call: SimulatedRequest) -> None:
        """Give a call to a worker, which prefills it, and decodes it unless others do that."""
        worker = self.router.choose(routed(call, self.fleet.setup))
        if worker is None:
            self.happened["no worker"] += 1
            self._waiting.append(partial(self._place, call))
        elif not worker.alive:
            self.happened["sent to a dead worker"] += 1
            worker.orphans.append(call)
        elif self.fleet.disaggregated:
            worker.prefill(call)
        else:
            worker.answer(call)

    def _again(self, call: SimulatedRequest) -> None:
        """Start a request again after its work was lost; its user keeps the tokens made so far."""
        if call.left:
            call.moves += 1
            self._place(call)
        else:
            self._end(call)

    def _over(self, worker: SimulatedWorker, call: SimulatedRequest, request: Request) -> None:
        """Take the result of an engine's request that has ended."""
        prefilled = isinstance(request.result, KVCache)
        self._take_tokens(call, request, self.events.now)
        worker.leave(call)
        self._drop(worker, call)
        if failed(request):  # no room for a moment
            self.happened["no room"] += 1
            self.events.at(self.events.now + RETRY_S, partial(self._again, call))
        elif prefilled:
            self._send(worker, call, request.result)
        elif call.left:  # its answer was cut, since others held the pages that it needed
            self.happened["cut answer"] += 1
            self._again(call)
        else:
            self._end(call)
        self.transfers.pump(worker)

    def _drop(self, worker: SimulatedWorker, call: SimulatedRequest) -> None:
        """Tell its router that a worker has no more to do for a call."""
        self._routers[worker].done(worker, routed(call, self.fleet.setup).pages)

    def _send(self, source: SimulatedWorker, call: SimulatedRequest, kv: KVCache) -> None:
        """Send a prompt's KV to a decode worker."""
        assert self._decoders is not None
        target = self._decoders.choose(routed(call, self.fleet.setup))
        if target is None:
            self._waiting.append(partial(self._again, call))
        elif not target.alive:
            target.orphans.append(call)
        else:
            self.transfers.send(source, target, call, kv)

    def _take_tokens(self, call: SimulatedRequest, request: Request, now: float) -> None:
        """Hand over the tokens that a request has made by now."""
        timings = request.timings
        call.tokens += [at for at in timings.tokens if at <= now]
        if call.scheduled is None:
            call.scheduled = timings.scheduled
        call.cached += request.cached_tokens
        call.entered += request.prefilled_tokens - request.cached_tokens
        call.preemptions += request.preemptions

    def _end(self, call: SimulatedRequest) -> None:
        call.tokens = self.fleet.setup.http.delivery_times(call.number, call.tokens)
        call.ended = call.tokens[-1]
        self._open -= 1
        if self._ended is not None and call.number >= 0:
            self._ended(call)
        if self.traffic.concurrency is not None and (asked := next(self._arrivals, None)) is not None:
            if call.ended > self.events.now:  # its user does not know it yet
                self.events.at(call.ended, partial(self._arrive, asked))
            else:
                self._arrive(asked)
