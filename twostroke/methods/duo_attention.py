"""DuoAttention: heads that retrieve keep everything, all others the first entries and the last.

Xiao et al. 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads"
(arXiv:2410.10819), section 3. The paper trains a gate for each KV head on passkeys. Here retrieval heads are found
without training, as in Tang et al. 2024, "RazorAttention" (arXiv:2407.15891), section 3.3: random words are read twice,
and a head is worth what its query heads attend, in the second copy, to the same token of the first (echo) and to the
one behind it (induction); of query heads that share a KV head the strongest counts. The first request of a model
measures this, and the result is kept in `home()/retrieval-heads`, by the identity of its weights and backend.

The prompt is prefilled with all in sight, and what is decoded is never dropped. Streaming heads begin with empty slots
(`KVCache.gather`): attention takes no time there, but a layer has as many slots as the heads with most.
"""

import json
import random
import string
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.engine.strokes import Prefill
from twostroke.fields import integer, number
from twostroke.kv.attention import Queries, attention_weights
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.methods.by_head import Choice, ChosenOnce, watched
from twostroke.methods.method import Prompt
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.home import home

WORDS, TOKENS = 400, 128  # of the calibration; so many tokens of its words are read twice


@dataclass(frozen=True)
class DuoAttention(ChosenOnce, name="duo-attention"):
    """Decode with all entries in retrieval heads, and with the first and the last ones of the prompt in the others."""

    retrieval: float = number(0.5, least=0, most=1)  # the share of KV heads that keep everything
    sinks: int = integer(64, least=0)  # how many of the first entries the others keep
    recent: int = integer(256, least=1)  # how many of the last ones

    @property
    def by_head(self) -> bool:
        return True

    @property
    def biased(self) -> bool:
        return True

    def chosen(self, tokens: Sequence[int], kept: np.ndarray, prompt: Prompt) -> Choice:
        kv: KVCache = yield Prefill(tokens)
        if len(kept) <= self.sinks + self.recent or self.retrieval == 1:
            return kv, kept
        assert kv.tail is not None, "a prefill has logits"
        model, shape = kv.tail.model, (len(kv.pool.geometry.kv_layers), kv.pool.geometry.kv_heads or 0)
        worth = measured(model, shape)
        if worth is None:
            worth = yield from calibrated(prompt)
            keep(model, worth)
        retrieves = np.zeros(worth.size, bool)
        retrieves[np.argsort(-worth.ravel(), kind="stable")[: round(self.retrieval * worth.size)]] = True
        ends = np.r_[kept[: self.sinks], kept[-self.recent :]]
        if not retrieves.any():
            return kv, np.broadcast_to(ends, (*shape, len(ends)))
        streams = np.r_[np.full(len(kept) - len(ends), NO_ENTRY), ends]
        return kv, np.where(retrieves.reshape(shape)[..., None], kept, streams)


def calibrated(prompt: Prompt) -> Generator[Any, Any, np.ndarray]:
    """How much each KV head attends to what it could copy, [layers, KV heads]. For `yield from`."""
    drawn = random.Random(0)
    words = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 6))) for _ in range(WORDS)]
    once = prompt.encode(" ".join(words))[:TOKENS]
    sums = np.zeros(())

    def see(kv: KVCache, queries: Queries) -> None:
        nonlocal sums
        own = np.arange(len(kv) - len(queries), len(kv))
        rows = [
            weights[:, own - own[0], own - len(once)] + weights[:, own - own[0], own - len(once) + 1]
            for weights in attention_weights(kv, queries)
        ]
        sums = sums + np.stack(rows).sum(-1, dtype=float)

    first: KVCache = yield Prefill(once, logits="none")
    kv = yield from watched(once, see, first)
    return sums.reshape(len(sums), kv.pool.geometry.kv_heads or 1, -1).max(-1) / len(once)


def place(model: str) -> Path:
    """The file of a model's retrieval heads."""
    return home() / "retrieval-heads" / f"{model}-{TOKENS}.json"


@cache
def measured(model: str, shape: tuple[int, int]) -> np.ndarray | None:
    """What was measured before of a model, by its identity: [layers, KV heads]; None if nothing was."""
    try:
        worth = np.array(json.loads(place(model).read_text()), float)
    except (OSError, ValueError, TypeError):
        return None
    return worth if worth.shape == shape else None


def keep(model: str, worth: np.ndarray) -> None:
    """Keep what was measured, on disk if there is room for it."""
    with suppress(OSError):
        place(model).parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(place(model)) as file:
            file.write(json.dumps(worth.tolist()).encode())
    measured.cache_clear()
