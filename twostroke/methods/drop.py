"""Token dropping: decode with a bounded number of entries, of a plain or a repeated prompt.

StreamingLLM (Xiao et al. 2023, arXiv:2309.17453) keeps attention sinks and a window of the last entries. Devoto et al.
2024 (arXiv:2406.11430) keep keys of low norm, which attention favours. H2O (Zhang et al. 2023, arXiv:2306.14048) keeps
what was attended to most so far ("heavy hitters") and as many of the last entries. All of them here per sequence, not
per head, and at the positions entries have, where StreamingLLM counts positions within its cache. The prompt is
prefilled with all of it in sight. H2O counts the attention of the whole prompt and drops at every token; here it is
that of the prompt's last tokens, and of every token decoded. A page is freed when none of its entries stays.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled, Program
from twostroke.fields import integer, text
from twostroke.kv.attention import attention_mass
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, best
from twostroke.methods.method import Prompt
from twostroke.methods.repeat import Repeat, chosen


@dataclass(frozen=True)
class Drop(Repeat, name="drop"):
    """Repetition's prefill (once, unless `times` says more), then decoding in which old entries are dropped."""

    goes_on = True

    times: int | str | tuple[str, ...] = 1
    sinks: int = 4  # how many of the very first entries always stay
    keep: str = "all"
    window: int = integer(256, least=1)  # how many others stay
    # which ones: the last ones ("window"); those of least key norm, its mean over heads and over the layers that still
    # attend to them, besides the very last ("key-norm"); or half of them the last ones, and half those that got most
    # attention so far, its mean over layers and heads ("attention")
    by: str = text("window", choices=("window", "key-norm", "attention"))
    every: int = integer(16, least=1)  # tokens between droppings; up to this many entries more are held
    # by "attention", how many of the prompt's last tokens are counted besides those decoded
    observed: int = integer(32, least=1, most=MAX_OBSERVED)

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = self.by != "attention" or self.every <= MAX_OBSERVED
        self.require("every", fine, f"an integer from 1 to {MAX_OBSERVED} where attention chooses")

    def program(self, prompt: Prompt) -> Program:
        counting = self.by == "attention"
        tokens, kept = self.copies(prompt)
        made: Prefilled = yield Prefill(tokens, queries=self.observed if counting else 0)
        kv, mass = self.cut(made.kv, kept), attention_mass(made.kv, made.queries)[kept]
        del made  # it would keep the pages of dropped entries
        while True:
            stays = self.staying(kv, mass)
            kv, mass = chosen(kv, stays), mass[stays]
            run: Decoded = yield Decode(kv, max_tokens=self.every, queries=self.every if counting else 0)
            if run.finish_reason is not None:
                return
            mass = np.pad(mass, (0, len(run.kv) - len(kv))) + attention_mass(run.kv, run.queries)
            kv = run.kv
            del run

    def staying(self, kv: KVCache, mass: np.ndarray) -> np.ndarray:
        """Indices of the entries that stay, rising; `mass` is the attention they got. The earlier of equals stay."""
        room, last = self.sinks + self.window, 1
        if len(kv) <= room:
            return np.arange(len(kv))
        if self.by == "window":
            worth = np.arange(len(kv), dtype=float)
        elif self.by == "key-norm":
            worth = -key_norms(kv)
        else:
            worth, last = mass.copy(), -(-self.window // 2)
        worth[: self.sinks] = worth[-last:] = np.inf
        return best(worth, room)


def key_norms(kv: KVCache) -> np.ndarray:
    """The norm of each entry's keys, [n]: the mean over heads, and over the layers that the next token sees it in."""
    sums, counts, positions = np.zeros(len(kv)), np.zeros(len(kv)), np.array(kv.positions)
    for _, group in kv.pool.geometry.kv_groups:
        seen = slice(None) if group.window is None else positions > kv.next_position - group.window
        for layer in group.layers:
            sums[seen] += np.linalg.norm(kv.keys(layer)[seen].astype(np.float32), axis=-1).mean(-1)
            counts[seen] += 1
    return sums / np.maximum(counts, 1)
