"""What one server does under a load: queueing before prefill, and decode steps that share the server with prefills.

Four models, each from its source, are put together. Arrivals are those of the traffic, not assumed to be Poisson.

- A prompt waits for those before it: the waiting times of a single server, first come first served (Lindley 1952,
  "The theory of queues with a single server"). With Poisson arrivals and prompts of one length this is M/D/1, as in
  DistServe (Zhong et al. 2024, arXiv:2401.09670, section 3.1). A chunk's time includes the tokens of those who decode.
- Decode goes on in both kinds of steps, with a chunk and without: a chain of two states says how many gaps of an answer
  are of each kind. The number of sequences is rate x seconds of an answer (Little 1961), whose seconds depend on the
  number of sequences: the least fixed point.
- A sequence finds a Poisson number of others beside it, as in a system without queueing (M/G/infinity).
- With a fixed number of users, mean value analysis (Reiser and Lavenberg 1980): an arrival finds what one user fewer
  leaves behind.

The engine gives half of a step to the prompts with the fewest tokens left (`engine/scheduler.py`): short prompts wait
less, and long ones more, than here. `twostroke simulate` has the engine's own order.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, lgamma, log

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.study.plan.service_level import ClosedLoopService, OpenLoopService, Percentiles
from twostroke.study.plan.service_times import QUANTILES, ServerModel, ServiceTimes
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic

FULL = 0.995  # part of the time that prefills may take
ITERATIONS = 2000
HALVINGS, PRECISION = 40, 2e-3  # in the search for the highest rate


@dataclass(frozen=True)
class _State:
    """Where a load settles.

    Attributes:
        sequences: that decode, on average over time; `busy` while there are prefills, `plain` while there are none.
        share: part of the time in steps with a chunk.
        part: of all gaps between tokens, those that are steps with a chunk.
    """

    sequences: float
    busy: float
    plain: float
    share: float
    part: float


class Queueing:
    """One server under one traffic, at any rate."""

    def __init__(
        self,
        server: ServerModel,
        traffic: Traffic,
        percent: float = 99.0,
        prefills: bool = True,
        decodes: bool = True,
        context: int | None = None,
    ) -> None:
        """`percent` is the percentile that objectives name. Workers of one stroke have no `prefills` or `decodes`.
        `context` is the mean of the entries before a decoded token, where not all of a prompt's are kept.

        Raises InvalidRequest if not even one sequence has room.
        """
        if server.max_sequences < 1:
            raise InvalidRequest("not even one sequence has room: a rate cannot be planned")
        self.server, self.traffic, self.percent = server, traffic, percent
        self.prefills, self.decodes = prefills, decodes
        self._times = ServiceTimes(server, traffic, context)

    @cached_property
    def _decoded(self) -> float:
        """Mean gaps of an answer."""
        return float(np.mean(self.traffic.outputs - 1)) if self.decodes else 0.0

    @cached_property
    def _gaps_of_answers(self) -> tuple[np.ndarray, np.ndarray]:
        """Gaps of answers of each length that there is, and how many answers have it."""
        return np.unique(self.traffic.outputs - 1, return_counts=True)

    def _service(self, sequences: float) -> np.ndarray:
        """[requests] seconds of each prefill beside so many sequences."""
        return self._times.prefills(sequences) if self.prefills else np.zeros(len(self.traffic.arrivals))

    # The load -------------------------------------------------------------------------------------------------

    def _settle(self, rate: float) -> _State | None:
        """Where sequences settle at a rate; None if they do not."""
        busy, plain, arrivals = 0.0, 0.0, self._arrivals(rate)
        for _ in range(ITERATIONS):
            services = self._service(busy)
            share = rate * float(np.mean(services))
            if share >= FULL:
                return None
            with_chunk, without = self._gap(busy), self._times.decode(1 + plain)
            # Whole prefills that a prefill leaves behind: as many as wait or are computed on average (Little).
            behind = share * float(np.mean(waits(arrivals, services) + services))
            part = self._beside_prefills(rate, share, behind / (1 - share), with_chunk, without)
            answers = rate * self._decoded
            found_busy = answers * part * with_chunk / share if share else 0.0
            found_plain = answers * (1 - part) * without / (1 - share)
            sequences = share * found_busy + (1 - share) * found_plain
            if max(sequences, found_busy) > self.server.max_sequences:
                return None
            change = max(abs(found_busy - busy), abs(found_plain - plain))
            busy, plain = found_busy, found_plain
            if change <= 1e-4 * max(1.0, sequences):
                return _State(sequences, busy, plain, share, part)
        return None

    def _gap(self, others: float) -> float:
        """Mean seconds of a step with a chunk beside a sequence and others."""
        return float(np.mean(self._times.chunks(1 + others))) if self.prefills else 0.0

    def _beside_prefills(self, rate: float, share: float, left: float, with_chunk: float, without: float) -> float:
        """The part of an answer's gaps that are steps with a chunk.

        Prefills come in busy periods, which begin `rate` times in a second that has none. An answer begins at the end
        of a prefill: others wait behind it with the chance `share`, and the busy period goes on for `left` seconds on
        average, over all answers. From then on it is in and out of busy periods: a chain of two states, counted in
        tokens.
        """
        if not share or not self._decoded:
            return 0.0
        gaps, answers = self._gaps_of_answers
        first = left / share / with_chunk  # gaps until the period ends, where there is one
        held = first * (1 - np.exp(-gaps / first)) if first > 0 else np.zeros(len(gaps))
        begins, ends = rate * without, rate * (1 - share) / share * with_chunk
        settled, pull = begins / (begins + ends), begins + ends

        def later(count: np.ndarray) -> np.ndarray:
            return settled * (count - (1 - np.exp(-pull * count)) / pull)

        found = (1 - share) * later(gaps) + share * (held + later(gaps - held))
        return min(1.0, float(answers @ found / (answers @ gaps)))

    def at(self, rate: float) -> OpenLoopService | None:
        """What happens at a rate; None if it cannot be served. Raises InvalidRequest for a rate that is not above 0."""
        if not rate > 0:
            raise InvalidRequest(f"a rate must be above 0 requests a second, not {rate:g}")
        state = self._settle(rate)
        if state is None:
            return None
        services = self._service(state.busy)
        waiting = waits(self._arrivals(rate), services)
        busy = (1 - state.share) * (1 - exp(-state.plain))  # in a step of decode, whose end is waited for
        random = np.random.default_rng(0)
        late = random.random(len(services)) < busy
        residual = late * random.random(len(services)) * self._times.decode(state.plain)
        waited = waiting + residual
        ttft = waited + services + self.server.request_s
        return OpenLoopService(
            rate,
            state.sequences,
            state.share,
            busy,
            float(np.mean(waited)),
            waited_in(ttft, waited, self.percent),
            self._gaps(replace(state, part=0.0)).wanted,
            Percentiles.of(ttft, np.ones(len(ttft)), self.percent),
            self._gaps(state),
        )

    def _arrivals(self, rate: float) -> np.ndarray:
        """[requests] seconds, at another rate than the traffic's own: all gaps are stretched alike."""
        own = self.traffic.rate
        if own is None:
            raise InvalidRequest("requests without times of arrival have no rate: say --rate")
        return np.array([one.at for one in self.traffic.arrivals]) * (own / rate)

    def _gaps(self, state: _State) -> Percentiles:
        """Gaps between tokens: steps with a chunk, and steps beside a Poisson number of others."""
        counts = np.arange(0, min(self.server.max_sequences, int(state.plain + 6 * state.plain**0.5 + 6)) + 1)
        if len(counts) > 4 * QUANTILES:
            counts = np.unique(np.linspace(0, counts[-1], 4 * QUANTILES).round().astype(int))
        found = np.array([self._times.decode(1.0 + count) for count in counts.tolist()])
        chances = np.array([_poisson(state.plain, count) for count in counts.tolist()])
        weights = chances / chances.sum() * (1 - state.part)
        if state.part:
            chunks = self._times.chunks(1 + state.busy)
            found = np.concatenate([found, chunks])
            weights = np.concatenate([weights, np.full(len(chunks), state.part / len(chunks))])
        return Percentiles.of(found, weights, self.percent)

    def closed(self, users: int) -> ClosedLoopService:
        """A fixed number of users. Raises InvalidRequest for none."""
        if users < 1:
            raise InvalidRequest(f"there must be at least 1 user, not {users}")
        return next(itertools.islice(self.growing(), users - 1, None))

    def growing(self) -> Iterator[ClosedLoopService]:
        """One user, two, three, without end: each finds what one fewer leaves behind."""
        queued = rate = sequences = 0.0
        for users in itertools.count(1):
            others = min(sequences, users - 1)
            service = float(np.mean(self._service(others)))
            waiting = service * queued
            ttft = service + waiting
            share = min(FULL, rate * service)
            decode = self._times.decode(1 + others)
            part = self._beside_prefills(rate, share, queued * service, self._gap(others), decode)
            itl = part * self._gap(others) + (1 - part) * decode
            rate = users / (ttft + self.server.request_s + self._decoded * itl)
            queued, sequences = rate * ttft, rate * self._decoded * itl
            yield ClosedLoopService(users, rate, sequences, waiting, decode, ttft + self.server.request_s, itl)

    # The highest rate -------------------------------------------------------------------------------------------

    def max_rate(self, objectives: Objectives | None = None, longer_s: float = 0.0) -> float:
        """The highest rate that can be served, within the objectives if there are any; 0 if none can.

        `longer_s` is what a transfer adds to TTFT.
        """
        decoding_s = self._decoded * self._times.decode(1) / self.server.max_sequences
        bound = 4.0 / max(1e-9, float(np.mean(self._service(0))) + decoding_s)
        limits = objectives or Objectives()
        if limits.ttft_s is not None:
            if longer_s >= limits.ttft_s:
                return 0.0
            limits = replace(limits, ttft_s=limits.ttft_s - longer_s)

        def holds(rate: float) -> bool:
            if not limits.given:
                return self._settle(rate) is not None
            found = self.at(rate)
            return found is not None and not found.missed(limits)

        low, high = 0.0, bound
        for _ in range(HALVINGS):
            if high - low <= PRECISION * high:
                break
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low


def waits(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """[n] seconds that each waits for those before it: W = max(0, W + S - A) in one pass (Lindley 1952)."""
    behind = np.concatenate([[0.0], np.cumsum(services[:-1] - np.diff(arrivals))])
    return behind - np.minimum.accumulate(behind)


def waited_in(ttft: np.ndarray, waited: np.ndarray, percent: float) -> float:
    """Seconds of waiting in a percentile of TTFT: the mean part of it, over the requests within half a percent of ranks
    around that percentile, times its TTFT."""
    order = np.argsort(ttft)
    place = percent / 100 * len(order)
    half = min(0.005 * len(order), place, len(order) - place)
    near = order[int(place - half) : max(int(place - half) + 1, int(np.ceil(place + half)))]
    middle = ttft[order[min(len(order) - 1, max(0, int(np.ceil(place)) - 1))]]
    return float(np.sum(waited[near]) / np.sum(ttft[near]) * middle)


def _poisson(mean: float, count: int) -> float:
    return exp(count * log(mean) - mean - lgamma(count + 1)) if mean > 0 else float(count == 0)
