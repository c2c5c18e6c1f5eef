"""Passages are read once, each alone, and joined in any order: reuse that is no prefix.

Each passage is prefilled behind the prompt's head (template and system message), where the prefix index finds it again
whatever comes before it in another prompt. Then its entries are moved to where it lies here (`KVCache.at`). They have
not seen the passages before theirs. Hu et al. 2024, "EPIC: Efficient Position-Independent Caching for Serving
Large Language Models" (arXiv:2410.15332), section 4: the first tokens of each passage are computed again in their place
(LegoLink), since they act as sinks of their passage. In the paper passages are read behind nothing.

How far the answer is from the plain one is measured on a share of the requests, and above a bound the plain one is
given. That is this project's own.
"""

from collections.abc import Generator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.fields import integer, number
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt
from twostroke.methods.prompt_passages import passages_of
from twostroke.sampling.statistics import log_softmax


@dataclass(frozen=True)
class Joining:
    """A summary of what was joined.

    Attributes:
        passages: those that were read alone.
        moved_tokens: entries that were moved to their place.
        mended_tokens: those that were computed again there.
        kl: KL(plain || joined) of the first token, in nats; None if it was not measured.
        plain: whether the plain answer was given, since `kl` was above the bound.
    """

    passages: int
    moved_tokens: int = 0
    mended_tokens: int = 0
    kl: float | None = None
    plain: bool = False


@dataclass(frozen=True)
class Passages(Method, name="passages"):
    """Read each passage alone, join them, read the question behind all, decode.

    Passages are parted by blank lines; in a text that has none, by lines. The question is in none of them.

    Attributes:
        mend: how many first tokens of each passage are computed again in their place (the paper's k).
        least: passages of fewer tokens are read in their place, with what follows.
        last: how many passages at the end of the last user's text are the question.
        checked: the share of requests whose error is measured, which takes a plain prefill: those that a hash chooses.
        bound: of the error, in nats; above it a checked request gets the plain answer.
    """

    mend: int = integer(32, least=0)
    least: int = integer(64, least=1)
    last: int = integer(1, least=1)
    checked: float = number(0.0, least=0, most=1)
    bound: float | None = number(None, least=0)

    def program(self, prompt: Prompt) -> Program:
        passages = [one for one in passages_of(prompt, self.last) if len(one) >= self.least]
        if len(passages) < 2:
            yield Decode((yield Prefill(prompt)))
            return Joining(0)
        kv, moved = yield from self.joined(prompt, passages)
        kv = yield Prefill(prompt[len(kv) :], kv)
        kl = None
        if self.is_checked(prompt):
            exact: KVCache = yield Prefill(prompt)
            kl = divergence(exact, kv)
            if self.bound is not None and kl > self.bound:
                yield Decode(exact)
                return Joining(len(passages), kl=kl, plain=True)
            del exact
        yield Decode(kv)
        mended = sum(min(self.mend, len(one)) for one in passages[1:])
        return Joining(len(passages), moved, mended, kl)

    def joined(self, prompt: Prompt, passages: list[range]) -> Generator[Any, Any, tuple[KVCache, int]]:
        """The prompt up to the end of its last passage, and how many of its entries were moved."""
        start, moved = passages[0].start, 0
        head: KVCache | None = (yield Prefill(prompt[:start], logits="none")) if start else None
        alone: list[KVCache] = yield [Prefill(prompt[p.start : p.stop], head, logits="none") for p in passages]
        kv = alone[0]
        for passage, own in zip(passages[1:], alone[1:], strict=True):
            cut = passage.start + min(self.mend, len(passage))
            if cut > len(kv):
                kv = yield Prefill(prompt[len(kv) : cut], kv, logits="none")
            rest = own[start + cut - passage.start :]
            moved += len(rest)
            kv += rest.at(kv.next_position)
        return kv, moved

    def is_checked(self, prompt: Prompt) -> bool:
        """Whether the error is measured: always the same for a prompt, as a preempted request runs again."""
        digest = blake2b(np.array(prompt, np.int64).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.checked * 2**64


def divergence(exact: KVCache, other: KVCache) -> float:
    """KL(exact || other) of the next token, in nats, behind two values that know it."""
    assert exact.tail is not None
    assert other.tail is not None
    p, q = (log_softmax(np.asarray(tail.logits, np.float64)) for tail in (exact.tail, other.tail))
    return float((np.exp(p) * (p - q)).sum())
