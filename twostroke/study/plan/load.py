"""What a plan carries: percentiles at a rate, the highest rate, utilization, workers apart or together, and tiers."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.study.plan.plan import Plan, RequestProfile
from twostroke.study.plan.queueing import Queueing
from twostroke.study.plan.service_level import ClosedLoopService, OpenLoopService
from twostroke.study.plan.service_times import ServerModel
from twostroke.study.plan.specification import ModelSpec
from twostroke.study.plan.techniques import PLAIN, RepeatedPrompt, Technique, WindowedDecode
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic
from twostroke.study.traffic.workload_sampler import WorkloadSampler as Drawn

DRAWN = 20_000  # requests that a distribution stands for: enough for a 99th percentile
BUDGET = 512  # tokens of a step: the engine's own default
MIN_GAIN = 1.05  # times as many requests a worker have to be served apart
SEED = 1


def drawn_traffic(
    load: RequestProfile, rate: float | None, users: int | None, burstiness: float, sharegpt: bool
) -> Traffic:
    """Requests of a plan's workload, or of ShareGPT's lengths, at a rate or by a number of users."""
    own = TokenRange(load.prompt - load.shared, load.prompt - load.shared)
    lengths = (None, None) if sharegpt else (own, TokenRange(load.output, load.output))
    pattern = OpenLoop(rate or 1.0, burstiness) if users is None else ClosedLoop(users)
    return Drawn(DRAWN, *lengths, prefix_tokens=load.shared, seed=SEED).traffic(pattern)


def mean_profile(traffic: Traffic, ttft_ms: float | None, itl_ms: float | None) -> RequestProfile:
    """A plan's workload of mean lengths."""
    prompt, shared = ceil(float(np.mean(traffic.prompts))), int(np.mean(traffic.shared))
    return RequestProfile(prompt, ceil(float(np.mean(traffic.outputs))), 1, min(shared, prompt - 1), ttft_ms, itl_ms)


@dataclass(frozen=True)
class PlannedLoad:
    """A plan under a traffic. What it needs of the queue is counted when it is asked for.

    Attributes:
        budget: maximum tokens of a step, the engine's `--max-step-tokens`: a prompt's chunk is what others leave of it.
        replicas: workers like the plan's, each with its part of the requests.
    """

    plan: Plan
    traffic: Traffic
    objectives: Objectives
    budget: int = BUDGET
    replicas: int = 1

    @property
    def fits(self) -> bool:
        """Whether a single sequence has room; without, no rate can be served."""
        return self.plan.memory.users >= 1

    @property
    def rate(self) -> float | None:
        """Requests a second; None for a fixed number of users."""
        return None if self.traffic.concurrency is not None else self.traffic.rate

    @cached_property
    def served(self) -> OpenLoopService | None:
        """None if the rate cannot be served, or for a fixed number of users (`closed`)."""
        return None if self.rate is None else self.at(self.rate)

    @cached_property
    def closed(self) -> ClosedLoopService | None:
        """None for a rate, or if nothing fits."""
        users = self.traffic.concurrency
        return None if users is None or not self.fits else self._both.closed(ceil(users / self.replicas))

    def at(self, rate: float) -> OpenLoopService | None:
        """What each worker does if so many requests a second come to all of them; None if they cannot be served."""
        return self._both.at(rate / self.replicas) if self.fits else None

    def grown(self, users: int) -> list[ClosedLoopService]:
        """What each worker does for 1, 2, ... users of its own, up to its part of `users`."""
        return list(islice(self._both.growing(), ceil(users / self.replicas) if self.fits else 0))

    @cached_property
    def max_rate(self) -> float:
        """The highest rate that a worker can serve at all."""
        return self._both.max_rate() if self.fits else 0.0

    @cached_property
    def max_rate_within(self) -> float:
        """The highest rate of a worker within the objectives."""
        return self._both.max_rate(self.objectives) if self.fits else 0.0

    @cached_property
    def prefill_rate(self) -> float:
        """The highest rate within the objectives of a worker that prefills alone."""
        if not self.fits:
            return 0.0
        return self._queueing(decodes=False).max_rate(replace(self.objectives, itl_s=None), self.transfer_s or 0.0)

    @cached_property
    def decode_rate(self) -> float:
        """The highest rate within the objectives of a worker that decodes alone."""
        if not self.fits:
            return 0.0
        return self._queueing(prefills=False).max_rate(replace(self.objectives, ttft_s=None))

    @property
    def transfer_s(self) -> float | None:
        """Seconds of a mean prompt's KV over the link; None if the link is unknown."""
        machine = self.plan.machine
        link = machine.link if machine.link is not None else machine.host
        size = self.plan.model.kv_bytes(ceil(float(np.mean(self.traffic.prompts))))
        return None if link is None else size / (link * machine.link_share)

    @cached_property
    def _both(self) -> Queueing:
        return self._queueing()

    def _queueing(self, prefills: bool = True, decodes: bool = True) -> Queueing:
        roofline = self.plan.roofline
        server = ServerModel(lambda rows: roofline.step(rows).seconds, self.budget, self.plan.memory.users)
        asked, technique, context = self.traffic, self.plan.technique, None
        if technique.method:
            lengths = zip(asked.prompts.tolist(), asked.outputs.tolist(), strict=True)
            context = int(np.average([technique.context(*one) for one in lengths], weights=asked.outputs))
        traffic = _entered(asked if asked.concurrency is None else asked.in_open_loop(OpenLoop(1.0)), technique)
        return Queueing(server, traffic, self.objectives.percent, prefills, decodes, context)

    @property
    def verdict(self) -> str:
        """ "nothing to do", "misses the objective" or "cannot be served"."""
        if self.closed is not None:
            return "misses the objective" if self.missed else "nothing to do"
        if self.served is None:
            return "cannot be served"
        return "misses the objective" if self.missed else "nothing to do"

    @property
    def missed(self) -> list[str]:
        if self.served is not None:
            return self.served.missed(self.objectives)
        if self.closed is None:
            return []
        limits = (
            ("TTFT", self.closed.ttft_s, self.objectives.ttft_s),
            ("ITL", self.closed.itl_s, self.objectives.itl_s),
        )
        return [name for name, value, limit in limits if limit is not None and value > limit]

    @property
    def binds(self) -> dict[str, str]:
        """What TTFT and ITL are bound by: "queueing", where more than half of TTFT is waiting; "interference", where
        more than half of a gap is a prompt's chunk; else what binds the stroke: "compute", "bandwidth" or "link".

        Of a rate that cannot be served, what binds "rate": "memory", or what binds the stroke that takes longer.
        """
        found = self.served or self.closed
        stroke = {"TTFT": self.plan.prefill.bound, "ITL": self.plan.decode(self.sequences).bound}
        if found is None:
            return {"rate": self._saturates(stroke)}
        parts = self.parts
        if parts["TTFT"][0] > parts["TTFT"][1]:
            stroke["TTFT"] = "queueing"
        if parts["ITL"][1] > parts["ITL"][0]:
            stroke["ITL"] = "interference"
        return stroke

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Seconds of TTFT that are waiting and prefill, and of ITL that are a decode step and a chunk in it: of the
        wanted percentile, or means for users. Empty if the rate cannot be served."""
        if (served := self.served) is not None:
            ttft, itl, waiting, decode = served.ttft.wanted, served.itl.wanted, served.waited_s, served.decode_s
        elif (closed := self.closed) is not None:
            ttft, itl, waiting, decode = closed.ttft_s, closed.itl_s, closed.waiting_s, closed.decode_s
        else:
            return {}
        decode = min(decode, itl)  # beside fewer sequences a chunk's step may be the shorter one
        return {"TTFT": (waiting, ttft - waiting), "ITL": (decode, itl - decode)}

    def _saturates(self, stroke: dict[str, str]) -> str:
        near = self.at(0.98 * self.max_rate * self.replicas) if self.max_rate > 0 else None
        if near is None or near.sequences > 0.9 * self.plan.memory.users:
            return "memory"
        return stroke["TTFT" if near.prefill_share > near.decode_share else "ITL"]

    @property
    def sequences(self) -> int:
        """Sequences that decode at once, rounded up; as many as memory allows where the rate cannot be served."""
        found = self.served or self.closed
        return max(1, self.plan.memory.users if found is None else ceil(found.sequences))

    @property
    def peak(self) -> int:
        """Sequences that decode or prefill at once, a bound that is rarely exceeded; at most as many as memory allows.

        Three deviations of a Poisson number above the mean, and the one that is prefilled.
        """
        found = self.served or self.closed
        mean = self.plan.memory.users if found is None else found.sequences
        return max(1, min(self.plan.memory.users, ceil(mean + 3 * mean**0.5) + 1))

    @property
    def rate_apart(self) -> float:
        """Requests/s and worker within the objectives where each worker does one stroke, at the best ratio."""
        rates = (self.prefill_rate, self.decode_rate)
        return 0.0 if min(rates) <= 0 else 1 / sum(1 / rate for rate in rates)

    @property
    def workers(self) -> int | None:
        """Workers of both strokes for the rate, within the objectives; None if no number is enough."""
        return None if self.rate is None or self.max_rate_within <= 0 else ceil(self.rate / self.max_rate_within)

    @property
    def workers_apart(self) -> tuple[int, int] | None:
        """Prefill and decode workers for the rate, within the objectives; None if no number is enough."""
        if self.rate is None or self.rate_apart <= 0:
            return None
        return ceil(self.rate / self.prefill_rate), ceil(self.rate / self.decode_rate)

    @property
    def apart(self) -> tuple[bool, str]:
        """Whether prefill and decode should have workers of their own, and why."""
        if not self.fits:
            return False, "not even one sequence has room"
        if self.transfer_s is None:
            return False, "the link is unknown"
        if self.prefill_rate <= 0:
            return False, "TTFT is missed by a prefill and a transfer alone"
        if self.decode_rate <= 0:
            return False, "ITL is missed by decode alone"
        if self.workers == 1:
            return False, "one worker carries this rate"
        if self.rate_apart < MIN_GAIN * self.max_rate_within:
            return False, "it serves no more requests a worker"
        together, apart = self.workers, self.workers_apart
        if together is not None and apart is not None and sum(apart) >= together:
            return False, f"it takes {sum(apart)} workers for this rate, and {together} together"
        return True, "it serves more requests a worker within the objectives"


def make_load(plan: Plan, traffic: Traffic, objectives: Objectives) -> PlannedLoad:
    """Put a plan under a traffic. Raises InvalidRequest if a request exceeds the model's positions, if the rate is
    unknown, or for a technique whose steps are not those of one model with a token a sequence."""
    if not isinstance(plan.technique, RepeatedPrompt | WindowedDecode) and plan.technique.method:
        raise InvalidRequest(
            "a load is planned for plain, repeat, ptdo and drop: leave out --method, or ask `twostroke simulate`"
        )
    require_positions(plan.model, traffic, plan.technique)
    if traffic.concurrency is None and traffic.rate is None:
        raise InvalidRequest("all requests of this trace come at once: say how many come a second with --rate")
    return PlannedLoad(plan, traffic, objectives)


def require_positions(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a request has more tokens than the model has positions."""
    longest = int(np.max(_entered(traffic, technique).prompts + traffic.outputs))
    if longest > model.max_position:
        raise InvalidRequest(
            f"the longest request has {longest} tokens; {model.name} has {model.max_position} positions"
        )


def _entered(traffic: Traffic, technique: Technique) -> Traffic:
    """The requests with the prompts that a technique prefills."""
    times = technique.times if isinstance(technique, RepeatedPrompt) else 1
    if times == 1:
        return traffic
    arrivals = [replace(one, pieces=one.pieces * times) for one in traffic.arrivals]
    return Traffic(arrivals, traffic.pattern, traffic.seed)
