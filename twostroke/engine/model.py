"""A model ready to run: its compiled pass, its tokenizer, and where its KV lives."""

from dataclasses import dataclass

from twostroke.backends.interface import Backend, CompiledModel
from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex
from twostroke.models.config import ModelConfig
from twostroke.models.cost import Cost


@dataclass(frozen=True, eq=False)  # a key of dicts, by identity
class Model:
    """One set of weights under one backend.

    Attributes:
        name: its checkpoint's, for messages; programs call it by its role in the engine.
        id: its identity: names everything that bits of its entries depend on. Entries are canonical for an identity.
        pool: where its KV lives; models of one geometry may share it.
        index: its prefix index, or None.
        cost: work of its steps.
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
