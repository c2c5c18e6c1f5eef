"""A lane, a stroke in flight: the tokens it has still to enter, and the rows that its result returns."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.interface import LazyLogits
from twostroke.engine.model import Model
from twostroke.engine.prefix_match import MissingPages, missing_in_pool
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled
from twostroke.errors import InvalidRequest, KVError
from twostroke.kv.attention import NO_QUERIES, Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.slot_mapping import SlotMapping
from twostroke.kv.writer import KVWriter
from twostroke.models.config import ModelConfig
from twostroke.models.dropout import Dropout

StrokeKind = TypeVar("StrokeKind", Prefill, Decode)


class Lane(ABC, Generic[StrokeKind]):
    """A stroke in flight: in each step it may enter some of its known tokens, until none is left.

    Attributes:
        slot: index of this stroke among its program's side-by-side strokes.
        todo: known tokens that are not entered yet.
        missing: what it waits for, from other tiers; None while it can go on.
        on_close: called when the lane is closed while it waits; set while a load brings what is missing.
        num_computed: number of its entries that are computed, and whose tokens are known.
        queries, states: collect the query vectors and hidden states that the stroke returns.
        result: the stroke's result once it is done; kv: the KV cache in it.
        parting: where its prompt parts from others, if the state there is to be known (`PrefixIndex.parting`).
    """

    def __init__(
        self,
        slot: int,
        model: Model,
        stroke: StrokeKind,
        base: KVCache,
        todo: list[int],
        dropout: Dropout | None = None,
        missing: MissingPages | None = None,
        again: int = 0,
        parting: int = 0,
    ) -> None:
        """`again`: number of leading entries that belong to the value the stroke extends, and are computed again."""
        model.pool.geometry.require(base.pool.geometry, f"model {model.name} cannot continue this value")
        # The value may come from a file, or from a model with a larger vocabulary.
        least, most = min(todo, default=0), max(max(todo, default=0), int(base.token_array.max(initial=0)))
        if least < 0 or most >= model.config.vocab_size:
            unknown = least if least < 0 else most
            raise InvalidRequest(f"token ids must be from 0 to {model.config.vocab_size - 1}, not {unknown}")
        self.slot, self.model, self.stroke = slot, model, stroke
        self.dropout = dropout  # the dropout that its rows are computed with, or None
        self.todo, self._again, self.parting = todo, again, parting
        model.pool.recomputed_tokens += max(0, again - len(base))
        self.missing = missing or missing_in_pool(model, base)
        self.on_close: Callable[[], None] | None = None
        self._base_length = len(base)
        self._write_after(base if self.missing is None else KVCache.empty(model.pool))
        self.queries = LastQueries(stroke.queries or 0, model.config)
        self.states = LastRows(stroke.states or 0)
        self.started = False
        self.num_indexed = 0  # number of pages that its prefix index has been given of it
        self.cached: Counter[str] = Counter()  # tokens that it found and need not enter, by tier
        self.kv: KVCache | None = None
        self.result: KVCache | Prefilled | Decoded | None = None

    def _write_after(self, base: KVCache) -> None:
        # Entries under dropout are canonical only for the same dropout, as for another model.
        name = self.model.id if self.dropout is None else f"{self.model.id}, {self.dropout}"
        lookback = 1 + (self.stroke.queries or 0)
        if base.entry_table.bias is not None and not self.model.backend.takes_bias:
            raise KVError(
                f"the {self.model.backend.label} backend adds no bias to scores: use the native backend, or the "
                "reference in one rank"
            )
        self.writer = KVWriter(base.copy_to(self.model.pool), name, lookback, self.num_guesses, self.parting)
        self.num_computed = len(self.writer)

    def resume_from(self, kv: KVCache, sources: Sequence[str] = ()) -> None:
        """Continue from `kv`, which is in the pool: what the lane waited for, or as much of it as came.

        `sources` are the tiers of its last pages. Raises OutOfPages if the pool has no room; the lane still waits then.
        """
        more = len(kv) - self._base_length
        self._write_after(kv)
        self.missing = self.on_close = None
        self._base_length = len(kv)
        del self.todo[:more]
        for tier in sources:
            self.cached[tier] += self.model.pool.page_size
        self._begin()

    def _begin(self) -> None:
        """Called when the value that the lane extends is in the pool."""

    @property
    def num_guesses(self) -> int:
        """Number of entries that it may enter and remove again."""
        return 0

    @property
    def decoding(self) -> bool:
        """Whether exactly one token that it knows is left to enter, the state of a decoding lane at every step."""
        return False

    @property
    def num_next(self) -> int:
        """Number of tokens that it enters in the next step, where `decoding`."""
        return 1

    @property
    def whole(self) -> bool:
        """Whether its tokens must enter in one step: they attend to one another in both directions."""
        return self.model.config.both_ways

    @property
    def has_placeholder(self) -> bool:
        """Whether the next token is a placeholder: it is being drawn, and may prove to be the last."""
        return bool(self.todo) and self.todo[0] < 0

    def own_rows(self, count: int) -> int:
        """Number of the next `count` tokens that are the stroke's own, and not computed again."""
        return min(count, max(0, len(self.writer) + count - self._again)) if self._again else count

    def kept_rows(self, count: int) -> tuple[int, int]:
        """Numbers of last rows of the next `count` tokens whose queries and whose hidden states are kept."""
        if not (self.queries.room or self.states.room):  # as at nearly every step
            return 0, 0
        own, left = self.own_rows(count), len(self.todo)
        return min(own, self.queries.wanted(count, left)), min(own, self.states.wanted(count, left))

    @abstractmethod
    def logit_rows(self, count: int) -> int:
        """Number of last rows that need logits when the next `count` tokens are entered."""

    def hidden_inputs(self, count: int) -> HiddenInputs | None:
        """The hidden states that the last `count` tokens entered go with, if the model takes any."""
        return None

    def enter(self, count: int) -> tuple[list[int], SlotMapping]:
        """Take the next `count` tokens and allocate their slots. On OutOfPages nothing has changed."""
        tokens = self.todo[:count]
        slot_mapping = self.writer.append(tokens)
        del self.todo[:count]
        self.started = True
        return tokens, slot_mapping

    @abstractmethod
    def computed(self, rows: LazyLogits) -> None:
        """Called when the last entered tokens are computed; `rows` are the logits that `logit_rows` asked for."""

    def close(self) -> None:
        """Release all pages. A plan or a traceback may still reference the lane; it must not keep KV alive."""
        if self.on_close is not None:
            self.on_close()
        self.writer.close()
        del self.writer, self.stroke, self.queries, self.states
        self.missing = self.on_close = None
        self.kv = self.result = None
        self._forget()

    def _forget(self) -> None:
        """Drop logits, which may be large."""


def reopen_last(base: KVCache) -> tuple[KVCache, list[int]]:
    """Drop the last entry and enter its token again, since its logits are not available."""
    if not len(base):
        raise InvalidRequest("the prompt is empty: give at least one token")
    return base.without_last(), [int(base.token_array[-1])]


class LastRows:
    """Keeps only the requested number of rows, for any number of steps.

    `room`: the most rows that it keeps.
    """

    def __init__(self, most: int, guesses: int = 0) -> None:
        """`most` rows are requested; up to `guesses` of the last may be removed after they were added."""
        self._most = most
        self.room = most + guesses if most else 0
        self._parts: list[np.ndarray] = []  # [layers, rows, ...] each

    def wanted(self, count: int, todo: int) -> int:
        """Number of the next `count` tokens whose rows are kept; `todo` tokens, these included, are left."""
        return max(0, count - max(0, todo - self.room))

    def add(self, rows: np.ndarray) -> None:
        """Add rows [layers, rows, ...] of the last entered tokens. Copied: the step's array holds all lanes."""
        self._parts.append(rows.copy())
        while sum(part.shape[1] for part in self._parts[1:]) >= self.room:
            del self._parts[0]

    def rows(self, wrong: int = 0) -> np.ndarray | None:
        """The rows kept, without those of the last `wrong` guesses; None if no step has added any."""
        if not self._parts:
            return None
        found = np.concatenate(self._parts, 1)
        return found[:, max(0, found.shape[1] - wrong - self._most) : found.shape[1] - wrong]


class LastQueries(LastRows):
    """Query vectors, [layers, rows, Hq, D]."""

    def __init__(self, most: int, config: ModelConfig, guesses: int = 0) -> None:
        super().__init__(most, guesses)
        self._config = config

    def all(self, wrong: int = 0) -> Queries:
        """The queries kept, without those of the last `wrong` guesses."""
        rows, config = self.rows(wrong), self._config
        return NO_QUERIES if rows is None else Queries(rows, config.windows, config.score_cap, config.sources)
