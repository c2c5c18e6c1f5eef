"""The requests of a plan's load: all of them, and the few of them that tell most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.study.plan.capacity import WorkerPace
from twostroke.study.plan.plan import RequestProfile
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.techniques import PLAIN, RepeatedPrompt, Technique
from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, Traffic, TrafficRequest
from twostroke.study.traffic.workload_sampler import TokenRange, WorkloadSampler

DRAWN = 4000  # requests that are drawn, of which trials take parts
SEED = 1
ANSWER_TOKENS = 6400  # that a trial makes: 0.3 s of one core
MIN_REQUESTS, MAX_REQUESTS = 24, 64


def drawn_traffic(
    load: RequestProfile, rate: float | None, users: int | None, burstiness: float, sharegpt: bool
) -> Traffic:
    """Requests of a plan's workload, or of ShareGPT's lengths, at a rate or by a number of users."""
    own = TokenRange(load.prompt - load.shared, load.prompt - load.shared)
    lengths = (None, None) if sharegpt else (own, TokenRange(load.output, load.output))
    pattern = OpenLoop(rate or 1.0, burstiness) if users is None else ClosedLoop(users)
    return WorkloadSampler(DRAWN, *lengths, prefix_tokens=load.shared, seed=SEED).traffic(pattern)


def mean_profile(traffic: Traffic, ttft_ms: float | None, itl_ms: float | None) -> RequestProfile:
    """A plan's workload of mean lengths."""
    prompt, shared = ceil(float(np.mean(traffic.prompts))), int(np.mean(traffic.shared))
    return RequestProfile(prompt, ceil(float(np.mean(traffic.outputs))), 1, min(shared, prompt - 1), ttft_ms, itl_ms)


def require_load(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a load cannot be planned: a request exceeds the model's positions, the rate is unknown,
    or guesses would come from texts."""
    if technique.method.get("draft") == "lookup":
        raise InvalidRequest("prompt lookup cannot be simulated: its guesses come from texts. Leave out --method")
    times = technique.times if isinstance(technique, RepeatedPrompt) else 1
    longest = int(np.max(times * traffic.prompts + traffic.outputs))
    if longest > model.max_position:
        raise InvalidRequest(
            f"the longest request has {longest} tokens; {model.name} has {model.max_position} positions"
        )
    if traffic.concurrency is None and traffic.rate is None:
        raise InvalidRequest("all requests of this trace come at once: say how many come a second with --rate")


def part_of(traffic: Traffic, part: int, seed: int) -> Traffic:
    """Every `part`-th request, as a router gives them in turn; of drawn requests any do as well."""
    if isinstance(traffic.pattern, OpenLoop) or part == 1:
        return traffic
    return Traffic.replayed(traffic.arrivals[seed % part :: part] or traffic.arrivals[:1], SEED)


def times_at_rate(traffic: Traffic, some: Traffic, rate: float, part: int, seed: int) -> list[float]:
    """When the requests of a part come at a rate of all of them. A trace keeps its bursts.

    The sum of `part` gamma-distributed gaps is gamma-distributed with so many times the shape.
    """
    if isinstance(traffic.pattern, OpenLoop):
        turns = replace(traffic.pattern, rate=rate / part, burstiness=part * traffic.pattern.burstiness)
        return turns.times(len(some.arrivals), SEED + seed)
    scale, first = (traffic.rate or rate) / rate, some.arrivals[0].at
    return [scale * (one.at - first) for one in some.arrivals]


def part_at_rate(traffic: Traffic, rate: float, part: int, seed: int, most: int | None = None) -> list[TrafficRequest]:
    """A part of the requests, at most so many of them, at the times that a rate of all gives them."""
    some = part_of(traffic, part, seed)
    times = times_at_rate(traffic, some, rate, part, seed)
    return [replace(one, at=at) for one, at in zip(some.arrivals[:most], times, strict=False)]


def some_of(traffic: Traffic, seed: int) -> list[TrafficRequest]:
    """As many requests as a trial takes, others for each seed."""
    wanted = round(ANSWER_TOKENS / float(np.mean(traffic.outputs)))
    count = min(max(MIN_REQUESTS, min(MAX_REQUESTS, wanted)), len(traffic.arrivals))
    first = seed * count % len(traffic.arrivals)
    return [*traffic.arrivals[first:], *traffic.arrivals[:first]][:count]


@dataclass(frozen=True)
class BusyStretch:
    """The end of a wait, as a short simulation has it."""

    # the requests that come, the last of them the one that is asked about; those that wait already come first, at once
    traffic: Traffic
    begun: Sequence[TrafficRequest]  # the ones before them, whose answers are under way
    wait: float  # seconds until the last one's first token by arithmetic


def busy_stretch(
    traffic: Traffic, times: Sequence[float], pace: WorkerPace, rate: float, percent: float
) -> BusyStretch:
    """The stretch of a long load whose last request waits as long as `percent` % of all do at most.

    Percentiles of TTFT come from busy stretches, which a short simulation would hardly meet. Arithmetic tells where
    they are; what happens in them is simulated. A request waits for room, of which as much comes free as `pace` says
    for so many in flight, and for the chunks of others (Lindley 1952).

    Args:
        times: when each request of the load comes, in place of its own times.
    """
    requests, work = traffic.arrivals, traffic.prompts / traffic.prompts.mean()
    slots, prompt_s, leaving, full = pace.slots, pace.prompt_s, pace.leaving, pace.leaving[-1]
    flying, queue, last = float(pace.steady(rate)), 0.0, times[0]
    waits, before, waiting = list[float](), list[float](), list[int]()
    for at, part in zip(times, work.tolist(), strict=True):
        flying = max(0.0, flying - leaving[min(round(flying), slots)] * (at - last))
        queue, last = max(0.0, queue - (at - last)), at
        mean = prompt_s[min(round(flying), slots)]
        waits.append(part * mean + max(queue, (flying + 1 - slots) / full))
        before.append(flying)
        waiting.append(math.ceil(max(0.0, flying - slots, queue / mean)))
        flying, queue = flying + 1, queue + part * mean
    order = np.argsort(waits, kind="stable")
    end = int(order[max(0, math.ceil(len(order) * percent / 100) - 1)])
    first = max(0, end + 1 - MIN_REQUESTS)
    known = min(first, waiting[first])
    some = [replace(requests[i], at=max(0.0, times[i] - times[first])) for i in range(first - known, end + 1)]
    begun = min(slots, round(before[first]) - waiting[first])
    chosen = [requests[i % len(requests)] for i in range(first - known - begun, first - known)]
    return BusyStretch(Traffic.replayed(some, SEED), chosen, waits[end])
