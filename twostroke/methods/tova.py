"""TOVA: the prompt's last token says which entries to decode with.

Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv:2401.06104), the policy "Token Omission Via Attention": the
entries that get least attention from the last token are dropped, in each layer by the mean over its heads. The paper
drops at every token; here the last token of the prompt chooses once.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.kv.attention import Queries, attention_by_head
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import ByHead


@dataclass(frozen=True)
class Tova(ByHead, name="tova"):
    """Decode from the entries that the prompt's last token attends to most."""

    @property
    def observed(self) -> int:
        return 1

    def scores(self, kv: KVCache, queries: Queries) -> np.ndarray:
        seen = attention_by_head(kv, queries)
        return np.repeat(seen.mean(1, keepdims=True), seen.shape[1], 1)
