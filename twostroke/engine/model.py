"""A model ready to run: its compiled pass, its tokenizer and its KV pool."""

from dataclasses import dataclass

from twostroke.backends.interface import Backend, CompiledModel
from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex
from twostroke.models.config import ModelConfig
from twostroke.models.cost import Cost


@dataclass(frozen=True, eq=False)  # hashed by object identity
class Model:
    """One set of weights under one backend.

    Attributes:
        name: its checkpoint's name, for messages; programs use its role in the engine.
        id: its identity, which covers everything that its entries' bits depend on. Entries are canonical for an id.
        pool: holds its KV; models of one geometry may share a pool.
        index: its prefix index, or None.
        cost: computes the work of its steps.
    """

    name: str
    id: str
    backend: Backend
    compiled: CompiledModel
    tokenizer: Tokenizer
    pool: PagePool
    index: PrefixIndex | None
    cost: Cost

    @property
    def config(self) -> ModelConfig:
        return self.compiled.config

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position(self) -> int:
        return self.config.max_position
