"""What a plan carries: percentiles at a rate, the highest rate, utilization, workers apart or together, and tiers."""

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.planning.plan import Plan, Workload
from twostroke.planning.queueing import Closed, Queueing, Served, Server
from twostroke.planning.roofline import StepTime
from twostroke.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.traffic.lengths import Range
from twostroke.traffic.objectives import Objectives
from twostroke.traffic.requests import Traffic
from twostroke.traffic.workload import Workload as Drawn

DRAWN = 20_000  # requests that a distribution stands for: enough for a 99th percentile
BUDGET = 512  # tokens of a step: the engine's own default
LEAST_GAIN = 1.05  # times as many requests a worker have to be served apart
SEED = 1


def drawn(load: Workload, rate: float | None, users: int | None, burstiness: float, sharegpt: bool) -> Traffic:
    """Requests of a plan's workload, or of ShareGPT's lengths, at a rate or by a number of users."""
    own = Range(load.prompt - load.shared, load.prompt - load.shared)
    lengths = (None, None) if sharegpt else (own, Range(load.output, load.output))
    pattern = OpenLoop(rate or 1.0, burstiness) if users is None else ClosedLoop(users)
    return Drawn(DRAWN, *lengths, prefix_tokens=load.shared, seed=SEED).traffic(pattern)


def shape_of(traffic: Traffic, ttft_ms: float | None, itl_ms: float | None) -> Workload:
    """A plan's workload of mean lengths."""
    prompt, shared = ceil(float(np.mean(traffic.prompts))), int(np.mean(traffic.shared))
    return Workload(prompt, ceil(float(np.mean(traffic.outputs))), 1, min(shared, prompt - 1), ttft_ms, itl_ms)


@dataclass(frozen=True)
class Load:
    """A plan under a traffic.

    Attributes:
        rate: requests a second; None for a fixed number of users.
        served: None if the rate cannot be served, or for a fixed number of users (`closed`).
        most, most_within: the highest rates that can be served at all, and within the objectives.
        prefill_rate, decode_rate: highest rates within the objectives of a worker that does one stroke alone.
        transfer_s: of a mean prompt's KV over the link; None if the link is unknown.
    """

    plan: Plan
    traffic: Traffic
    objectives: Objectives
    rate: float | None
    served: Served | None
    closed: Closed | None
    most: float
    most_within: float
    prefill_rate: float
    decode_rate: float
    transfer_s: float | None

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
    def sequences(self) -> int:
        """That decode at once, rounded up; what memory allows where the rate cannot be served."""
        found = self.served or self.closed
        return max(1, self.plan.memory.users if found is None else ceil(found.sequences))

    @property
    def rate_apart(self) -> float:
        """Requests/s and worker within the objectives where each worker does one stroke, at the best ratio."""
        rates = (self.prefill_rate, self.decode_rate)
        return 0.0 if min(rates) <= 0 else 1 / sum(1 / rate for rate in rates)

    @property
    def workers(self) -> int | None:
        """Workers of both strokes for the rate, within the objectives; None if no number is enough."""
        return None if self.rate is None or self.most_within <= 0 else ceil(self.rate / self.most_within)

    @property
    def workers_apart(self) -> tuple[int, int] | None:
        """Prefill and decode workers for the rate, within the objectives; None if no number is enough."""
        if self.rate is None or self.rate_apart <= 0:
            return None
        return ceil(self.rate / self.prefill_rate), ceil(self.rate / self.decode_rate)

    @property
    def apart(self) -> tuple[bool, str]:
        """Whether prefill and decode should have workers of their own, and why."""
        if self.transfer_s is None:
            return False, "the link is unknown"
        if self.prefill_rate <= 0:
            return False, "TTFT is missed by a prefill and a transfer alone"
        if self.decode_rate <= 0:
            return False, "ITL is missed by decode alone"
        if self.workers == 1:
            return False, "one worker carries this rate"
        if self.rate_apart < LEAST_GAIN * self.most_within:
            return False, "it serves no more requests a worker"
        together, apart = self.workers, self.workers_apart
        if together is not None and apart is not None and sum(apart) >= together:
            return False, f"it takes {sum(apart)} workers for this rate, and {together} together"
        return True, "it serves more requests a worker within the objectives"


def make_load(plan: Plan, traffic: Traffic, objectives: Objectives) -> Load:
    """Put a plan under a traffic. Raises InvalidRequest if a request exceeds the model's positions, or if the rate is
    unknown."""
    longest = int(np.max(traffic.prompts + traffic.outputs))
    if longest > plan.model.max_position:
        raise InvalidRequest(
            f"the longest request has {longest} tokens; {plan.model.name} has {plan.model.max_position} positions"
        )
    users = traffic.concurrency
    if users is None and traffic.rate is None:
        raise InvalidRequest("all requests of this trace come at once: say how many come a second with --rate")
    percent = objectives.percent
    roofline = plan.roofline
    server = Server(lambda rows: roofline.step(rows).seconds, BUDGET, max(1, plan.memory.users))
    open_loop = traffic if users is None else _at_any_rate(traffic)
    both = Queueing(server, open_loop, percent)
    prefill = Queueing(server, open_loop, percent, decodes=False)
    decode = Queueing(server, open_loop, percent, prefills=False)
    machine = plan.machine
    link = machine.link if machine.link is not None else machine.host
    size = plan.model.kv_bytes(ceil(float(np.mean(traffic.prompts))))
    transfer = None if link is None else size / (link * machine.link_share)
    ttft, itl = replace(objectives, itl_s=None), replace(objectives, ttft_s=None)
    return Load(
        plan,
        traffic,
        objectives,
        traffic.rate,
        both.at(traffic.rate) if users is None and traffic.rate is not None else None,
        None if users is None else both.closed(users),
        most=both.most(),
        most_within=both.most(objectives),
        prefill_rate=prefill.most(ttft, transfer or 0.0),
        decode_rate=decode.most(itl),
        transfer_s=transfer,
    )


def _at_any_rate(traffic: Traffic) -> Traffic:
    """Requests of a closed loop at random times, to ask for the highest rate."""
    pattern = OpenLoop(1.0)
    times = pattern.times(len(traffic.arrivals), SEED)
    return Traffic([replace(one, at=at) for one, at in zip(traffic.arrivals, times, strict=True)], pattern, SEED)


def load_facts(load: Load) -> dict[str, Any]:
    """Everything that a load tells, as plain values."""
    prompts, outputs, shared = load.traffic.prompts, load.traffic.outputs, load.traffic.shared
    pays, why = load.apart
    size = load.plan.model.kv_bytes(ceil(float(np.mean(prompts))))
    served, closed = load.served, load.closed
    return {
        "verdict": load.verdict,
        "missed": load.missed,
        "percentile": load.objectives.percent,
        "requests_per_second": load.rate,
        "users": load.traffic.concurrency,
        "lengths": {
            "requests": len(prompts),
            **{f"prompt_{name}": value for name, value in _lengths(prompts).items()},
            **{f"output_{name}": value for name, value in _lengths(outputs).items()},
            "shared_part": float(shared.sum() / prompts.sum()),
        },
        "served": None if served is None else {**_served(served), "utilization": _utilization(load, served)},
        "closed": None if closed is None else asdict(closed),
        "most_requests_per_second": load.most,
        "most_within_objectives": load.most_within if load.objectives.given else None,
        "workers_needed": load.workers,
        "apart": {
            "pays": pays,
            "why": why,
            "prefill_worker_requests_per_second": load.prefill_rate,
            "decode_worker_requests_per_second": load.decode_rate,
            "workers": load.workers_apart,
            "prefill_workers_per_decode_worker": load.decode_rate / load.prefill_rate if load.prefill_rate else None,
            "requests_per_second_and_worker": load.rate_apart,
            "together_requests_per_second_and_worker": load.most_within,
            "kv_bytes_per_prompt": size,
            "link_bytes_per_second": None if load.rate is None else load.rate * size,
            "transfer_ms": None if load.transfer_s is None else 1e3 * load.transfer_s,
        },
        "tiers": _tiers(load.plan),
    }


def _lengths(counts: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.mean(counts)), "p50": float(np.median(counts)), "p99": float(np.percentile(counts, 99))}


def _served(served: Served) -> dict[str, Any]:
    def ms(spread: Any) -> dict[str, float]:
        return {name: 1e3 * value for name, value in asdict(spread).items()}

    return {
        "sequences": served.sequences,
        "waiting_ms": 1e3 * served.waiting_s,
        "ttft_ms": ms(served.ttft),
        "itl_ms": ms(served.itl),
    }


def _utilization(load: Load, served: Served) -> dict[str, Any]:
    """Parts of the time that each stroke takes, and of the peaks that it uses meanwhile."""
    decode = load.plan.decode(load.sequences)
    strokes = (("prefill", served.prefill_share, load.plan.prefill), ("decode", served.decode_share, decode))
    return {name: {"time": share, **_used(load.plan, step)} for name, share, step in strokes}


def _used(plan: Plan, step: StepTime) -> dict[str, float]:
    machine = plan.machine
    compute = sum(part.compute_s for part in step.parts) * machine.compute
    memory = sum(part.memory_s for part in step.parts) * machine.memory_share
    return {"compute": compute / step.seconds, "bandwidth": memory / step.seconds}


def _tiers(plan: Plan) -> list[dict[str, Any]]:
    """For each place whose bandwidth is known: whether reading a prompt's KV is quicker than computing it."""
    machine, needed = plan.machine, plan.break_even_bandwidth
    places = (
        ("host memory", machine.host, machine.link_share),
        ("another device", machine.link, machine.link_share),
        ("disk", machine.disk, 1.0),
        ("loopback", machine.loopback, 1.0),
    )
    return [
        {"tier": name, "bytes_per_second": rate * share, "pays": rate * share > needed, "times": rate * share / needed}
        for name, rate, share in places
        if rate is not None
    ]
