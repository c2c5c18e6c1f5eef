"""ChunkKV: whole chunks of the prompt stay, those that its last tokens attend to most.

Liu et al. 2025, "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference"
(arXiv:2502.00299), algorithm 1: in each layer, a chunk is worth the attention that it gets from the observation window
in all heads. If the budget does not come out even, the beginning of one more chunk stays. Layers do not reuse the
choice of others (section 3.3), since that would spare nothing here.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.fields import integer
from twostroke.kv.attention import Queries, attention_by_head
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import MAX_OBSERVED, ByHead


@dataclass(frozen=True)
class ChunkKV(ByHead, name="chunkkv"):
    """Decode from the chunks that the prompt's last tokens attend to most."""

    newest: int = integer(16, least=1, most=MAX_OBSERVED)  # the observation window, which always stays
    chunk: int = integer(10, least=1)  # how many entries a chunk has

    @property
    def observed(self) -> int:
        return self.newest

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        seen, starts = attention_by_head(kv, queries), np.arange(0, len(kv), self.chunk)
        sizes = np.diff(starts, append=len(kv))
        means = np.add.reduceat(seen.sum(1, keepdims=True), starts, -1) / sizes
        return np.repeat(means, sizes, -1).repeat(seen.shape[1], 1)
