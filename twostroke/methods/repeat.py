"""Prompt repetition, with a copy sliced off before decoding.

Leviathan et al. 2025, "Prompt Repetition Improves Non-Reasoning LLMs" (arXiv:2512.14982): the prompt twice, so that
its tokens see all of it. FARS 2026, "Prefill Twice, Decode Once" (PTDO): decode from the last copy's KV alone, at
the positions it has (`sinks=0`). The sinks are this project's extension, after StreamingLLM (Xiao et al. 2023):
without any, some models repeat one word from the second token on (docs/results/prompt-repetition.md).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.fields import Rule, integer, text
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt

MAX_COPIES = 64  # copies: a limit for requests over HTTP, which could otherwise fill the memory


@dataclass(frozen=True)
class Repeat(Method, name="repeat"):
    """Prefill the prompt `times` times, decode from the last copy.

    The first token comes from the whole cache (its logits are the prefill's), every later one from what is kept.
    """

    # how many copies are prefilled, 1 being the plain request; or the texts between copies, one more copy than texts
    times: int | str | tuple[str, ...] = 2
    # how many of the very first entries are kept besides the last copy; 0 is PTDO as it was published
    sinks: int = integer(4, least=0)
    # the "last" copy; "all" (full repetition, the baseline of both papers); or, as an ablation, the "first" copy, which
    # has seen the prompt once
    keep: str = text("last", choices=("last", "all", "first"))
    # what is repeated: the "prompt", chat template and all; or the last user "turn" within one template, whose head is
    # then kept with any copy
    scope: str = text("prompt", choices=("prompt", "turn"))
    # where decoding goes on. "right": behind the last copy, so that rotations are those of a cache with everything
    # kept. "wrong" (the ablation of PTDO, section 4.4): at the number of entries kept, as if the others had never
    # existed, while the keys keep their rotation.
    offset: str = text("right", choices=("right", "wrong"))

    def __post_init__(self) -> None:
        if isinstance(self.times, str):
            object.__setattr__(self, "times", (self.times,))
        if isinstance(self.times, list | tuple):
            object.__setattr__(self, "times", tuple(self.times))
            fine = len(self.times) < MAX_COPIES and all(isinstance(one, str) for one in self.times)
            self.require("times", fine, f"a number, or fewer than {MAX_COPIES} texts")
        else:
            self.check("times", Rule(int, least=1, most=MAX_COPIES))
        super().__post_init__()

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        yield Decode(self.cut((yield Prefill(tokens)), kept))

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> KVCache | None:
        kept = self.copies(prompt)[1]
        some = kept[kept < len(kv)]
        return chosen(kv, some) if len(some) else None

    def copies(self, prompt: Prompt) -> tuple[list[int], np.ndarray]:
        """The tokens to prefill, and the indices of those to keep."""
        turn = prompt.turn if self.scope == "turn" else range(len(prompt))
        if turn is None:
            raise InvalidRequest(f"{self.name}: scope must be 'prompt' where the prompt is no chat with a user's text")
        head, copy, rest = prompt[: turn.start], prompt[turn.start : turn.stop], prompt[turn.stop :]
        texts = self.times if isinstance(self.times, tuple) else ("",) * (int(self.times) - 1)
        between = [prompt.encode(text) for text in texts]
        tokens = [*head, *copy, *(id for text in between for id in (*text, *copy)), *rest]
        start, stop = 0, len(tokens)  # of what is not kept
        if self.keep == "last":
            stop -= len(rest) + len(copy)
            start = min(max(self.sinks, len(head)), stop)
        elif self.keep == "first":
            start, stop = len(head) + len(copy), stop - len(rest)
        else:
            stop = 0
        return tokens, np.r_[:start, stop : len(tokens)]

    def cut(self, kv: KVCache, kept: np.ndarray) -> KVCache:
        """The value with the entries of these indices, or of these for each head, to decode from."""
        value = chosen(kv, kept).with_tail(kv.tail)
        return value.resumed_at(kv.next_position if self.offset == "right" else kept.shape[-1])


def chosen(kv: KVCache, indices: np.ndarray) -> KVCache:
    """The entries of these indices, rising: [n], or [layers, KV heads, n] as `KVCache.gather` takes them."""
    if indices.ndim > 1:
        return kv.gather(indices)
    cuts = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1).tolist(), len(indices)]
    kept = kv[:0]
    for start, stop in pairwise(cuts):
        kept += kv[int(indices[start]) : int(indices[stop - 1]) + 1]
    return kept
