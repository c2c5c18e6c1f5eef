"""H2O by head: the entries that all of the prompt attended to most stay, and as many of the last ones.

Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(arXiv:2306.14048), section 4: attention is added up over all queries. The sum favours early entries, which more queries
see; `mean` divides it by their number, as kvpress does ("observed attention"). The paper drops at every token; here the
prompt chooses once. `drop` goes on while it decodes, per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.fields import flag, number
from twostroke.kv.attention import Queries, attention_by_head
from twostroke.kv.cache import KVCache
from twostroke.methods.by_head import Choice, RankedByHead, watched
from twostroke.methods.method import Prompt


@dataclass(frozen=True)
class HeavyHitters(RankedByHead, name="heavy-hitters"):
    """Decode from the entries that the prompt's tokens attended to most, and from the last ones."""

    recent: float = number(0.5, least=0, most=1)  # the share of what stays that goes to the last entries
    mean: bool = flag(False)  # rank by the mean over the queries that see an entry, not by the sum

    def newest_of(self, count: int) -> int:
        return max(self.newest, min(int(self.recent * count), count - self.sinks))

    def ranked(self, tokens: Sequence[int], prompt: Prompt) -> Choice:
        sums = np.zeros((1, 1, len(tokens)))

        def see(kv: KVCache, queries: Queries) -> None:
            nonlocal sums
            seen = attention_by_head(kv, queries) * len(queries)
            sums = sums + np.pad(seen, ((0, 0), (0, 0), (0, len(tokens) - len(kv))))

        kv = yield from watched(tokens, see)
        return kv, sums / np.arange(len(kv), 0, -1) if self.mean else sums
