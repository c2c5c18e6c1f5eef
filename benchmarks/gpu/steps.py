"""Steps of a compiled model over a memory of random entries, as the engine asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.gpu.weights import RandomWeights
from twostroke.backends.interface import Backend, CompiledModel, DrawnTokens, RaggedBatch
from twostroke.backends.page_memory import PageMemory
from twostroke.errors import InvalidRequest
from twostroke.models.config import ModelConfig
from twostroke.models.cost import CostModel, SequenceRows
from twostroke.models.kv_formats import kv_format
from twostroke.models.layer_groups import PageShape, layer_groups
from twostroke.sampling.draw import NO_NOISE, Draw
from twostroke.sampling.params import SamplingParams

GREEDY = SamplingParams(max_tokens=None, ignore_eos=True)
NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Part:
    """One sequence's rows in a step: `count` tokens after `context` entries, which lie in `frames` in order.

    Its entries have the positions from `first` on. With `makes`, the last row makes a token.
    """

    frames: np.ndarray
    context: int
    count: int
    makes: bool = True
    first: int = 0


class Stepper:
    """A model compiled from random weights, and memory for its sequences, with frames in random order."""

    def __init__(self, backend: Backend, weights: RandomWeights, page_size: int, seed: int = 0) -> None:
        config, stored = weights.config, kv_format(backend.kv_dtype)
        self.backend, self.config, self.page_size = backend, config, page_size
        self.entry_bytes = config.num_layers * config.num_kv_heads * stored.head_bytes(config.head_dim)
        matrices = weights.matrices()
        if (reason := backend.unsupported(config, matrices, page_size)) is not None:
            raise InvalidRequest(f"the {backend.name} backend cannot run this: {reason}")
        sizes = {name: backend.weight_bytes(tensor) for name, tensor in matrices.items()}
        self.cost = CostModel(config, sizes, self.entry_bytes)
        self.model: CompiledModel = backend.compile(config, weights)
        self.rng = np.random.default_rng(seed)
        self.memory: PageMemory | None = None
        self.num_pages = 0

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.entry_bytes

    def pages(self, entries: int) -> int:
        """Pages of one sequence, of all groups of layers."""
        return len(layer_groups(self.config, self.backend.kv_dtype)) * -(-entries // self.page_size)

    def reserve(self, pages: int) -> None:
        """Make the memory that all later sequences share, as an engine has one pool; the one before is dropped."""
        self.memory = None  # first, so that both need not fit
        self.memory, self.num_pages = new_memory(self.backend, self.config, pages, self.page_size), pages

    def sequences(self, count: int, entries: int) -> list[np.ndarray]:
        """[n, groups]: the frames of `count` sequences with room for `entries` each, in random order."""
        pages = self.pages(entries)
        if count * pages > self.num_pages:
            self.reserve(count * pages)
        groups = len(layer_groups(self.config, self.backend.kv_dtype))
        return list(self.rng.permutation(self.num_pages)[: count * pages].reshape(count, -1, groups))

    def batch(self, parts: Sequence[Part]) -> RaggedBatch[np.ndarray]:
        """A step with random tokens."""
        size = self.page_size
        ends = np.cumsum([part.count for part in parts])
        entries = [np.arange(part.context, part.context + part.count) for part in parts]
        firsts = np.repeat([part.first for part in parts], [part.count for part in parts])
        places = np.concatenate(entries)
        return RaggedBatch(
            token_ids=self.rng.integers(0, self.config.vocab_size, len(places)),
            positions=places + firsts,
            pages=np.concatenate([part.frames[e // size] for part, e in zip(parts, entries, strict=True)]).T,
            slots=places % size,
            row_starts=[0, *ends.tolist()],
            tables=[self._table(part) for part in parts],
            wanted=np.array([end - 1 for end, part in zip(ends, parts, strict=True) if part.makes], np.int64),
        )

    def _table(self, part: Part) -> np.ndarray:
        entries = part.context + part.count
        first = np.arange(0, entries, self.page_size)
        stop = np.minimum(entries - first, self.page_size)
        spans = np.stack([np.zeros_like(first), stop, first + part.first], 1)
        return np.concatenate([spans, part.frames[: len(first)]], 1, dtype=np.int32)

    def draws(self, count: int) -> list[Draw]:
        """How to draw a greedy token from each of `count` rows."""
        return [Draw(GREEDY, NO_NOISE, 0, NO_TOKENS, ()) for _ in range(count)]

    def launch(
        self, batch: RaggedBatch[np.ndarray], draws: Sequence[Draw], drawn: DrawnTokens | None = None
    ) -> DrawnTokens | None:
        """A pass and its sampling, as the engine calls them; the tokens are not read. `drawn`: those it follows."""
        assert self.memory is not None
        logits = self.model.forward(replace(batch, drawn=drawn, scratch={}), self.memory).logits
        return self.model.sample([logits[i : i + 1] for i in range(len(logits))], draws) if len(logits) else None

    def work(self, parts: Sequence[Part]) -> tuple[float, float]:
        """(bytes of weights and KV that a step reads, its FLOPs)."""
        work = self.cost.work([SequenceRows(part.count, part.context, int(part.makes)) for part in parts])
        return work.weight_bytes + work.kv_bytes, work.linear_flops + work.attention_flops + work.head_flops


def new_memory(backend: Backend, config: ModelConfig, pages: int, page_size: int) -> PageMemory:
    """Memory of `pages` pages that holds random entries: attention over zeros would be a special case."""
    memory = backend.memory(pages, PageShape(layer_groups(config, backend.kv_dtype), page_size, backend.kv_dtype))
    storage: Any = memory.storages[0]
    if isinstance(storage, np.ndarray):
        storage[:] = np.random.default_rng(0).standard_normal(storage.shape, np.float32).astype(storage.dtype)
    else:
        storage.normal_()
    return memory
