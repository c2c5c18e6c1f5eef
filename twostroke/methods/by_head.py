"""Techniques that decode with other entries of the prompt for each head: those that a score of theirs finds best.

Prefill has all of the prompt in sight, entries keep their positions, and what is decoded is never dropped. The papers
leave open which of equals stays: here the earlier one.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import integer, number
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Prompt
from twostroke.methods.repeat import Repeat


@dataclass(frozen=True)
class ChosenOnce(Repeat):
    """Repetition's prefill (once, unless `times` says more), then decoding from some of its entries.

    Attributes:
        sinks: how many of the very first entries always stay.
    """

    times: int | str | tuple[str, ...] = 1
    sinks: int = integer(0, least=0)
    keep: str = "all"

    @property
    def observed(self) -> int:
        """How many of the prompt's last queries the choice takes."""
        return 0

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> None:
        return None

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        made: Prefilled = yield Prefill(tokens, queries=self.observed)
        kv = self.cut(made.kv, self.chosen_of(made, kept))
        del made  # it would keep the pages of dropped entries
        yield Decode(kv)

    @abstractmethod
    def chosen_of(self, made: Prefilled, kept: np.ndarray) -> np.ndarray:
        """Those that stay of the indices `kept`, [n], rising: [m], or [layers, KV heads, m] for each head."""


@dataclass(frozen=True)
class ByHead(ChosenOnce):
    """Decoding from the entries of each head that are best by a score.

    Attributes:
        ratio: the share of the entries that each head keeps.
        budget: how many it keeps, instead of a ratio; sinks and the newest are among them.
        newest: how many of the last entries always stay.
    """

    ratio: float = number(0.5, above=0, most=1)
    budget: int | None = integer(None, least=1)
    newest: int = integer(1, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.newest
        fine = self.budget is None or self.budget >= least
        self.require("budget", fine, f"an integer of at least {least} (sinks + newest), or None")

    @property
    def by_head(self) -> bool:
        return True

    def chosen_of(self, made: Prefilled, kept: np.ndarray) -> np.ndarray:
        count = max(self.sinks + self.newest, self.budget or int(self.ratio * len(kept)))
        if count >= len(kept):
            return kept
        worth = self.scores(made.kv, made.queries)[..., kept]
        worth[..., : self.sinks] = worth[..., -self.newest :] = np.inf
        return kept[best(worth, count)]

    @abstractmethod
    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        """The worth of each entry, [layers, KV heads, len(kv)], float: the greatest stay."""


def best(worth: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` greatest along the last axis, rising. The earlier of equals are taken."""
    return np.sort(np.argsort(-worth, kind="stable", axis=-1)[..., :count])


def keys_by_head(kv: KVCache) -> Iterator[np.ndarray]:
    """Yield K of each layer, [KV heads, len(kv), head_dim] float32: one layer at a time is in memory."""
    for layer in kv.pool.geometry.kv_layers:
        yield kv.keys(layer).swapaxes(0, 1).astype(np.float32)
