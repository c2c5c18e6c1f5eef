"""CurDKV: entries whose K and V are both large beside their neighbours' stay.

Sengupta, Chaudhary and Chakraborty 2025, "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition"
(arXiv:2509.15038): the product of approximate leverage scores of K and V, which are squared norms here. The paper
projects K and V with a random matrix first. As in kvpress, each score is a share of those in its part of the prompt.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.fields import integer
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import ByHead


@dataclass(frozen=True)
class CurDKV(ByHead, name="curdkv"):
    """Decode from the entries of greatest leverage in K and V."""

    sinks: int = integer(4, least=0)
    part: int = integer(16, least=1)  # how many entries a score is compared with

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        entries = (one.astype(np.float32) for one in kv.entries())
        leverage = np.stack([(one**2).sum(-1).swapaxes(1, 2) for one in entries])  # [layers, 2, KV heads, n]
        sums = np.add.reduceat(leverage, np.arange(0, len(kv), self.part), -1)
        shares = leverage / np.maximum(np.repeat(sums, self.part, -1)[..., : len(kv)], np.float32(1e-30))
        return shares.prod(1)
