"""Runs programs: opens the strokes that they yield and sends them the results."""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane, DecodeRecord
from twostroke.engine.guess_judge import GuessJudge
from twostroke.engine.lane import Lane
from twostroke.engine.lookup_lane import LookupLane
from twostroke.engine.model import Model
from twostroke.engine.output import ChoiceOutput
from twostroke.engine.pending import PENDING, PendingFuture, Raised
from twostroke.engine.prefill_lane import PrefillLane
from twostroke.engine.request import Choice, SharedPrefill
from twostroke.engine.strokes import (
    Await,
    Decode,
    Decoded,
    Emit,
    Guess,
    Guesses,
    Prefill,
    Prefilled,
    ReadWeights,
    Stroke,
    close_program,
)
from twostroke.errors import InvalidRequest, NotFinite
from twostroke.kv.cache import KVCache


class ProgramRunner:
    """Runs the programs of choices. It knows nothing about steps, batches or memory."""

    def __init__(
        self,
        models: Mapping[str, Model],
        default: str,
        judge: GuessJudge,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        """`wake` is called by other threads when something has come that a program waits for."""
        self._judge = judge
        self.models, self.default, self._wake, self._clock = models, default, wake, clock
        self._by_identity = {model.id: model for model in models.values()}

    def start(self, choice: Choice) -> None:
        """Start the choice's program, also again after a preemption."""
        choice.num_decodes = choice.num_emits = choice.num_guesses = 0
        program = choice.request.make_program()
        if not isinstance(program, Generator):
            raise InvalidRequest(f"a program is a generator, whose body has a yield, not {type(program).__name__}")
        choice.program = program
        self._advance(choice, [None])

    def resume(self, choice: Choice) -> None:
        """Collect the results of finished lanes and, once all are there, resume the program."""
        self._collect_results(choice)
        if choice.resumable:
            self._advance(choice, [choice.take_results()])

    def _advance(self, choice: Choice, sent: list[Any]) -> None:
        """Send a program its results and open the strokes it yields, until one of them has to wait for a step.

        `sent` has the results alone, and gives them away: from Python 3.13 on, an error that the program caught holds
        this frame too, and what it names.
        """
        program = choice.program
        assert program is not None
        while True:
            try:
                asked = program.throw(sent.pop().error) if isinstance(sent[0], Raised) else program.send(sent.pop())
            except StopIteration as stop:
                if not choice.done:
                    choice.finish(stop.value)
                return
            if choice.done:  # the program has cancelled its own request
                close_program(program)
                return
            choice.side_by_side = isinstance(asked, list)
            strokes = asked if isinstance(asked, list) else [asked]
            if not strokes:  # nothing to wait for
                sent.append([])
                continue
            choice.results = [PENDING] * len(strokes)
            for slot, stroke in enumerate(strokes):
                self._open(choice, slot, stroke)
            self._collect_results(choice)
            if not choice.resumable:
                return
            sent.append(choice.take_results())

    def _open(self, choice: Choice, slot: int, stroke: Stroke) -> None:
        if isinstance(stroke, Emit):
            choice.results[slot] = self._emit(choice, stroke)
        elif isinstance(stroke, Prefill):
            self._open_prefill(choice, slot, stroke)
        elif isinstance(stroke, Decode):
            self._open_decode(choice, slot, stroke)
        elif isinstance(stroke, Guess):
            choice.results[slot] = self._guess(choice, stroke)
        elif isinstance(stroke, Await):
            pending = PendingFuture(slot, stroke.start(), self._clock())
            choice.futures.append(pending)
            pending.future.add_done_callback(lambda _: self._wake())
        elif isinstance(stroke, ReadWeights):
            model = self._model(stroke.model)
            choice.results[slot] = [model.values(name) for name in stroke.names]
        else:
            known = "Prefill, Decode, Guess, Emit, Await and ReadWeights"
            raise InvalidRequest(f"a program yields {known}, not {type(stroke).__name__}")

    def collect_futures(self, choice: Choice) -> bool:
        """Take the results of finished futures that a choice waits for. The next `resume` hands them to its program."""
        done = [pending for pending in choice.futures if pending.future.done()]
        for pending in done:
            choice.futures.remove(pending)
            choice.request.timings.loading += self._clock() - pending.began
            error = CancelledError() if pending.future.cancelled() else pending.future.exception()
            choice.results[pending.slot] = pending.future.result() if error is None else Raised(error)
        return bool(done)

    def _open_decode(self, choice: Choice, slot: int, stroke: Decode) -> None:
        record, output = choice.next_record(), choice.output
        if record.complete and not record.sampled:  # the pool had no room for it
            choice.results[slot] = Decoded(stroke.kv, (), record.finish_reason)
            return
        if stroke.emit:
            choice.replay_given(stroke, record)
        if not stroke.emit:
            output = self._draft_output(choice, record)
        elif output.finish_reason is not None and not record.sampled:
            choice.results[slot] = Decoded(stroke.kv, (), output.finish_reason)  # the request has already ended
            return
        model = self._model(stroke.model)
        seed = choice.seed(stroke.stream)
        salt, lookup = choice.request.cache_salt, None if choice.spares else stroke.lookup
        if lookup is not None and record.lookup is None:
            record.lookup = self._judge.lookup(lookup, salt)
            pending = () if stroke.kv.pending is None else (stroke.kv.pending,)
            record.lookup.begin([*stroke.kv.tokens, *pending, *(one.id for one in record.sampled)])
        kind = DecodeLane if lookup is None else LookupLane
        choice.lanes.append(kind(slot, model, stroke, output, seed, record, self._by_identity, salt, choice.spares))

    def _guess(self, choice: Choice, stroke: Guess) -> Guesses:
        """The same as before after a preemption, so that its strokes are the same."""
        if (known := choice.guesses) is None:
            request, output = choice.request, choice.output
            known = choice.guesses = self._judge.begin(
                request.prompt_tokens, output.params.max_tokens, request.cache_salt
            )
        choice.num_guesses += 1
        if choice.num_guesses <= len(known.told):
            return known.told[choice.num_guesses - 1]
        return self._judge.advise(stroke, known, len(choice.output.ids), self._model(None), self._model(stroke.source))

    def _draft_output(self, choice: Choice, record: DecodeRecord) -> ChoiceOutput:
        """An output for tokens that are not emitted yet. It continues from where the choice stood at first opening."""
        output = choice.output
        if record.start is None:
            record.start = len(output.ids)
            return output.fork()
        fork = ChoiceOutput(output.params, choice.request.tokenizer, choice.index)
        for known in (*output.sampled[: record.start], *record.sampled):
            fork.push(known)
        fork.finish_reason = record.finish_reason  # also what its tokens do not tell: that there was no more room
        return fork

    def _open_prefill(self, choice: Choice, slot: int, stroke: Prefill) -> None:
        request, shared = choice.request, None
        # Only prefills from position 0 are shared: later ones continue values that differ between choices.
        if len(request.choices) > 1 and stroke.after is None and stroke.inputs is None:
            key = (tuple(stroke.tokens), stroke.model, stroke.logits, stroke.queries, stroke.dropout)
            key += (stroke.logprobs, stroke.scored_from, stroke.states, stroke.hidden)
            if (shared := request.shared_prefills.get(key)) is not None:
                choice.results[slot] = shared.value
                if shared.value is PENDING:
                    shared.waiting.append((choice, slot))
                shared.takers -= 1
                if not shared.takers:
                    del request.shared_prefills[key]
                return
            if not request.preemptions:
                request.shared_prefills[key] = shared = SharedPrefill(len(request.choices) - 1)
        lane = PrefillLane(slot, self._model(stroke.model), stroke, request.cache_salt, choice.spares)
        if shared is not None:
            choice.sharing[slot] = shared
        request.prefilled_tokens += lane.cached.total() + len(lane.todo)
        request.cached_by_tier += lane.cached
        choice.lanes.append(lane)

    def _emit(self, choice: Choice, stroke: Emit) -> bool:
        choice.num_emits += 1
        if choice.num_emits > choice.emits_done:  # emit once, also after a preemption
            choice.emits_done += 1
            choice.request.timings.in_bulk = True
            for i, sampled in enumerate(stroke.sampled, 1):
                if choice.output.finish_reason is None:
                    last = stroke.finish_reason == "length" and i == len(stroke.sampled)
                    choice.deliver(choice.output, sampled, self._clock(), full=last)
            choice.hold_last_token()
        return choice.output.finish_reason is not None

    def end_with_length(self, choice: Choice, lane: Lane | None = None) -> bool:
        """End with "length" whatever finds no page even alone: `lane`, or the choice's program.

        A draft or a candidate ends as a stroke, and its program continues. Anything else ends the choice; its tokens
        are kept. Returns False if it has none, or if the caller has already taken the last.
        """
        decode = lane if isinstance(lane, DecodeLane) else None
        if decode is not None and decode.output is not choice.output and decode.end_with_length():
            return True
        if not choice.finish_with_length():
            return False
        if decode is None or decode.output is not choice.output or not decode.end_with_length():
            choice.finish(None)
        return True

    def _collect_results(self, choice: Choice) -> None:
        for lane in [lane for lane in choice.lanes if lane.result is not None]:
            if isinstance(lane.result, Prefilled) and not lane.result.finite:
                lane.model.pool.wipes = True
                raise NotFinite(f"model {lane.model.name}")
            choice.lanes.remove(lane)
            choice.results[lane.slot] = lane.result
            if choice.request.params.prompt_logprobs is not None and isinstance(lane.result, Prefilled):
                choice.request.prompt_scores = lane.result.scores
            if lane.kv is not None:
                self._index(choice, lane, lane.writer.freeze(whole=True) if lane.parting else lane.kv)
            if lane.kv is not None and choice.index == 0:
                choice.request.kv_bytes = lane.kv.nbytes
            if (shared := choice.sharing.pop(lane.slot, None)) is not None:
                shared.publish(lane.result)
            lane.close()

    def _index(self, choice: Choice, lane: Lane, kv: KVCache, again: bool = False) -> None:
        """Index a lane's canonical entries, and offer them to the stores."""
        model, stroke, salt = lane.model, lane.stroke, choice.request.cache_salt
        if salt and model.index is not None:
            model.index.insert(kv, salt)
        elif model.backing_stores is not None:
            before = stroke.after if isinstance(stroke, Prefill) else stroke.kv  # counted as used by its own stroke
            start = 0 if before is None else before.canonical_length(model.id) // model.pool.page_size
            model.backing_stores.insert(kv, max(start, lane.num_indexed), again, lane.parting)
        elif model.index is not None:
            model.index.insert(kv)
        lane.num_indexed = len(kv) // model.pool.page_size

    def index_computed(self, choice: Choice, lanes: Iterable[Lane], again: bool) -> None:
        """Index what lanes have computed before they lose pages, so that it is found; `again`: by the same choice."""
        for lane in lanes:
            if lane.started and lane.dropout is None:
                self._index(choice, lane, lane.writer.freeze(whole=True)[: lane.num_computed], again)

    def _model(self, name: str | None) -> Model:
        model = self.models.get(name or self.default)
        if model is None:
            raise InvalidRequest(f"there is no model {name!r} in this engine; it has {', '.join(self.models)}")
        return model
