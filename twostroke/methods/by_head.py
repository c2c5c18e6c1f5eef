"""Techniques that decode with other entries of the prompt for each head: those that a score of theirs finds best.

Prefill has all of the prompt in sight, entries keep their positions, and what is decoded is never dropped. The papers
leave open which of equals stays: here the earlier one.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program, Stroke
from twostroke.fields import integer, number, text
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.methods.budgets import KINDS, best_by_head, budgets
from twostroke.methods.method import Prompt
from twostroke.methods.repeat import Repeat

MAX_OBSERVED = 64  # tokens whose queries are held at once: 4 MB of SmolLM2 135M, 13 MB of 1.7B
Choice = Generator[Stroke, Any, tuple[KVCache, np.ndarray]]  # strokes, then a value and an array about its entries


@dataclass(frozen=True)
class ChosenOnce(Repeat):
    """Repetition's prefill (once, unless `times` says more), then decoding from some of its entries."""

    times: int | str | tuple[str, ...] = 1
    sinks: int = integer(0, least=0)  # how many of the very first entries always stay
    keep: str = "all"

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> None:
        return None

    def program(self, prompt: Prompt) -> Program:
        kv, stays = yield from self.chosen(*self.copies(prompt), prompt)
        kv = self.cut(kv, stays)  # the prompt's own value would keep the pages of dropped entries
        yield Decode(kv)

    @abstractmethod
    def chosen(self, tokens: Sequence[int], kept: np.ndarray, prompt: Prompt) -> Choice:
        """Prefill the tokens of a prompt, and choose among the entries `kept`, [n] rising indices.

        Returns (value, indices of those that stay): rising [m], or [layers, KV heads, m] as for `KVCache.gather`.
        """


@dataclass(frozen=True)
class RankedByHead(ChosenOnce):
    """Decoding from the entries of each head that are worth most."""

    ratio: float = number(0.5, above=0, most=1)  # the share of the entries that each head keeps
    # how many it keeps, instead of a ratio; sinks and the newest are among them
    budget: int | None = integer(None, least=1)
    newest: int = integer(1, least=1)  # how many of the last entries always stay
    # whether heads keep "equal" numbers; or as many as are among the best of their layer ("ada"); or lower layers keep
    # more ("pyramid"). See `budgets`.
    budgets: str = text("equal", choices=KINDS)
    floor: float = number(0.2, least=0, most=1)  # with "ada", the share of the mean that each head keeps in any case

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.newest
        fine = self.budget is None or self.budget >= least
        self.require("budget", fine, f"an integer of at least {least} (sinks + newest), or None")

    @property
    def by_head(self) -> bool:
        return True

    @property
    def biased(self) -> bool:
        return self.budgets != "equal"

    def count_of(self, length: int) -> int:
        """How many of so many entries each head keeps, on average."""
        return max(self.sinks + self.newest, self.budget or int(self.ratio * length))

    def chosen(self, tokens: Sequence[int], kept: np.ndarray, prompt: Prompt) -> Choice:
        count = self.count_of(len(kept))
        if count >= len(kept):
            return (yield Prefill(tokens)), kept
        kv, worth = yield from self.ranked(tokens, prompt)
        worth = self.above_all(worth[..., kept], count)
        held = self.sinks + self.newest_of(count)
        counts = budgets(self.budgets, worth, count, held, self.floor)
        worth = yield from self.ranked_again(kv, kept, worth, counts)
        stays = best_by_head(worth, counts)
        return kv, np.where(stays == NO_ENTRY, NO_ENTRY, kept[stays])

    def ranked_again(
        self, kv: KVCache, kept: np.ndarray, worth: np.ndarray, counts: np.ndarray
    ) -> Generator[Stroke, Any, np.ndarray]:
        """The worth by which each head takes as many entries as it keeps.

        Args:
            kept: [n] indices of the entries to choose from.
            worth: [layers, KV heads, n], from which budgets follow; what stays in any case is infinite.
            counts: [layers, KV heads], how many each head keeps.
        """
        yield from ()
        return worth

    def above_all(self, worth: np.ndarray, count: int) -> np.ndarray:
        """The same array, in which sinks and the newest entries are worth more than all others."""
        worth[..., : self.sinks] = worth[..., -self.newest_of(count) :] = np.inf
        return worth

    def newest_of(self, count: int) -> int:
        """How many of the last entries are among the `count` that stay, whatever they are worth."""
        return self.newest

    @abstractmethod
    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        """Prefill the tokens of a prompt.

        Returns (value, the worth of each entry, [layers, KV heads, n] float: the greatest stay).
        """


@dataclass(frozen=True)
class ByHead(RankedByHead):
    """A worth that follows from the prompt's value, and the queries of its last tokens."""

    @property
    def observed(self) -> int:
        """How many of the prompt's last queries `scores` takes."""
        return 0

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        made: Prefilled = yield Prefill(tokens, queries=self.observed)
        return made.kv, self.scores(made.kv, made.queries)

    @abstractmethod
    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        """The worth of each entry, [layers, KV heads, len(kv)], float: the greatest stay."""


def watched(
    tokens: Sequence[int], see: Callable[[KVCache, Queries], object], after: KVCache | None = None
) -> Generator[Prefill, Prefilled, KVCache]:
    """Prefill all of the tokens, and see the queries of each: a few are in memory at once. For `yield from`.

    `see` gets the value so far and the queries of its last entries. It gets the same parts under every schedule, so
    what it adds up has the same bits.
    """
    kv = after
    for start in range(0, len(tokens), MAX_OBSERVED):
        part = tokens[start : start + MAX_OBSERVED]
        last = start + len(part) == len(tokens)
        made = yield Prefill(part, kv, logits="last" if last else "none", queries=len(part))
        kv = made.kv
        see(kv, made.queries)
    assert kv is not None, "a prompt has tokens"
    return kv


def best(worth: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` greatest along the last axis, rising. The earlier of equals are taken."""
    return np.sort(np.argsort(-worth, kind="stable", axis=-1)[..., :count])


def keys_by_head(kv: KVCache) -> Iterator[np.ndarray]:
    """Yield K of each layer, [KV heads, len(kv), head_dim] float32: one layer at a time is in memory."""
    for layer in kv.pool.geometry.kv_layers:
        yield kv.keys(layer).swapaxes(0, 1).astype(np.float32)
