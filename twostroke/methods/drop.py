"""Token dropping: decode with a bounded number of entries, of a plain or a repeated prompt.

StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) keeps attention sinks and a window of the last entries. Devoto et al.
2024 (arXiv:2406.11430) keep keys of low norm, which attention favours. Both here per sequence, not per head, and at
the positions entries have, where StreamingLLM counts positions within its cache. The prompt is prefilled with all of
it in sight. H2O and SnapKV rank entries by attention weights, which kernels do not hand out; they are not here.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twostroke.engine.strokes import Decode, Program, Run
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Prompt, require_choice, require_int
from twostroke.methods.repeat import Repeat


@dataclass(frozen=True)
class Drop(Repeat, name="drop"):
    """Repetition's prefill (once, unless `times` says more), then decoding in which old entries are dropped.

    Attributes:
        sinks: how many of the very first entries always stay.
        window: how many others stay.
        by: which ones: the last ones ("window"), or those of least key norm, its mean over layers and heads, besides
            the very last ("key-norm").
        every: tokens between droppings, so up to so many entries more are held.
    """

    times: int | str | tuple[str, ...] = 1
    sinks: int = 4
    keep: str = "all"
    window: int = 256
    by: str = "window"
    every: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int(self, "window", 1)
        require_int(self, "every", 1)
        require_choice(self, "by", ("window", "key-norm"))

    def program(self, prompt: Prompt) -> Program:
        kv = self.dropped((yield from self.prefilled(prompt)))
        while True:
            run: Run = yield Decode(kv, max_tokens=self.every)
            if run.finish_reason is not None:
                return
            kv = self.dropped(run.kv)
            del run  # or it would hold what was dropped

    def dropped(self, kv: KVCache) -> KVCache:
        """What stays of a value."""
        if len(kv) <= self.sinks + self.window:
            return kv
        if self.by == "window":
            return kv[: self.sinks] + kv[-self.window :]
        norms = kv.entries()[:, 0].float().norm(dim=-1).mean((0, 2)).numpy()
        norms[: self.sinks] = norms[-1] = -1
        return chosen(kv, np.sort(np.argsort(norms, kind="stable")[: self.sinks + self.window]))


def chosen(kv: KVCache, indices: np.ndarray) -> KVCache:
    """The entries of these indices, rising."""
    cuts = [0, *(np.flatnonzero(np.diff(indices) > 1) + 1).tolist(), len(indices)]
    kept = kv[:0]
    for start, stop in pairwise(cuts):
        kept += kv[int(indices[start]) : int(indices[stop - 1]) + 1]
    return kept
