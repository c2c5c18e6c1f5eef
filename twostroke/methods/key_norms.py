"""Keys of low norm stay, since attention favours them.

Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv:2406.11430). The
paper leaves the first two layers whole; here all layers keep as many entries. `drop` has the same score per sequence,
at every few tokens.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import ByHead, keys_by_head


@dataclass(frozen=True)
class KeyNorms(ByHead, name="key-norms"):
    """Decode from the entries whose keys have the least L2 norm in their head."""

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        return -np.stack([np.linalg.norm(keys, axis=-1) for keys in keys_by_head(kv)])
