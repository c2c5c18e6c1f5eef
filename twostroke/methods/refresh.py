"""KV refresh: OverFill whose student gets the teacher's entries of its own answer from time to time.

Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation". In their sketch the token sampled last
is in the teacher's cache and not yet in the student's when tails are spliced, so entries land one place off. Here it
is pending: the teacher enters what the student has entered, and places agree. Only what is new is entered; a refresh
from scratch would give the same entries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.engine.sampler import Sampled
from twostroke.engine.strokes import Decode, Prefill, Program, Run
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt, require_choice, require_int, require_number

WARM_UP = 32  # tokens before a budget spends: a percentile of fewer says little


@dataclass(frozen=True)
class Refreshes:
    """What a refreshed answer took: after how many tokens each refresh came, and what the teacher entered for them."""

    at: tuple[int, ...]
    teacher_tokens: int


@dataclass(frozen=True)
class Refresh(Method, name="refresh"):
    """The teacher (the engine's own model) prefills, the student decodes, and `when` it is due the teacher's entries
    of the answer take the place of the student's.

    Attributes:
        when: "periodic", every `every` tokens (with `window` = `every` = k also called speculative refresh, in bursts
            of k); "entropy", as soon as the student's next-token entropy exceeds `threshold` bits; "budget", as soon
            as it exceeds the percentile of the answer so far that allows `budget` refreshes per 1,000 tokens; "probe",
            where KL(teacher || student) of the next token, looked at every `every` tokens, exceeds `threshold` nats.
        every: tokens between refreshes or probes; under the other two, the fewest tokens between refreshes.
        window: at most so many of the last entries are replaced; None for all since the last refresh.
    """

    when: str = "periodic"
    every: int = 64
    window: int | None = None
    threshold: float = 6.0
    budget: float = 2.5

    def __post_init__(self) -> None:
        require_choice(self, "when", ("periodic", "entropy", "budget", "probe"))
        require_int(self, "every", 1)
        if self.window is not None:
            require_int(self, "window", 1)
        require_number(self, "threshold", 0)
        require_number(self, "budget", 0, 1000)

    @property
    def companions(self) -> tuple[str, ...]:
        return ("student",)

    def program(self, prompt: Prompt) -> Program:
        teacher = kv = yield Prefill(prompt)
        entropies: list[float] = []
        at: list[int] = []
        while True:
            run: Run = yield self.stretch(kv, entropies, len(at))
            entropies += [sampled.entropy or 0.0 for sampled in run.sampled]
            if run.finish_reason is not None:
                return Refreshes(tuple(at), len(teacher) - len(prompt))
            since, entered = len(teacher), run.kv.tokens[len(teacher) :]
            if self.when == "probe":
                assert run.kv.pending is not None
                teacher, kv = yield [
                    Prefill([*entered, run.kv.pending], teacher),
                    Prefill([], run.kv, model="student"),
                ]
                if divergence(teacher, kv) <= self.threshold:
                    continue
            else:
                teacher = yield Prefill(entered, teacher, logits="none")
            start = since if self.window is None else max(since, len(run.kv) - self.window)
            kv = splice(run.kv, teacher, start)
            at.append(len(entropies))

    def stretch(self, kv: KVCache, entropies: list[float], refreshes: int) -> Decode:
        """Decode until a refresh or a probe is due."""
        if self.when in ("periodic", "probe"):
            return Decode(kv, model="student", max_tokens=self.every)

        def due(sampled: Sequence[Sampled]) -> bool:
            *before, last = [*entropies, *(one.entropy or 0.0 for one in sampled)]
            if len(sampled) < self.every:
                return False
            if self.when == "entropy":
                return last > self.threshold
            allowed = math.ceil(self.budget * (len(before) + 1) / 1000)
            return len(before) >= WARM_UP and refreshes < allowed and last > percentile(before, self.budget)

        return Decode(kv, model="student", until=due)


def splice(student: KVCache, teacher: KVCache, start: int) -> KVCache:
    """The student's value with the teacher's entries from `start` on; what the student sampled last stays pending."""
    return (student[:start] + teacher[start : len(student)]).with_tail(student.tail)


def percentile(entropies: Sequence[float], budget: float) -> float:
    """The threshold that so many of 1,000 of these entropies exceed. For `threshold`, take it of a calibration set."""
    return float(np.quantile(entropies, 1 - budget / 1000))


def divergence(teacher: KVCache, student: KVCache) -> float:
    """KL(teacher || student) in nats of the token after both values."""
    logits = [value.tail.logits for value in (teacher, student) if value.tail and value.tail.logits is not None]
    p, q = (row.double().log_softmax(-1) for row in logits)
    return float(torch.where(p > -torch.inf, p.exp() * (p - q), 0).sum())
