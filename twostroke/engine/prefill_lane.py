"""A prefill stroke in flight: what the prefix index has, what is left to enter, and the rows that are kept."""

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.interface import LazyLogits
from twostroke.engine.lane import Lane, reopen_last
from twostroke.engine.model import Model
from twostroke.engine.prefix_match import match_prefix, parting_after, tokens_by_tier, with_windows
from twostroke.engine.strokes import Prefill, Prefilled
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.sampling.scores import TokenScore


class PrefillLane(Lane[Prefill]):
    """Done when all tokens are entered."""

    def __init__(self, slot: int, model: Model, stroke: Prefill, salt: bytes = b"", fresh: bool = False) -> None:
        base = stroke.after if stroke.after is not None else KVCache.empty(model.pool)
        if stroke.hidden and (stroke.logits == "all" or stroke.logprobs is not None):
            raise InvalidRequest("a prefill returns hidden states, or logits and log-probabilities: leave one out")
        if model.config.both_ways and (len(base) or not stroke.hidden):
            raise InvalidRequest(f"model {model.name} makes embeddings alone: its attention is in both directions")
        todo = [*([] if base.pending is None else [base.pending]), *stroke.tokens]
        has_logits = base.tail is not None and base.tail.row is not None
        if not todo and (stroke.dropout is not None or (not has_logits and stroke.logits != "none")):
            base, todo = reopen_last(base)
        width = (len(todo), model.config.hidden_size) if model.config.takes_hidden else None
        if width != (None if stroke.inputs is None else stroke.inputs.shape):
            raise InvalidRequest(
                f"a prefill of model {model.name} takes "
                + (
                    "no hidden states"
                    if width is None
                    else f"hidden states of its {width[0]} tokens, {width[1]} numbers each"
                )
            )
        if base.next_position + len(todo) > model.max_position:
            raise ContextLengthExceeded(
                f"the prompt ends at position {base.next_position + len(todo)}, past the {model.max_position} of "
                f"model {model.name}: shorten it"
            )
        if (entries := len(base) + len(todo)) > model.pool.max_entries:
            raise ContextLengthExceeded(
                f"the prompt takes {entries} KV entries, and the pool has {model.pool.num_pages} pages of "
                f"{model.pool.page_size}: shorten it, or give the pool more memory (kv_bytes)"
            )
        base, todo, first = _scored(model, stroke, base, todo)
        tail = base.tail
        self._keeps_tail = not todo
        base, todo, again = with_windows(model, base, todo, stroke.dropout)
        if first is not None:
            first += again
        # The tokens to score, each by the row before it: the last ones of `todo`.
        self._targets = [] if first is None else todo[max(1, first) :]
        known, missing, parting = base, None, 0
        found_before = stroke.logits != "all" and stroke.dropout is None and not (stroke.fresh or fresh)
        if model.index is not None and found_before and todo:
            needed = max(1, stroke.queries or 0, stroke.states or 0, stroke.hidden or 0, 1 + len(self._targets))
            known, todo, missing = match_prefix(model, base, todo, needed, salt)
            parting = parting_after(model, known, todo, needed, salt)
        found = tokens_by_tier(known, len(base))
        super().__init__(slot, model, stroke, known, todo, stroke.dropout, missing, again, parting)
        self.cached = found
        self._tail = tail
        self._logits: list[np.ndarray] = []
        self._hidden: list[np.ndarray] = []
        self._scores: list[TokenScore | None] = []
        if first == 0:  # its row is in the value's tail; the first token of a context has none
            row = None if tail is None else tail.row
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
        pool = self.model.pool
        if not len(self.writer):
            return pool.geometry.num_pages(len(self.todo), pool.page_size)
        in_place = pool.page_size - 1  # at most, in the last page of the value that it extends
        return pool.geometry.windows.count(None) * -(-(len(self.todo) - in_place) // pool.page_size)

    def logit_rows(self, count: int) -> int:
        if self.stroke.logits == "all":
            return self.own_rows(count)
        if self.stroke.hidden:
            return max(0, count - max(0, len(self.todo) - self.stroke.hidden))
        if self._targets:  # the rows before the targets, and the last one
            return max(0, count - (len(self.todo) - 1 - len(self._targets)))
        return int(self.stroke.logits == "last" and count == len(self.todo))

    def hidden_inputs(self, count: int) -> HiddenInputs | None:
        if (inputs := self.stroke.inputs) is None:
            return None
        end = len(inputs) - len(self.todo)
        return HiddenInputs(inputs[end - count : end], np.zeros(count, np.bool_))

    def computed(self, rows: LazyLogits) -> None:
        if self._targets and len(rows):
            scored = len(self._targets) - min(len(self._targets), max(0, len(self.todo) - 1))
            end = len(rows) - (not self.todo)  # nothing follows the very last row
            self._scores += rows[end - scored : end].scores(self._targets[:scored], self.stroke.logprobs or 0)
            del self._targets[:scored]
        if self.stroke.logits == "all" and len(rows):
            self._logits.append(rows.read())
        if self.stroke.hidden and len(rows):
            self._hidden.append(rows.hidden_states())
        if not self.todo:
            made = Tail(self.model.id, rows[-1:].kept()) if len(rows) else None
            self._finish(self._tail if self._keeps_tail else made)
        else:
            self._report_progress()

    def _forget(self) -> None:
        self._logits.clear()
        self._hidden.clear()

    def _finish(self, tail: Tail | None) -> None:
        self.kv = kv = self.writer.freeze(tail)
        stroke = self.stroke
        more = (stroke.queries, stroke.states, stroke.logprobs, stroke.hidden)
        if stroke.logits == "all" or any(asked is not None for asked in more):
            logits = self._logits or [np.empty((0, self.model.config.vocab_size), np.float32)]
            scores, states = tuple(self._scores), self.states.rows()
            hidden = np.concatenate(self._hidden) if self._hidden else None
            self.result = Prefilled(kv, np.concatenate(logits), self.queries.all(), scores, states, hidden)
        else:
            self.result = kv


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
        base, again = reopen_last(base)
        return base, again + todo, 1
    return base, todo, first
