"""A decode stroke in flight: sampling, guesses, and what is entered again after a preemption."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.interface import LazyLogits
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.engine.lane import Lane, LastQueries, LastRows, reopen_last
from twostroke.engine.lookup import LookupGuesses
from twostroke.engine.model import Model
from twostroke.engine.output import ChoiceOutput
from twostroke.engine.prefix_match import match_prefix, with_windows
from twostroke.engine.strokes import Decode, Decoded, GuessRound
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.kv.entries import Tail
from twostroke.sampling.draw import Draw, Noise, Sampled


class DecodeLane(Lane[Decode]):
    """Samples whenever it has caught up.

    The choice keeps `record`, the sampled tokens: after a preemption they are entered again, not sampled again.
    Guesses are entered like known tokens; then a token is sampled after each, for as long as the guesses match.
    """

    def __init__(
        self,
        slot: int,
        model: Model,
        stroke: Decode,
        output: ChoiceOutput,
        seed: bytes,
        record: "DecodeRecord",
        models: Mapping[str, Model],
        salt: bytes = b"",
        fresh: bool = False,  # compute every token, as `Prefill.fresh`
    ) -> None:
        """`models` are the engine's models by identity: any of them may have computed the logits in the tail."""
        base, tail = stroke.kv, stroke.kv.tail
        if not len(base):
            raise InvalidRequest("there is nothing to decode from: the KV cache has no entries")
        todo: list[int] = []
        self._rows: deque[tuple[Model, LazyLogits]] = deque()  # rows to sample from, each with its model
        self._hidden: np.ndarray | None = None  # of a model that takes hidden states: its own, before the next token
        self._placeholder = False  # whether a placeholder stands for the token that is being drawn
        self._num_drawn = 0  # tokens that were drawn and are not read yet
        if tail is not None and tail.pending is not None:
            todo = [tail.pending]
        elif not stroke.recompute and (row := _first_row(tail, model, models)) is not None:
            if model.config.takes_hidden:
                self._hidden = row[1].hidden_states()
            if not record.sampled:
                self._rows.append(row)
        else:
            base, todo = reopen_last(base)
        base, todo, again = with_windows(model, base, todo)
        if model.config.takes_hidden and (todo or again or stroke.guesses or stroke.lookup):
            raise InvalidRequest(f"model {model.name} decodes only behind the logits of a prefill, without guesses")
        # Tokens for which the context and the pool have room. The last of them is never entered, and yet it counts:
        # a prompt and its answer together take at most `max_model_len` tokens.
        slots = model.pool.max_entries
        self._room = min(model.max_position - base.next_position, slots - len(base)) - len(todo)
        if self._room < 1:
            raise ContextLengthExceeded(
                f"the context is full: model {model.name} has {model.max_position} positions, the pool {slots} slots"
            )
        self.guesses = [] if record.complete else [*in_vocabulary(stroke.guesses[: self._room - 1], model)]
        self._num_before = len(todo)  # tokens to enter before the first guess
        known = [s.id for s in record.sampled]
        # After a preemption: tokens sampled before agree with guesses, or the stroke would be over.
        self._skipped = max(0, len(known) - (not todo)) if self.guesses else 0
        todo = todo + (self.guesses or known[: -1 if record.complete else None])
        missing = None
        after_preemption = known and not self.guesses and len(todo) > 1
        if (after_preemption or again) and model.index is not None and not fresh:
            longer, todo, missing = match_prefix(model, base, todo, max(1, stroke.queries, stroke.states), salt)
            base = longer
        super().__init__(slot, model, stroke, base, todo, missing=missing, again=again)
        if self.guesses:
            self.queries = LastQueries(stroke.queries, model.config, len(self.guesses))
            self.states = LastRows(stroke.states, len(self.guesses))
        self.output, self.seed, self.record = output, seed, record
        pending, self._prompt = stroke.kv.pending, stroke.kv.token_array
        if pending is not None:
            self._prompt = np.concatenate([self._prompt, np.array([pending], np.int32)])
        if self.missing is None:
            self._begin()

    def _begin(self) -> None:
        if self.record.complete and not self.todo:
            self._finish()

    @property
    def num_guesses(self) -> int:
        return len(self.guesses)

    @property
    def decoding(self) -> bool:
        """Also while a model that takes hidden states enters known tokens: each goes with the state before it."""
        return len(self.todo) == 1 or (bool(self.todo) and self.model.config.takes_hidden)

    @property
    def awaits_token(self) -> bool:
        """Whether a drawn token is still wanted: the stroke has not ended, and no guess before it was wrong."""
        return self.result is None and self._num_drawn > 0

    @property
    def ready(self) -> bool:
        """Whether the lane has a row to sample from."""
        return bool(self._rows) and not self.todo and self.result is None and self.missing is None

    def hidden_inputs(self, count: int) -> HiddenInputs | None:
        return None if self._hidden is None else HiddenInputs(self._hidden, np.ones(count, np.bool_))

    def logit_rows(self, count: int) -> int:
        own = self.own_rows(count)
        if self._hidden is not None:
            return own
        return own if self.guesses else int(own > 0 and count == len(self.todo) and not self.record.complete)

    def _noise(self, ahead: int) -> Noise:
        """Noise of the output's next token, or of the token `ahead` places later."""
        return Noise.of(self.output.params.temperature, self.seed, len(self.output.ids) + ahead)

    def computed(self, rows: LazyLogits) -> None:
        if self._hidden is not None:
            self._hidden = rows.hidden_states()
            rows = rows[:0] if self.todo or self.record.complete else rows
        first = min(self._skipped, len(rows))  # rows that were sampled before a preemption
        self._skipped -= first
        if len(rows) == 1 and not first:  # as at every step of a decode
            self._rows.append((self.model, rows))
        else:
            self._rows.extend((self.model, rows[i : i + 1]) for i in range(first, len(rows)))
        if not self.todo and self.record.complete:
            self._finish()

    def take_draws(self) -> list[tuple[Model, LazyLogits, Draw]]:
        """Take what to sample next: (model, one row, draw). After guesses, all rows whose draws are already known."""
        asked, self._num_drawn = self._draw(), 1
        if len(self._rows) == 1:
            return [(*self._rows.popleft(), asked)]
        if asked.simple:  # rows of one model at a time, so that what is drawn comes in order
            whose = self._rows[0][0]
            rows = list(takewhile(lambda row: row[0] is whose, self._rows))
        else:
            self._rows[-1][1].read()  # rows are sampled one by one: compute the logits of all at once
            rows = [self._rows[0]]
        self._num_drawn = len(rows)
        for _ in rows:
            self._rows.popleft()
        return [(*row, replace(asked, noise=self._noise(i)) if i else asked) for i, row in enumerate(rows)]

    def _draw(self) -> Draw:
        """Describe the draw of the next token."""
        stroke, output = self.stroke, self.output
        banned = output.ending_ids if output.params.min_tokens else ()
        return Draw(
            output.params,
            self._noise(0),
            len(output.ids),
            self._prompt,
            output.ids,
            tuple(banned),
            output.allowed(self.model.config.vocab_size),
            stroke.stats,
            stroke.keep_logits,
        )

    def enter_placeholder(self, model: Model, number: int) -> None:
        """The i-th token that `model` draws is this lane's: let the next step enter it before it is known.

        Not if it is certain to be the last, if its row is another model's, or if more than an entry might be too much.
        """
        stroke, output = self.stroke, self.output
        last = len(self.record.sampled) + 1 == stroke.max_tokens or len(output.ids) + 1 == output.params.max_tokens
        if model is self.model and not (
            last or self.full or self.may_guess or stroke.queries or stroke.states or self._hidden is not None
        ):
            self._placeholder, self.todo = True, [-1 - number]

    @property
    def may_guess(self) -> bool:
        """Whether it guesses, or may when its next token is known."""
        return bool(self.guesses)

    def _entered(self, token: int) -> bool:
        """Whether the token was entered before it was known; names it in that case."""
        placeholder, self._placeholder = self._placeholder, False
        if placeholder and not self.todo:
            self.writer.set_last_token(token)
            self.num_computed += 1
            return True
        self.todo.clear()  # the step was placed without it
        return False

    def sampled(self, token: Sampled) -> None:
        """Record a sampled token, which the output already has. The next step enters it, or it stays pending."""
        sampled, stroke = self.record.sampled, self.stroke
        sampled.append(token)
        self._num_drawn -= 1
        entered = self._entered(token.id)
        if (
            self.output.finish_reason is not None
            or (stroke.max_tokens is not None and len(sampled) >= stroke.max_tokens)
            or (stroke.until is not None and stroke.until(sampled))
        ):
            self._complete(self._num_wrong(entered))
        elif self.guesses:
            if self.guesses[: len(sampled)][len(sampled) - 1 :] != [token.id]:
                self._complete(self._num_wrong(entered))
        elif not entered:
            self.todo.append(token.id)

    def _num_wrong(self, entered: bool) -> int:
        """Number of last entries that do not belong to a stroke which ends now; `entered`: see `_entered`."""
        return len(self.guesses) + 1 - len(self.record.sampled) if self.guesses else int(entered)

    @property
    def full(self) -> bool:
        """Whether the next sampled token is the last for which there is room."""
        return len(self.record.sampled) + 1 >= self._room

    def drop_guesses(self) -> bool:
        """Continue without guesses, which take more pages. Returns False if it has none, or has entered some."""
        if not self.guesses or self.started:
            return False
        self.todo[self._num_before :] = [sampled.id for sampled in self.record.sampled]
        self.guesses, self._skipped = [], 0
        self.queries = LastQueries(self.stroke.queries, self.model.config)
        self.states = LastRows(self.stroke.states)
        return True

    def end_with_length(self) -> bool:
        """End the stroke with "length": even alone, it finds no page for its next token.

        Returns False in the middle of a replay, when entries of its tokens are missing.
        """
        record = self.record
        if record.sampled and self.todo != [record.sampled[-1].id]:
            return False
        if self.output.finish_reason is None:
            self.output.end_with_length()
        self.todo.clear()
        record.complete, record.finish_reason = True, self.output.finish_reason
        if record.sampled:
            self._finish()
        else:
            self._forget()
            self.result = Decoded(self.stroke.kv, (), self.output.finish_reason)
        return True

    def _complete(self, wrong: int) -> None:
        """End with the last token; the last `wrong` entries do not belong to the stroke."""
        self.record.complete, self.record.finish_reason = True, self.output.finish_reason
        self.writer.truncate(len(self.writer) - wrong)
        self._finish(wrong)

    def _finish(self, wrong: int = 0) -> None:
        sampled = self.record.sampled
        self._forget()
        self.kv = self.writer.freeze(Tail(self.model.id, pending=sampled[-1].id))
        queries, states = self.queries.all(wrong), self.states.rows(wrong)
        self.result = Decoded(
            self.kv, tuple(sampled), self.output.finish_reason, queries, states, tuple(self.record.rounds)
        )

    def _forget(self) -> None:
        self._rows.clear()


class DecodeRecord:
    """The tokens that one decode stroke sampled, to be entered again after a preemption."""

    def __init__(self) -> None:
        self.sampled: list[Sampled] = []
        self.complete = False
        # number of tokens that the choice had when a stroke with emit=False began; None for other strokes
        self.start: int | None = None
        self.finish_reason: str | None = None  # that of the output when the stroke was complete
        self.lookup: LookupGuesses | None = None  # of a stroke with `lookup`
        self.rounds: list[GuessRound] = []


def _first_row(tail: Tail | None, model: Model, models: Mapping[str, Model]) -> tuple[Model, LazyLogits] | None:
    """The logits in a tail, and the model that samples from them.

    None if there are none, or if they have tokens that `model` lacks: another model's vocabulary may be larger.
    """
    if tail is None or tail.row is None:
        return None
    if (head := models.get(tail.model)) is not None:
        return (head, tail.row) if head.config.vocab_size <= model.config.vocab_size else None
    logits = tail.row.read()  # of a model outside this engine
    return (model, StoredLogits(logits)) if logits.shape[1] <= model.config.vocab_size else None


def in_vocabulary(guesses: Sequence[int], model: Model) -> Sequence[int]:
    """The leading guesses that are in the vocabulary."""
    size = model.config.vocab_size
    if not guesses or (min(guesses) >= 0 and max(guesses) < size):  # as nearly always
        return guesses
    return list(takewhile(lambda id: 0 <= id < size, guesses))
