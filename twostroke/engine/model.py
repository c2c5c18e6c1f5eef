"""A model ready to run: its compiled pass, its tokenizer and its KV pool."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twostroke.backends.interface import Backend, CompiledModel, Weights
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.kv.backing_stores import BackingStores
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import ModelConfig
from twostroke.models.cost import CostModel


@dataclass(frozen=True, eq=False)  # hashed by object identity
class Model:
    """One set of weights under one backend."""

    name: str  # its checkpoint's name, for messages; programs use its role in the engine
    id: str  # its identity, which covers everything that its entries' bits depend on. Entries are canonical for an id.
    backend: Backend
    compiled: CompiledModel
    tokenizer: Tokenizer
    pool: PagePool  # holds its KV; models of one geometry may share a pool
    index: PrefixIndex | None  # its prefix index, or None
    cost: CostModel  # computes the work of its steps
    backing_stores: BackingStores | None = None  # the stores below the index, or None
    weights: Weights | None = None  # the checkpoint's tensors as they are stored, for techniques that read them

    @cached_property  # asked for at every step
    def config(self) -> ModelConfig:
        return self.compiled.config

    def values(self, name: str) -> np.ndarray:
        """A tensor of the checkpoint, float32. Raises InvalidRequest where weights are not at hand."""
        if self.weights is None:
            raise InvalidRequest(f"the weights of model {self.name} cannot be read here: choose another technique")
        raw = self.weights(name)
        try:
            return raw.dequantize().reshape(raw.shape)
        finally:
            raw.release()

    @property
    def max_position(self) -> int:
        return self.config.max_position

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer: what both the context and the pool can hold."""
        return min(self.max_position, self.pool.max_entries)

    def require_entries(self, tokens: int) -> None:
        """Raise ContextLengthExceeded for a text that is only read, and has no room."""
        if tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"the text has {tokens} tokens; there is room for {self.max_model_len}: shorten it"
            )

    def require_room(self, tokens: int) -> None:
        """Raise ContextLengthExceeded for a prompt of `tokens` tokens that leaves no room for a token of an answer."""
        if tokens >= self.max_model_len:
            limit = (
                f"the context of model {self.name}"
                if self.max_model_len == self.max_position
                else "the KV pool (give it more memory with kv_bytes)"
            )
            raise ContextLengthExceeded(
                f"the prompt has {tokens} tokens; at most {self.max_model_len - 1} leave room for an answer in "
                f"{limit}: shorten it"
            )
