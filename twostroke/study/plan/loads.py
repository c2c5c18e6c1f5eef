"""The requests of a plan's load: all of them, and the few of them that tell most."""

import math
from dataclasses import replace
from math import ceil

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.study.plan.plan import RequestProfile
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.techniques import PLAIN, RepeatedPrompt, Technique
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop, Replay
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.requests import Traffic, TrafficRequest
from twostroke.study.traffic.workload_sampler import WorkloadSampler

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


def require_positions(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a request has more tokens than the model has positions."""
    times = technique.times if isinstance(technique, RepeatedPrompt) else 1
    longest = int(np.max(times * traffic.prompts + traffic.outputs))
    if longest > model.max_position:
        raise InvalidRequest(
            f"the longest request has {longest} tokens; {model.name} has {model.max_position} positions"
        )


def require_load(model: ModelSpec, traffic: Traffic, technique: Technique = PLAIN) -> None:
    """Raises InvalidRequest if a load cannot be planned: a request exceeds the model's positions, the rate is unknown,
    or guesses would come from texts."""
    if technique.method.get("draft") == "lookup":
        raise InvalidRequest("prompt lookup cannot be simulated: its guesses come from texts. Leave out --method")
    require_positions(model, traffic, technique)
    if traffic.concurrency is None and traffic.rate is None:
        raise InvalidRequest("all requests of this trace come at once: say how many come a second with --rate")


def part_at_rate(traffic: Traffic, rate: float, part: int, seed: int) -> list[TrafficRequest]:
    """Every `part`-th request, as a router gives them in turn, at a rate of all of them. A trace keeps its bursts.

    The sum of `part` gamma-distributed gaps is gamma-distributed with so many times the shape.
    """
    if isinstance(traffic.pattern, OpenLoop):
        turns = replace(traffic.pattern, rate=rate / part, burstiness=part * traffic.pattern.burstiness)
        times = turns.times(len(traffic.arrivals), SEED + seed)
        return [replace(one, at=at) for one, at in zip(traffic.arrivals, times, strict=True)]
    picked = traffic.arrivals[seed % part :: part]
    scale = (traffic.rate or rate) / rate
    return [replace(one, at=scale * (one.at - picked[0].at)) for one in picked]


def some_of(traffic: Traffic, seed: int) -> list[TrafficRequest]:
    """As many requests as a trial takes, others for each seed."""
    count = min(_count(traffic), len(traffic.arrivals))
    first = seed * count % len(traffic.arrivals)
    return [*traffic.arrivals[first:], *traffic.arrivals[:first]][:count]


def _count(traffic: Traffic) -> int:
    return max(MIN_REQUESTS, min(MAX_REQUESTS, round(ANSWER_TOKENS / float(np.mean(traffic.outputs)))))


def busy_stretch(requests: list[TrafficRequest], prompt_s: float, percent: float) -> Traffic:
    """The stretch of a long load whose last request waits as long as `percent` % of all do at most.

    Percentiles of TTFT come from busy stretches, which a short simulation would hardly meet. A single server that takes
    `prompt_s` seconds for a mean prompt (Lindley 1952) tells where they are; what happens in them is simulated. A
    stretch begins where the server was idle.
    """
    at = np.array([one.at for one in requests])
    work = np.array([one.prompt_tokens for one in requests], float)
    seconds = prompt_s * work / work.mean()
    steps = np.concatenate([[0.0], np.cumsum(seconds[:-1] - np.diff(at))])
    waits = steps - np.minimum.accumulate(steps)
    order = np.argsort(waits + seconds, kind="stable")
    last = int(order[max(0, math.ceil(len(order) * percent / 100) - 1)])
    idle = int(np.flatnonzero(waits[: last + 1] == 0)[-1])
    first = max(0, last + 1 - MAX_REQUESTS, min(idle, last + 1 - MIN_REQUESTS))
    some = [replace(one, at=one.at - requests[first].at) for one in requests[first : last + 1]]
    return Traffic(some, Replay(tuple(one.at for one in some)), SEED)
