"""KV refresh: OverFill in which the teacher's entries of the answer replace the student's from time to time.

Emara, Kim and Abdelfattah 2025, "KV-Cache Refresh Methods for Long Generation". In their sketch the token sampled last
is in the teacher's cache and not yet in the student's when tails are spliced, so entries land one place off. Here it
is pending: the teacher enters what the student has entered, and places agree. Only what is new is entered; a refresh
from scratch would give the same entries. The gate by Monte Carlo dropout is their future work, after Gal and
Ghahramani 2016 (arXiv:1506.02142): passes that disagree show what the student does not know.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Decoded, Prefill, Program
from twostroke.errors import NotFinite
from twostroke.fields import integer, number, text
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt
from twostroke.models.dropout import Dropout
from twostroke.sampling.draw import Sampled
from twostroke.sampling.statistics import information, log_softmax

WARM_UP = 32  # tokens before a budget is spent: a percentile of fewer is unreliable
MAX_PASSES = 64


@dataclass(frozen=True)
class Refreshes:
    """The cost of an answer's refreshes."""

    at: tuple[int, ...]  # after how many tokens each refresh came
    teacher_tokens: int  # what the teacher entered for them, and for probes
    looks: tuple[float, ...] = ()  # what each probe measured: a divergence in nats, or a variance of logits


@dataclass(frozen=True)
class Refresh(Method, name="refresh"):
    """The teacher (the engine's own model) prefills and the student decodes. At times set by `when`, the teacher's
    entries of the answer replace the student's.
    """

    goes_on = True

    # "periodic", every `every` tokens (with `window` = `every` = k also called speculative refresh, in bursts of k);
    # "entropy", as soon as the student's next-token entropy exceeds `threshold` bits; "budget", as soon as it exceeds
    # the percentile of the answer so far that allows `budget` refreshes per 1,000 tokens; "probe", where KL(teacher ||
    # student) of the next token, looked at every `every` tokens, exceeds `threshold` nats; "mc-dropout", where the
    # variance of the student's logits over `passes` passes with dropout, looked at every `every` tokens, exceeds
    # `threshold` (no model of the catalog was trained with dropout, so the scale is its own: calibrate it on
    # `Refreshes.looks`)
    when: str = text("periodic", choices=("periodic", "entropy", "budget", "probe", "mc-dropout"))
    # tokens between refreshes or probes; for "entropy" and "budget", the fewest tokens between refreshes
    every: int = integer(64, least=1)
    # how many of the last entries are replaced at most; None for all since the last refresh
    window: int | None = integer(None, least=1)
    threshold: float = number(6.0, least=0, most=None)
    budget: float = number(2.5, least=0, most=1000)
    dropout: float = number(0.1, least=0, most=0.9)
    passes: int = integer(8, least=2, most=MAX_PASSES)

    @property
    def companions(self) -> tuple[str, ...]:
        return ("student",)

    def program(self, prompt: Prompt) -> Program:
        teacher = kv = yield Prefill(prompt)
        entropies: list[float] = []
        at: list[int] = []
        looks: list[float] = []
        since = len(prompt)  # the last refresh
        while True:
            run: Decoded = yield self.stretch(kv, entropies, len(at))
            entropies += [sampled.entropy or 0.0 for sampled in run.sampled]
            if run.finish_reason is not None:
                return Refreshes(tuple(at), len(teacher) - len(prompt), tuple(looks))
            kv, entered = run.kv, run.kv.tokens[len(teacher) :]
            if self.when == "probe":
                assert kv.pending is not None
                teacher, kv = yield [Prefill([*entered, kv.pending], teacher), Prefill([], kv, model="student")]
                looks.append(divergence(teacher, kv))
            elif self.when == "mc-dropout":
                drops = [Dropout(self.dropout, seed) for seed in range(self.passes)]
                looks.append(variance((yield [Prefill([], kv, model="student", dropout=drop) for drop in drops])))
            if looks and looks[-1] <= self.threshold:
                continue
            if self.when != "probe":
                teacher = yield Prefill(entered, teacher, logits="none")
            start = since if self.window is None else max(since, len(run.kv) - self.window)
            since, kv = len(run.kv), splice(run.kv, teacher, start)
            at.append(len(entropies))

    def stretch(self, kv: KVCache, entropies: list[float], refreshes: int) -> Decode:
        """Decode until a refresh or a probe is due."""
        if self.when in ("periodic", "probe", "mc-dropout"):
            return Decode(kv, model="student", max_tokens=self.every)

        def due(sampled: Sequence[Sampled]) -> bool:
            *before, last = [*entropies, *(one.entropy or 0.0 for one in sampled)]
            if len(sampled) < self.every:
                return False
            if self.when == "entropy":
                return last > self.threshold
            allowed = math.ceil(self.budget * (len(before) + 1) / 1000)
            return len(before) >= WARM_UP and refreshes < allowed and last > percentile(before, self.budget)

        return Decode(kv, model="student", until=due, stats=True)


def splice(student: KVCache, teacher: KVCache, start: int) -> KVCache:
    """The student's value with the teacher's entries from `start` on; what the student sampled last stays pending."""
    return (student[:start] + teacher[start : len(student)]).with_tail(student.tail)


def percentile(entropies: Sequence[float], budget: float) -> float:
    """The threshold that `budget` of 1,000 of these entropies exceed. Find `threshold` with it on a calibration set."""
    return float(np.quantile(entropies, 1 - budget / 1000))


def divergence(teacher: KVCache, student: KVCache) -> float:
    """KL(teacher || student) in nats of the token after both values."""
    logits = [logits for value in (teacher, student) if value.tail and (logits := value.tail.logits) is not None]
    p, q = (log_softmax(row.astype(np.float64)) for row in logits)
    return _finite(float(information(p, q)))


def variance(passes: Sequence[KVCache]) -> float:
    """The variance of each next-token logit over at least two passes (n - 1 below), averaged over the vocabulary."""
    logits = [logits for value in passes if value.tail and (logits := value.tail.logits) is not None]
    return _finite(float(np.stack(logits).astype(np.float64).var(0, ddof=1).mean()))


def _finite(measured: float) -> float:
    """Raises NotFinite for NaN and infinity."""
    if not math.isfinite(measured):
        raise NotFinite("the teacher or the student")
    return measured
