"""Finds the entries of a prompt that a stroke need not compute: those in the prefix index, or in a store."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.engine.model import Model
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import HOST, NOWHERE, POOL
from twostroke.kv.provenance import NOTHING
from twostroke.kv.spans import NO_PAGE
from twostroke.models.dropout import Dropout

MAX_PAGES_AT_ONCE = 8  # pages of the host that are copied at once, in the step


@dataclass(frozen=True, eq=False)
class MissingPages:
    """Pages that a lane waits for: `known` is to be loaded into the pool, and `tokens` to be looked for in stores.

    `tokens` is [n] int32, a prompt from position 0 in whole pages; empty if there is nothing to look for.
    """

    known: KVCache
    tokens: np.ndarray


def with_windows(
    model: Model, base: KVCache, todo: list[int], dropout: Dropout | None = None
) -> tuple[KVCache, list[int], int]:
    """A value that a stroke can extend, what it has to enter, and how many of these tokens it has to enter again.

    A value that was cut back may lack entries of windowed layers, or states. If it is canonical, all of it is computed
    again, as far as the prefix index does not know it. Raises InvalidRequest if it is not.
    """
    if base.complete:
        return base, todo, 0
    if dropout is not None or not base.next_position == len(base) == base.canonical_length(model.id):
        raise InvalidRequest(
            "this value lacks entries or states that its next token reads, and they cannot be computed again, since "
            "its entries are not those of its tokens alone: hold the value before it is cut"
        )
    return KVCache.empty(model.pool), [*base.token_array.tolist(), *todo], len(base)


def missing_in_pool(model: Model, base: KVCache) -> MissingPages | None:
    """The pages that a lane must wait for before it extends `base`; None if at most a few are outside of the pool."""
    if base.tier == POOL and base.pool is model.pool:
        absent = np.count_nonzero(model.pool.frames.absent(base.entry_table.pages))
        return MissingPages(base, NOTHING) if absent > MAX_PAGES_AT_ONCE else None
    waits = base.tier not in (POOL, HOST) or (base.tier == HOST and base.num_pages > MAX_PAGES_AT_ONCE)
    return MissingPages(base, NOTHING) if waits else None


def tokens_by_tier(kv: KVCache, start: int) -> Counter[str]:
    """Count the tokens of a value from `start` on by the tier that their pages are in now."""
    tokens: Counter[str] = Counter()
    if len(kv) > start:
        size = kv.pool.page_size
        ends = size * np.arange(1, len(kv.table) + 1)
        counts = np.maximum(0, ends - np.maximum(start, ends - size))
        pages = kv.table[:, PAGE:]
        there = ((kv.pool.frames_of(pages) != NOWHERE) | (pages == NO_PAGE)).all(1)
        tokens[POOL], tokens[HOST] = int(counts[there].sum()), int(counts[~there].sum())
    return +tokens


def match_prefix(
    model: Model, base: KVCache, todo: list[int], last: int, salt: bytes = b""
) -> tuple[KVCache, list[int], MissingPages | None]:
    """Extend `base` from the prefix index, without the last `last` tokens: their logits or queries are needed.

    With a salt, only pages of requests with the same salt are found, and stores are not asked. Returns the longer
    value, the tokens that are left, and what to wait for: pages in other tiers.
    """
    assert model.index is not None
    whole = base.next_position == len(base) == base.canonical_length(model.id)
    if base.pool is not model.pool or not whole:
        return base, todo, None
    tokens = np.concatenate([base.token_array, np.fromiter(todo, np.int32, len(todo))])
    known = model.index.match(tokens[:-last], salt)
    if len(known) > len(base):
        todo = tokens[len(known) :].tolist()
    else:
        known = base
    size = model.pool.page_size
    end = (len(tokens) - last) // size * size
    if salt or model.backing_stores is None or len(known) % size or end <= len(known) or not _in_pages(known):
        return known, todo, None
    if not model.backing_stores.worth_asking(len(known), end - len(known)):
        return known, todo, None
    return known, todo, MissingPages(known, tokens[:end])


def parting_after(model: Model, known: KVCache, todo: list[int], last: int, salt: bytes) -> int:
    """Where a prompt parts from others behind `known`, which ends earlier since no state is known there; 0: nowhere.

    So the second of two prompts with the same beginning leaves the state there, and the third one finds it (as in
    Marconi, Pan et al. 2025).
    """
    if model.index is None or not model.pool.geometry.states or known.pool is not model.pool:
        return 0
    if known.next_position != len(known) or known.canonical_length(model.id) != len(known):
        return 0
    tokens = np.concatenate([known.token_array, np.fromiter(todo[: max(0, len(todo) - last)], np.int32)])
    at = model.index.parting(tokens, salt)
    return at if at > len(known) else 0


def _in_pages(kv: KVCache) -> bool:
    """Whether a value of canonical entries consists of whole pages."""
    return len(kv.table) * kv.pool.page_size == len(kv)
