"""D2O: entries that are dropped are merged into those that stay, where their keys are alike.

Wan et al. 2024, "D2O: Dynamic Discriminative Operations for Efficient Long-Context Inference of Large Language Models"
(arXiv:2406.13035), section 3.2. The entries that got most attention stay, and the last ones. A dropped entry is merged
into the one whose key has the greatest cosine with its own, if that is at least the mean of such cosines; else it is
lost. Merged keys and values are means, in which a dropped entry has the weight exp(cosine), and the one that stays e.

The paper's entries count once, whatever was merged into them, so attention to a crowd becomes attention to one. Here an
entry made of n counts as n (a bias of log n: "proportional attention" of Bolya et al. 2023, arXiv:2210.09461, section
3.2), unless `mass` is false. The paper also gives layers other budgets, and merges while it decodes; here the prompt
chooses once.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Program
from twostroke.fields import flag
from twostroke.methods.by_head import best
from twostroke.methods.heavy_hitters import HeavyHitters
from twostroke.methods.made_entries import Head, made_entries
from twostroke.methods.method import Prompt

ROUNDING = 1e-9  # of a cosine: equal keys are alike


@dataclass(frozen=True)
class D2O(HeavyHitters, name="d2o"):
    """Decode from the entries that the prompt attended to most, with what is like them merged into them."""

    mass: bool = flag(True)  # whether an entry counts as often as entries are merged in it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("budgets", self.budgets == "equal", "'equal': merged entries are as many in each head")

    @property
    def biased(self) -> bool:
        return self.mass

    @property
    def makes_entries(self) -> bool:
        return True

    def program(self, prompt: Prompt) -> Program:
        tokens, kept = self.copies(prompt)
        kv, worth = yield from self.ranked(tokens, prompt)
        count = self.count_of(len(kept))
        if count >= len(kept):
            kv = self.cut(kv, kept)
        else:
            worth = self.above_all(worth[..., kept], count)
            following = kv.next_position if self.offset == "right" else count
            kv = made_entries(kv, kept, best(worth, count), self._merged).resumed_at(following)
        yield Decode(kv)

    def _merged(self, layer: int, head: int, keys: np.ndarray, values: np.ndarray, some: np.ndarray) -> Head:
        keys, values, counts = merged(keys, values, some)
        return keys, values, np.log(counts) if self.mass else np.zeros(len(some))


def merged(keys: np.ndarray, values: np.ndarray, some: np.ndarray) -> Head:
    """Keys and values [m, head_dim] of the entries `some`, and of how many each is made, [m]."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)
    dropped = np.setdiff1d(np.arange(len(keys)), some)
    cosines = units[dropped] @ units[some].T
    nearest, cosine = cosines.argmax(-1), cosines.max(-1)
    alike = cosine >= cosine.mean() - ROUNDING
    dropped, into, weights = dropped[alike], nearest[alike], np.exp(cosine[alike])
    made, total = [np.e * keys[some], np.e * values[some]], np.full(len(some), np.e)
    for sums, numbers in zip(made, (keys, values), strict=True):
        np.add.at(sums, into, weights[:, None] * numbers[dropped])
    np.add.at(total, into, weights)
    k, v = (sums / total[:, None] for sums in made)
    return k, v, 1.0 + np.bincount(into, minlength=len(some))
