"""A model ready to run: its decoder, its tokenizer, and where its KV lives."""

from dataclasses import dataclass

from twostroke.backends.reference.decoder import Decoder
from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex
from twostroke.models.cost import Cost


@dataclass(frozen=True, eq=False)  # a key of dicts, by identity
class Model:
    """One set of weights under one backend.

    Attributes:
        name: its checkpoint's, for messages; programs call it by its role in the engine.
        id: names weights and numerics; entries are canonical for an id.
        pool: where its KV lives; models of one geometry may share it.
        index: its prefix index, or None.
        cost: work of its steps.
    """

    name: str
    id: str
    decoder: Decoder
    tokenizer: Tokenizer
    pool: PagePool
    index: PrefixIndex | None
    cost: Cost

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def max_position(self) -> int:
        return self.decoder.config.max_position
