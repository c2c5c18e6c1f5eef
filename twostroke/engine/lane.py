"""A stroke in flight: the tokens it still has to enter, and what it does with their logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from twostroke.backends.interface import LazyLogits
from twostroke.engine.model import Model
from twostroke.engine.prefix_match import MissingPages, match_prefix, missing_in_pool, tokens_by_tier
from twostroke.engine.queries import LastQueries, LastRows
from twostroke.engine.strokes import Decode, Decoded, Prefill, Prefilled
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.writer import KVWriter, SlotMapping
from twostroke.models.dropout import Dropout
from twostroke.sampling.scores import TokenScore

if TYPE_CHECKING:
    from twostroke.engine.load_queue import PageLoad
    from twostroke.engine.request import Choice, SharedPrefill

StrokeKind = TypeVar("StrokeKind", Prefill, Decode)


class Lane(Generic[StrokeKind]):
    """Catches up: in each step it may enter some of its known tokens, until none is left.

    Attributes:
        slot: index of this stroke among its program's side-by-side strokes.
        todo: known tokens that are not entered yet.
        missing: what it waits for, from other tiers; None while it can go on. load: what brings it.
        num_computed: number of its entries that are computed, and whose tokens are known.
        queries, states: collect the query vectors and hidden states that the stroke returns.
        result: the stroke's result once it is done; kv: the KV cache in it.
        cached: tokens that it found and need not enter, by tier.
        dropout: the dropout that its rows are computed with, or None.
    """

    def __init__(
        self,
        choice: Choice,
        slot: int,
        model: Model,
        stroke: StrokeKind,
        base: KVCache,
        todo: list[int],
        dropout: Dropout | None = None,
        missing: MissingPages | None = None,
    ) -> None:
        model.pool.geometry.require(base.pool.geometry, f"model {model.name} cannot continue this value")
        # The value may come from a file, or from a model with a larger vocabulary.
        most = max(max(todo, default=0), int(base.token_array.max(initial=0)))
        if most >= model.vocab_size or min(todo, default=0) < 0:
            raise InvalidRequest(f"token ids must be from 0 to {model.vocab_size - 1}")
        self.choice, self.slot, self.model, self.stroke = choice, slot, model, stroke
        self.dropout = dropout
        self.todo = todo
        self.missing = missing or missing_in_pool(model, base)
        self.load: PageLoad | None = None
        self._base_length = len(base)
        self._write_after(base if self.missing is None else KVCache.empty(model.pool))
        self.queries = LastQueries(stroke.queries or 0, model.config.windows)
        self.states = LastRows(stroke.states or 0)
        self.started = False
        self.cached: Counter[str] = Counter()
        self.kv: KVCache | None = None
        self.result: KVCache | Prefilled | Decoded | None = None

    def _write_after(self, base: KVCache) -> None:
        # Entries under dropout are canonical only for the same dropout, as for another model.
        name = self.model.id if self.dropout is None else f"{self.model.id}, {self.dropout}"
        self.writer = KVWriter(base.copy_to(self.model.pool), name)
        self.num_computed = len(self.writer)

    def arrived(self, kv: KVCache, sources: Sequence[str] = ()) -> None:
        """Go on after `kv`, which is in the pool: what the lane waited for, or as much of it as came.

        `sources` are the tiers of its last pages. Raises OutOfPages if the pool has no room; the lane still waits then.
        """
        more = len(kv) - self._base_length
        self._write_after(kv)
        self.missing = self.load = None
        self._base_length = len(kv)
        del self.todo[:more]
        for tier in sources:
            self.cached[tier] += self.model.pool.page_size
        self._begin()

    def _begin(self) -> None:
        """Called when the value that the lane extends is in the pool."""

    @property
    def decoding(self) -> bool:
        """Whether exactly one token is left to enter, the state of a decoding lane at every step."""
        return False

    @property
    def has_placeholder(self) -> bool:
        """Whether the next token is a placeholder: it is being drawn, and may prove to be the last."""
        return bool(self.todo) and self.todo[0] < 0

    def logit_rows(self, count: int) -> int:
        """Number of last rows that need logits when the next `count` tokens are entered."""
        raise NotImplementedError

    def enter(self, count: int) -> tuple[list[int], SlotMapping]:
        """Take the next `count` tokens and allocate their slots. On OutOfPages nothing has changed."""
        tokens = self.todo[:count]
        places = self.writer.append(tokens)
        del self.todo[:count]
        self.started = True
        return tokens, places

    def computed(self, rows: LazyLogits) -> None:
        """Called when the last entered tokens are computed; `rows` are the logits that `logit_rows` asked for."""
        raise NotImplementedError

    def waiters(self) -> list[Choice]:
        """Other choices that wait for this lane's result."""
        return []

    def remove_waiter(self, choice: Choice) -> None:
        """Remove a choice that no longer waits."""

    def close(self) -> None:
        """Release all pages. A plan or a traceback may still reference the lane; it must not keep KV alive."""
        if self.load is not None:
            self.load.remove_lane(self)
        self.writer.close()
        del self.writer, self.stroke, self.queries, self.states
        self.missing = self.load = None
        self.kv = self.result = None
        self._forget()

    def _forget(self) -> None:
        """Drop logits, which may be large."""


class PrefillLane(Lane[Prefill]):
    """Done when all tokens are entered. `shared` lists other choices of the request that need the same prefill."""

    def __init__(
        self, choice: Choice, slot: int, model: Model, stroke: Prefill, shared: SharedPrefill | None = None
    ) -> None:
        base = stroke.after if stroke.after is not None else KVCache.empty(model.pool)
        todo = [*([] if base.pending is None else [base.pending]), *stroke.tokens]
        has_logits = base.tail is not None and base.tail.row is not None
        if not todo and (stroke.dropout is not None or (not has_logits and stroke.logits != "none")):
            base, todo = reopened(base)
        if base.next_position + len(todo) > model.max_position:
            raise ContextLengthExceeded(
                f"the prompt ends at position {base.next_position + len(todo)}, past the {model.max_position} of "
                f"model {model.name}: shorten it"
            )
        if (entries := len(base) + len(todo)) > model.pool.num_pages * model.pool.page_size:
            raise ContextLengthExceeded(
                f"the prompt takes {entries} KV entries, and the pool has {model.pool.num_pages} pages of "
                f"{model.pool.page_size}: shorten it, or give the pool more memory (kv_bytes)"
            )
        base, todo, first = _scored(model, stroke, base, todo)
        # The tokens to score, each by the row before it: the last ones of `todo`.
        self._targets = [] if first is None else todo[max(1, first) :]
        known, missing = base, None
        found_before = stroke.logits != "all" and stroke.dropout is None and not stroke.fresh
        if model.index is not None and found_before and todo:
            needed = max(1, stroke.queries or 0, stroke.states or 0, 1 + len(self._targets))
            known, todo, missing = match_prefix(model, base, todo, needed)
        found = tokens_by_tier(known, len(base))
        super().__init__(choice, slot, model, stroke, known, todo, stroke.dropout, missing)
        self.shared = shared
        self.cached = found
        self._tail = base.tail
        self._logits: list[np.ndarray] = []
        self._scores: list[TokenScore | None] = []
        if first == 0:  # its row is in the value's tail; the first token of a context has none
            row = None if base.tail is None else base.tail.row
            self._scores += [None] if row is None else row.scores(stroke.tokens[:1], stroke.logprobs or 0)
        if self.missing is None:
            self._begin()

    def _begin(self) -> None:
        if not self.todo:
            self._finish(self._tail)
        elif len(self.writer):
            self._report_progress()

    def _report_progress(self) -> None:
        if self.stroke.progress is not None:
            self.stroke.progress(self.writer.freeze())

    @property
    def min_pages(self) -> int:
        """Minimum number of new pages that its tokens need."""
        size = self.model.pool.page_size
        in_place = size - 1 if len(self.writer) else 0  # at most, in the last page of the value that it extends
        return -(-(len(self.todo) - in_place) // size)

    def waiters(self) -> list[Choice]:
        return [] if self.shared is None else [choice for choice, _ in self.shared.waiting]

    def forget(self, choice: Choice) -> None:
        if self.shared is not None:
            self.shared.waiting = [waiter for waiter in self.shared.waiting if waiter[0] is not choice]

    def logit_rows(self, count: int) -> int:
        if self.stroke.logits == "all":
            return count
        if self._targets:  # the rows before the targets, and the last one
            return max(0, count - (len(self.todo) - 1 - len(self._targets)))
        return int(self.stroke.logits == "last" and count == len(self.todo))

    def computed(self, rows: LazyLogits) -> None:
        if self._targets and len(rows):
            scored = len(self._targets) - min(len(self._targets), max(0, len(self.todo) - 1))
            end = len(rows) - (not self.todo)  # nothing follows the very last row
            self._scores += rows[end - scored : end].scores(self._targets[:scored], self.stroke.logprobs or 0)
            del self._targets[:scored]
        if self.stroke.logits == "all" and len(rows):
            self._logits.append(rows.read())
        if not self.todo:
            self._finish(Tail(self.model.id, rows[-1:].kept()) if len(rows) else None)
        else:
            self._report_progress()

    def _forget(self) -> None:
        self._logits.clear()

    def _finish(self, tail: Tail | None) -> None:
        self.kv = kv = self.writer.freeze(tail)
        stroke = self.stroke
        more = (stroke.queries, stroke.states, stroke.logprobs)
        if stroke.logits == "all" or any(asked is not None for asked in more):
            logits = self._logits or [np.empty((0, self.model.vocab_size), np.float32)]
            scores, states = tuple(self._scores), self.states.rows()
            self.result = Prefilled(kv, np.concatenate(logits), self.queries.all(), scores, states)
        else:
            self.result = kv


def reopened(base: KVCache) -> tuple[KVCache, list[int]]:
    """Drop the last entry and enter its token again, since its logits are not available."""
    if not len(base):
        raise InvalidRequest("the prompt is empty: give at least one token")
    return base.without_last(), [int(base.token_array[-1])]


def _scored(model: Model, stroke: Prefill, base: KVCache, todo: list[int]) -> tuple[KVCache, list[int], int | None]:
    """(base, todo, index in `todo` of the first token to score, None if there is none).

    At index 0, the token's row is in the tail of `base`. Where that has none of this model, the last entry is computed
    again.
    """
    first = len(todo) - len(stroke.tokens) + stroke.scored_from
    if stroke.logprobs is None or first >= len(todo):
        return base, todo, None
    known = base.tail is not None and base.tail.row is not None and base.tail.model == model.id
    if first == 0 and len(base) and not known:
        base, again = reopened(base)
        return base, again + todo, 1
    return base, todo, first
