"""A short simulation in the steady state of a load: what its users get, and whether a fleet keeps up with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twostroke.engine.timings import percentile
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.simulation import BegunRequest, Simulation
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import Traffic

CHECK = 32  # events between two looks at whether the answer is known


@dataclass(frozen=True)
class Trial:
    """What the users of a load got until the last had a first token, or until it was clear that too many wait."""

    objectives: Objectives
    # seconds of each request until its first token; infinity for those that had none when the trial was given up and it
    # was too late for them
    ttft: Sequence[float]
    gaps: Sequence[float]  # seconds between tokens, of all answers together
    sequences: float  # decoded at once, on average
    first_tokens: Sequence[float]  # when these came, in order

    def at(self, values: Sequence[float], percent: float | None = None) -> float | None:
        """A percentile, of the objectives' unless another is asked for; None without values."""
        return percentile(values, self.objectives.percent if percent is None else percent)

    @cached_property
    def missed(self) -> list[str]:
        """Objectives that are missed: "TTFT", "ITL"."""
        limits = (("TTFT", self.ttft, self.objectives.ttft_s), ("ITL", self.gaps, self.objectives.itl_s))
        return [name for name, got, limit in limits if limit is not None and (self.at(got) or 0.0) > limit]

    @property
    def token_rate(self) -> float:
        """Tokens a second of all answers, first ones left out."""
        return self.sequences * len(self.gaps) / sum(self.gaps) if self.gaps else 0.0

    @property
    def first_token_rate(self) -> float:
        """First tokens a second, without the first tenth of them: what a fleet serves if it never lacks prompts."""
        times = self.first_tokens[len(self.first_tokens) // 10 :]
        span = times[-1] - times[0] if len(times) > 1 else 0.0
        return (len(times) - 1) / span if span > 0 else math.inf


def try_load(fleet: Fleet, traffic: Traffic, objectives: Objectives, begun: Sequence[BegunRequest] = ()) -> Trial:
    """Run a load until all have a first token, or until more miss an objective than may.

    Args:
        begun: what is decoded when the first request comes.
    """
    simulation = Simulation(fleet, traffic, begun=begun)
    count, events = len(traffic.arrivals), simulation.events
    may_miss = math.floor(count * (1 - objectives.percent / 100) + 1e-9)
    while simulation.left and events.step():
        if events.count % CHECK or simulation.came < min(count, may_miss + 1):
            continue
        firsts = [_tokens(simulation, call)[:1] for call in simulation.calls]
        if simulation.came == count and all(firsts):
            break
        if (limit := objectives.ttft_s) is not None:
            pairs = zip(simulation.calls, firsts, strict=True)
            late = sum((first[0] if first else events.now) - call.arrival > limit for call, first in pairs)
            if late > may_miss:
                break
        if (limit := objectives.itl_s) is not None and not events.count % (8 * CHECK):
            most = int(traffic.outputs.sum()) + sum(one.asked.output_tokens - one.made for one in begun)
            slow = sum(gap > limit for gap in _gaps(simulation))
            if slow > most * (1 - objectives.percent / 100):
                break
    return _told(simulation, objectives)


def _tokens(simulation: Simulation, call: SimulatedRequest) -> list[float]:
    """When a call's tokens came, also those of an answer under way."""
    live = (worker.calls[call].timings.tokens for worker in simulation.workers if call in worker.calls)
    return [*call.tokens, *(at for tokens in live for at in tokens)]


def _told(simulation: Simulation, objectives: Objectives) -> Trial:
    ttft, firsts, now = list[float](), list[float](), simulation.events.now
    for call in simulation.calls:
        if tokens := _tokens(simulation, call):
            ttft.append(tokens[0] - call.arrival)
            firsts.append(tokens[0])
        elif objectives.ttft_s is not None and now - call.arrival > objectives.ttft_s:
            ttft.append(math.inf)
    gaps = _gaps(simulation)
    span = max((worker.clock.now for worker in simulation.workers), default=0.0)
    return Trial(objectives, ttft, gaps, sum(gaps) / span if span else 0.0, sorted(firsts))


def _gaps(simulation: Simulation) -> list[float]:
    """Seconds between tokens of all answers, without those that had been made before the simulation began."""
    answers = [_tokens(simulation, call) for call in simulation.calls]
    answers += [[at for at in _tokens(simulation, call) if at > 0] for call in simulation.begun]
    found = [np.diff(tokens) for tokens in answers if len(tokens) > 1]
    return np.concatenate(found).tolist() if found else []
