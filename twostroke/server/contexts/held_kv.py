"""A context's KV in the host, where the engine is, and the programs that make it and go on from it.

The engine's process imports this file when a context comes, and nothing of HTTP with it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.kv.pages import HOST, POOL


@dataclass(frozen=True, eq=False)
class HeldKV:
    """The whole pages of a context."""

    kv: Any  # the value, or what stands for it where the engine is in another process
    tokens: list[int]  # of its entries
    nbytes: int  # what it takes; other contexts may share its pages
    pages: tuple[int, ...]  # the ids of its pages, each of `page_bytes`
    page_bytes: int

    @classmethod
    def of(cls, kv: KVCache) -> "HeldKV":
        return cls(kv, kv.tokens, kv.nbytes, tuple(kv.entry_table.pages.tolist()), kv.pool.page_bytes)

    @property
    def generation(self) -> int:
        """The number of the process that has the KV; 0 if it is this one."""
        return getattr(self.kv, "generation", 0)

    @property
    def lost(self) -> bool:
        """Whether the engine's process has died, and the KV with it."""
        return getattr(self.kv, "lost", False)


def tiers_of(_: LLM, kvs: Sequence[KVCache | None]) -> list[str | None]:
    """Where the pages of values can be used from now: the pool, or the host if some of them have left it.

    None for a value that is lost.
    """
    return [
        None if kv is None else kv.tier if np.any(kv.pool.frames.absent(kv.entry_table.pages)) else POOL for kv in kvs
    ]


def holding(llm: LLM, ids: Sequence[int], salt: bytes) -> Program:
    """Computes a context. Its result is a `HeldKV`, or None if it has no room in the host."""
    kv = yield Prefill(ids, logits="none")
    stores, size = llm.model.backing_stores, llm.pool.page_size
    if stores is not None and not salt:  # its name says that it will be asked for, also by a server after this one
        stores.insert(kv, 0, again=True)
    try:  # here, since no other thread may hold pages of the pool that a running request needs
        return HeldKV.of(kv[: len(kv) // size * size].to(HOST))
    except OutOfPages:
        return None


def after_context(
    llm: LLM, kv: KVCache | None, prompt: Sequence[int], salt: bytes, program: Callable[[], Program]
) -> Program:
    """`program`, for which a context is in the prefix index as far as `prompt` begins with it.

    Pages that have left the pool are copied when the program starts: no thread but the one that steps may hold pages
    of the pool that a running request needs. Those of a lost context, or without room, are computed.
    """
    index = llm.model.index
    if kv is not None and index is not None:
        size = llm.pool.page_size
        known = kv[: common_prefix_length(kv.tokens, prompt) // size * size]
        with suppress(OutOfPages):
            index.insert(known.to(POOL), salt)
        del known, kv  # the program may run for long
    return (yield from program())
