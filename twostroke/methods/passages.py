"""Passages are read once, each alone, and joined in any order: reuse that is no prefix.

Passages of a text are prefilled behind the prompt's head (template and system message), where the prefix index finds
them again whatever comes before them in another prompt; the first one is then where it belongs. Passages that the
caller has named (contexts of a server) are prefilled behind nothing, as in the papers, so their KV is found by their
tokens alone. Then entries are moved to where they lie here (`KVCache.at`). They have not seen what is before them, so
some are computed again in their place:

- `mend=epic`: the first tokens of each passage, since they act as sinks of their passage. Hu et al. 2024, "EPIC:
  Efficient Position-Independent Caching for Serving Large Language Models" (arXiv:2410.15332), section 4 (LegoLink).
- `mend=cacheblend`: those whose KV deviates most (`methods/deviation.py`). Yao et al. 2024, "CacheBlend: Fast Large
  Language Model Serving for RAG with Cached Knowledge Fusion" (arXiv:2405.16444), section 4.

How far the answer is from the plain one is estimated for each request from the tokens that were computed again, and
measured on a share of the requests; above a bound the plain answer is given. That is this project's own.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from twostroke.engine.options import FIRST_LAYERS
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.fields import integer, number, text
from twostroke.kv.cache import KVCache
from twostroke.methods.deviation import distances, largest, relative_distances, stretches
from twostroke.methods.method import Method, Prompt
from twostroke.methods.prompt_passages import passages_of
from twostroke.sampling.statistics import log_softmax


@dataclass(frozen=True)
class Joining:
    """A summary of what was joined."""

    passages: int  # those that were read alone
    moved_tokens: int = 0  # entries that were moved to their place
    mended_tokens: int = 0  # those that were computed again there
    # an estimate of the error that costs nothing: how far V of the tokens that were computed again is from what it was
    # alone, as a share of its length, in the last layer; the mean. None if none were.
    deviation: float | None = None
    kl: float | None = None  # KL(plain || joined) of the first token, in nats; None if it was not measured
    plain: bool = False  # whether the plain answer was given, since `kl` was above the bound


@dataclass(frozen=True)
class Passages(Method, name="passages"):
    """Read each passage alone, join them, read the question behind all, decode.

    Passages are those that the caller has named. Without any they are parted by blank lines; in a text that has none,
    by lines. The question is in none of them.
    """

    # which tokens of each passage are computed again in their place
    mend: str = text("epic", choices=("epic", "cacheblend"))
    first: int = integer(32, least=0)  # how many first tokens "epic" computes again (the paper's k)
    share: float = number(0.15, least=0, most=1)  # the share of all tokens that "cacheblend" computes again
    # passages of fewer tokens that are not named are read in their place, with what follows
    least: int = integer(64, least=1)
    last: int = integer(1, least=1)  # how many passages at the end of the last user's text are the question
    # the share of requests whose error is measured, which takes a plain prefill: those that a hash chooses
    checked: float = number(0.0, least=0, most=1)
    # of the error, in nats; above it a checked request gets the plain answer
    bound: float | None = number(None, least=0)

    @property
    def companions(self) -> tuple[str, ...]:
        return (FIRST_LAYERS,) if self.mend == "cacheblend" else ()

    def program(self, prompt: Prompt) -> Program:
        passages = list(prompt.passages)
        if not passages:
            passages = [one for one in passages_of(prompt, self.last) if len(one) >= self.least]
            passages = passages if len(passages) > 1 else []
        if not passages:
            yield Decode((yield Prefill(prompt)))
            return Joining(0)
        made = yield from self.joined(prompt, passages)
        kv = yield Prefill(prompt[len(made.kv) :], made.kv)
        del made.kv
        kl = None
        if self.is_checked(prompt):
            exact: KVCache = yield Prefill(prompt)
            kl = divergence(exact, kv)
            if self.bound is not None and kl > self.bound:
                yield Decode(exact)
                return Joining(len(passages), kl=kl, plain=True)
            del exact
        yield Decode(kv)
        gap = round(float(np.mean(made.gaps)), 6) if made.gaps else None
        return Joining(len(passages), made.moved, made.mended, gap, kl)

    def joined(self, prompt: Prompt, passages: Sequence[range]) -> Generator[Any, Any, "Joined"]:
        """The prompt up to the end of its last passage."""
        start = passages[0].start
        head: KVCache | None = (yield Prefill(prompt[:start], logits="none")) if start else None
        if prompt.passages:
            read = [Prefill(prompt.alone(one), logits="none") for one in passages]
        else:
            read = [Prefill(prompt[one.start : one.stop], head, logits="none") for one in passages]
        values: list[KVCache] = yield read
        own = [kv[len(kv) - len(one) :] for kv, one in zip(values, passages, strict=True)]
        todo = list(zip(passages, own, strict=True))
        if prompt.passages:
            joined = Joined(prompt, values[0][:0] if head is None else head)
        else:
            joined, todo = Joined(prompt, values[0]), todo[1:]
        del values, own, head
        if self.mend == "cacheblend":
            yield from self.blended(joined, todo)
        else:
            for passage, kv in todo:
                yield from joined.add(passage, kv, [(0, min(self.first, len(passage)))] if self.first else [])
        return joined

    def blended(self, joined: "Joined", todo: Sequence[tuple[range, KVCache]]) -> Generator[Any, Any, None]:
        """Join passages, with the tokens computed again whose V deviates most in the second layer."""
        whole: KVCache = yield Prefill(joined.prompt[: todo[-1][0].stop], model=FIRST_LAYERS, logits="none")
        each = [distances(whole[one.start : one.stop], kv, 1) for one, kv in todo]
        del whole
        chosen = np.split(largest(np.concatenate(each), self.share), np.cumsum([len(one) for one in each[:-1]]))
        for (passage, kv), marks in zip(todo, chosen, strict=True):
            yield from joined.add(passage, kv, stretches(marks))

    def is_checked(self, prompt: Prompt) -> bool:
        """Whether the error is measured: always the same for a prompt, as a preempted request runs again."""
        digest = blake2b(np.array(prompt, np.int64).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.checked * 2**64


@dataclass
class Joined:
    """A prompt's value up to some place, which grows passage by passage."""

    prompt: Prompt  # all of it
    kv: KVCache  # the value so far
    # moved, mended: entries that were moved, and computed again
    moved: int = 0
    mended: int = 0
    gaps: list[float] = field(default_factory=list)  # what `Joining.deviation` is the mean of

    def add(self, passage: range, own: KVCache, again: Sequence[tuple[int, int]]) -> Generator[Any, Any, None]:
        """Join a passage, and what lies before it.

        `own` are its entries alone, and `again` says which of its tokens are computed again, as rising stretches. The
        first one, if it begins the passage, is computed before the others. These are computed side by side, so each
        sees the tokens of its passage between as they were alone.
        """
        start, lead = passage.start, again[0][1] if again and not again[0][0] else 0
        if start + lead > len(self.kv):
            self.kv = yield Prefill(self.prompt[len(self.kv) : start + lead], self.kv, logits="none")
        if lead:
            self._mend(self.kv[start:], own[:lead])
        others, before, done = again[bool(lead) :], self.kv, lead
        block = own[lead:].at(before.next_position)
        strokes = [
            Prefill(self.prompt[start + first : start + last], before + block[: first - lead], logits="none")
            for first, last in others
        ]
        values: list[KVCache] = (yield strokes) if strokes else []
        for (first, last), kv in zip(others, values, strict=True):
            self._mend(kv[start + first :], own[first:last])
            self.kv += block[done - lead : first - lead] + kv[start + first :]
            done = last
        self.kv += block[done - lead :]
        self.moved += len(own) - sum(last - first for first, last in again)

    def _mend(self, made: KVCache, own: KVCache) -> None:
        self.mended += len(own)
        self.gaps += relative_distances(made, own).tolist()


def divergence(exact: KVCache, other: KVCache) -> float:
    """KL(exact || other) of the next token, in nats, behind two values that know it."""
    assert exact.tail is not None
    assert other.tail is not None
    p, q = (log_softmax(np.asarray(tail.logits, np.float64)) for tail in (exact.tail, other.tail))
    return float((np.exp(p) * (p - q)).sum())
