"""CriticalKV: half of what stays is what gets most attention, half what also changes the layer's output most.

Feng et al. 2025, "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective"
(arXiv:2502.03805), algorithm 1: another technique's attention fills `first` of the budget. The rest goes to the entries
whose attention times the L1 norm of W_O V is greatest, which bounds what dropping them changes. Query heads that share
a KV head have their own parts of W_O, and the mean of their norms counts. With `budgets="ada"` it is the paper's
variant of Ada-KV, where attention alone says how many entries a head keeps. W_O is the checkpoint's, before a backend
encodes it anew.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.engine.strokes import Prefill, Prefilled, ReadWeights, Stroke
from twostroke.fields import integer, number, text
from twostroke.kv.attention import attention_by_head, one_thread
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, Choice, RankedByHead
from twostroke.methods.expected_attention import ExpectedAttention
from twostroke.methods.heavy_hitters import HeavyHitters
from twostroke.methods.kvzip import KVzip
from twostroke.methods.method import Prompt
from twostroke.methods.snap import pooled
from twostroke.methods.tova import Tova

ROWS = 256  # entries whose V is multiplied at once
SCORERS: dict[str, RankedByHead] = {
    "tova": Tova(),
    "heavy-hitters": HeavyHitters(),
    "expected-attention": ExpectedAttention(norms=False),
    "kvzip": KVzip(),
}


@dataclass(frozen=True)
class CriticalKV(RankedByHead, name="critical-kv"):
    """Decode from the entries of most attention, and from those of most attention times the norm of W_O V."""

    # the attention: "snap" takes that of the newest entries, as SnapKV does; else another technique's
    by: str = text("snap", choices=("snap", *SCORERS))
    newest: int = integer(32, least=1, most=MAX_OBSERVED)  # with "snap", the observation window, which always stays
    kernel: int = integer(7, least=1, most=255)  # with "snap", over how many neighbours attention is averaged; odd
    first: float = number(0.5, least=0, most=1)  # the share of what stays that goes by attention alone
    epsilon: float = number(1e-4, least=0)  # what is added to an entry's attention before it is multiplied

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("kernel", self.kernel % 2 == 1, "odd")

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        if self.by != "snap":
            return (yield from SCORERS[self.by].ranked(tokens, prompt))
        made: Prefilled = yield Prefill(tokens, queries=self.newest)
        return made.kv, pooled(attention_by_head(made.kv, made.queries), self.newest, self.kernel, "mean")

    def ranked_again(
        self, kv: KVCache, kept: np.ndarray, worth: np.ndarray, counts: np.ndarray
    ) -> Generator[Stroke, Any, np.ndarray]:
        ranks = np.argsort(np.argsort(-worth, kind="stable", axis=-1), axis=-1)
        first = (counts * self.first).astype(int)[..., None]
        weighed = np.empty_like(worth)
        for index, layer in enumerate(kv.pool.geometry.kv_layers):
            (output,) = yield ReadWeights([f"layers.{layer}.o"])
            weighed[index] = (worth[index] + self.epsilon) * output_norms(kv, layer, output)[:, kept]
        return np.where((ranks < first) | np.isinf(worth), np.inf, weighed)


def output_norms(kv: KVCache, layer: int, output: np.ndarray) -> np.ndarray:
    """The L1 norm of what V of each entry adds to a layer's output for a weight of 1: [KV heads, len(kv)] float32.

    Args:
        output: W_O, [hidden, query heads * head_dim].
    """
    values = kv.entries(layer)[1].astype(np.float32).swapaxes(0, 1)  # [KV heads, n, D]
    heads, length, dim = values.shape
    shares = output.reshape(len(output), heads, -1, dim).transpose(
        1, 2, 3, 0
    )  # [KV heads, query heads of each, D, hidden]
    norms = np.empty((heads, length), np.float32)
    for start in range(0, length, ROWS):
        with one_thread():
            made = values[:, None, start : start + ROWS] @ shares
        norms[:, start : start + ROWS] = np.abs(made, out=made).sum(-1).mean(1)
    return norms
