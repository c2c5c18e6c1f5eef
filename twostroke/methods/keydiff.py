"""KeyDiff: keys that differ most from the mean key of their head stay.

Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (arXiv:2504.15364), section 3: the cosine to the mean of the normalized keys. The
paper drops block by block while it prefills; here all of the prompt is in sight.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import ByHead, keys_by_head


@dataclass(frozen=True)
class KeyDiff(ByHead, name="keydiff"):
    """Decode from the entries whose keys are least like the others of their head."""

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        return np.stack([differences(keys) for keys in keys_by_head(kv)])


def differences(keys: np.ndarray) -> np.ndarray:
    """How far keys are from their head's mean direction, [KV heads, n], up to a factor: minus the cosine to it."""
    units = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), np.float32(1e-12))
    return -(units * units.mean(1, keepdims=True)).sum(-1)
