"""SnapKV: the prompt's last tokens say which of its entries to decode with.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469), section 4. The paper
chooses for each head (`per="head"`, where query heads that share a KV head choose by their mean); by default the choice
is per sequence, by the mean over layers and heads. Entries keep their positions, as in the paper. Prefill has all of
the prompt in sight, and what is decoded is never dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Prefill, Prefilled
from twostroke.fields import integer, text
from twostroke.kv.attention import attention_by_head, attention_mass
from twostroke.methods.by_head import MAX_OBSERVED, Choice, ChosenOnce, best
from twostroke.methods.method import Prompt


@dataclass(frozen=True)
class Snap(ChosenOnce, name="snap"):
    """Decode from the entries that the prompt's last tokens attend to most."""

    # the observation window: how many of the prompt's last tokens choose, and stay
    window: int = integer(32, least=1, most=MAX_OBSERVED)
    budget: int = integer(256)  # how many entries stay in all
    # width of a pooling over entries, so that neighbours of a kept entry are kept too; odd
    kernel: int = integer(7, least=1, most=255)
    pool: str = text("max", choices=("max", "mean"))  # the "max" or the "mean" of a neighbourhood
    # one choice for the "sequence", or one for each "head" of each layer
    per: str = text("sequence", choices=("sequence", "head"))

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.window
        self.require("budget", self.budget >= least, f"an integer of at least {least} (sinks + window)")
        self.require("kernel", self.kernel % 2 == 1, "odd")

    @property
    def by_head(self) -> bool:
        return self.per == "head"

    def chosen(self, tokens: Sequence[int], kept: np.ndarray, prompt: Prompt) -> Choice:
        made: Prefilled = yield Prefill(tokens, queries=self.window)
        seen = attention_by_head if self.by_head else attention_mass
        return made.kv, kept[self.staying(seen(made.kv, made.queries)[..., kept])]

    def staying(self, mass: np.ndarray) -> np.ndarray:
        """Indices of the entries that stay, rising, by the attention they got, [n] or [layers, KV heads, n].

        The earlier of equals stay.
        """
        if mass.shape[-1] <= self.budget:
            return np.arange(mass.shape[-1])
        worth = pooled(mass, self.window, self.kernel, self.pool)
        worth[..., : self.sinks] = np.inf
        return best(worth, self.budget)


def pooled(mass: np.ndarray, window: int, kernel: int, pool: str) -> np.ndarray:
    """Attention, [..., n], spread to neighbours before the window of the last entries, which are worth most."""
    worth, sides = np.full(mass.shape, np.inf), kernel // 2
    before = np.pad(mass[..., :-window], [(0, 0)] * (mass.ndim - 1) + [(sides, sides)])
    near = np.lib.stride_tricks.sliding_window_view(before, kernel, -1)
    worth[..., :-window] = near.max(-1) if pool == "max" else near.mean(-1)
    return worth
