"""SnapKV: the prompt's last tokens say which of its entries to decode with.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469). The paper chooses for
each head; here the choice is per sequence, by the mean over layers and heads. Entries keep their positions, as in
the paper. Prefill has all of the prompt in sight, and what is decoded is never dropped.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import integer
from twostroke.kv.attention import attention_mass
from twostroke.kv.cache import KVCache
from twostroke.methods.drop import MAX_OBSERVED
from twostroke.methods.method import Prompt
from twostroke.methods.repeat import Repeat


@dataclass(frozen=True)
class Snap(Repeat, name="snap"):
    """Repetition's prefill (once, unless `times` says more), then decoding from a few of its entries.

    Attributes:
        sinks: how many of the very first entries always stay.
        window: the observation window: how many of the prompt's last tokens choose, and stay.
        budget: how many entries stay in all.
        kernel: width of a max-pooling over entries, so that neighbours of a kept entry are kept too; odd.
    """

    times: int | str | tuple[str, ...] = 1
    sinks: int = integer(0, least=0)
    keep: str = "all"
    window: int = integer(32, least=1, most=MAX_OBSERVED)
    budget: int = integer(256)
    kernel: int = integer(7, least=1, most=255)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.window
        self.require("budget", self.budget >= least, f"an integer of at least {least} (sinks + window)")
        self.require("kernel", self.kernel % 2 == 1, "odd")

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> None:
        return None

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        made: Prefilled = yield Prefill(tokens, queries=self.window)
        stays = self.staying(attention_mass(made.kv, made.queries)[kept])
        kv = self.cut(made.kv, kept[stays])
        del made  # it would keep the pages of dropped entries
        yield Decode(kv)

    def staying(self, mass: np.ndarray) -> np.ndarray:
        """Indices of the entries that stay, rising, by the attention they got. The earlier of equals stay."""
        if len(mass) <= self.budget:
            return np.arange(len(mass))
        before = np.pad(mass[: -self.window], self.kernel // 2)
        worth = np.full(len(mass), np.inf)
        worth[: -self.window] = np.lib.stride_tricks.sliding_window_view(before, self.kernel).max(-1)
        worth[: self.sinks] = np.inf
        return np.sort(np.argsort(-worth, kind="stable")[: self.budget])
