"""Where a worker that takes over gets a prompt's KV from: what is predicted to be there soonest.

A peer (a prefill worker) offers the value: it needs the time until it has computed what it does not know yet, by its
own prediction, and then the time of the wire. Or it is made here: what the pool and the tiers have, and the rest
computed. Both are predicted by what was measured: bytes over the link's bandwidth, and the cost model's seconds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.engine.model import Model
from twostroke.engine.prefix_match import tokens_by_tier
from twostroke.kv.cache import KVCache
from twostroke.kv.stored_runs import num_blocks, pages_worth_loading
from twostroke.kv.tiers.speed import TransferSpeed

PEER, COMPUTED = "peer", "computed"
Computing = Callable[[int, int], float]  # predicted seconds to compute tokens: (entries before, tokens)


@dataclass(frozen=True)
class KVSource:
    """One way to a prompt's KV: predicted seconds, and how many tokens come from where.

    `tokens` is by "pool", "host", "disk", "remote", "computed", or "peer".
    """

    seconds: float
    tokens: Counter[str]

    @property
    def source(self) -> str:
        """Where most of the tokens come from."""
        return self.tokens.most_common(1)[0][0]

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {source}" for source, count in self.tokens.items())
        return f"{self.seconds:.3f} s ({parts})"


def estimate_peer(model: Model, tokens: Sequence[int], ready_s: float, wire: TransferSpeed) -> KVSource:
    """Over the wire, from a peer that predicts to have it in `ready_s` seconds. Its chunks cross while it computes."""
    size = model.pool.geometry.value_bytes(len(tokens))
    return KVSource(max(ready_s, wire.seconds(size)), Counter({PEER: len(tokens)}))


def estimate_local(model: Model, tokens: Sequence[int], computing: Computing, stores: bool = True) -> KVSource:
    """As the engine will do it: pages of the prefix index, pages of stores that are worth loading, the rest computed.

    Asks the stores, which may take a while; not without `stores`. The last token is computed in any case.
    """
    array, size = np.array(tokens, np.int32), model.pool.page_size
    known = KVCache.empty(model.pool)
    if model.index is not None:
        known = model.index.extend_match(known, array[:-1])
    found, at, loading = tokens_by_tier(known, 0), len(known), 0.0
    if stores and model.backing_stores is not None and model.backing_stores.worth_asking(at, len(tokens) - at):
        links = model.backing_stores.tiers.speeds
        names = model.backing_stores.names(array[:-1])[at // size :]
        _, segments = model.backing_stores.find(names, lambda tier: None)
        blocks, block_bytes = num_blocks(segments), model.pool.block_bytes
        count = pages_worth_loading(
            segments, lambda pages: computing(at, min(pages, blocks) * size), links, block_bytes
        )
        for segment in segments:
            pages = max(0, min(segment.stop, count) - segment.start)
            found[segment.store.tier] += 0 if segment.snapshot else pages * size
            loading += links[segment.store.tier].seconds(pages * block_bytes)
        at += min(count, blocks) * size
    found[COMPUTED] = len(tokens) - at
    return KVSource(loading + computing(at, len(tokens) - at), +found)
