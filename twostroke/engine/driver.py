"""Drives programs: opens the strokes that they yield and sends them the results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from twostroke.engine.decode_lane import DecodeLane, DecodeRecord
from twostroke.engine.lane import PrefillLane
from twostroke.engine.model import Model
from twostroke.engine.request import WAITING_FOR, Choice, SharedPrefill
from twostroke.engine.strokes import Decode, Decoded, Emit, Prefill, Stroke
from twostroke.engine.track import Track
from twostroke.errors import InvalidRequest
from twostroke.sampling.draw import Sampled


class Driver:
    """Handles strokes and programs; knows nothing about steps, batches or memory."""

    def __init__(self, models: Mapping[str, Model], default: str) -> None:
        self.models, self.default = models, default
        self._by_identity = {model.id: model for model in models.values()}

    def start(self, choice: Choice) -> None:
        """Start the choice's program, also again after a preemption."""
        choice.num_decodes = choice.num_emits = 0
        choice.program = choice.request.make_program()
        self._advance(choice, None)

    def resume(self, choice: Choice) -> None:
        """Collect the results of finished lanes and, once all are there, resume the program."""
        self._harvest(choice)
        if choice.resumable:
            self._advance(choice, choice.answer())

    def _advance(self, choice: Choice, value: Any) -> None:
        """Send a program its results and open the strokes it yields, until one of them has to wait for a step."""
        assert choice.program is not None
        while True:
            try:
                asked = choice.program.send(value)
            except StopIteration as stop:
                choice.finish(stop.value)
                return
            choice.side_by_side = isinstance(asked, list)
            strokes = asked if isinstance(asked, list) else [asked]
            choice.results = [WAITING_FOR] * len(strokes)
            for slot, stroke in enumerate(strokes):
                self._open(choice, slot, stroke)
            self._harvest(choice)
            if not choice.resumable:
                return
            value = choice.answer()

    def _open(self, choice: Choice, slot: int, stroke: Stroke) -> None:
        if isinstance(stroke, Emit):
            choice.results[slot] = self._emit(choice, stroke)
        elif isinstance(stroke, Prefill):
            self._open_prefill(choice, slot, stroke)
        elif isinstance(stroke, Decode):
            self._open_decode(choice, slot, stroke)
        else:
            raise InvalidRequest(f"a program yields Prefill, Decode and Emit, not {type(stroke).__name__}")

    def _open_decode(self, choice: Choice, slot: int, stroke: Decode) -> None:
        record, track = choice.next_record(), choice.track
        if not stroke.emit:
            track = self._private_track(choice, record)
        elif track.finish_reason is not None and not record.sampled:
            choice.results[slot] = Decoded(stroke.kv, (), track.finish_reason)  # the request has already ended
            return
        model = self._model(stroke.model)
        seed = choice.seed(stroke.stream)
        choice.lanes.append(DecodeLane(choice, slot, model, stroke, track, seed, record, self._by_identity))

    def _private_track(self, choice: Choice, record: DecodeRecord) -> Track:
        """A track for tokens that are not emitted yet. It continues from where the choice stood at first opening."""
        track = choice.track
        if record.start is None:
            record.start = len(track.ids)
            return track.fork()
        fork = Track(track.params, choice.request.tokenizer, choice.index)
        for known in (*track.sampled[: record.start], *record.sampled):
            fork.push(known)
        return fork

    def _open_prefill(self, choice: Choice, slot: int, stroke: Prefill) -> None:
        request, shared = choice.request, None
        # Only prefills from position 0 are shared: later ones continue values that differ between choices.
        if len(request.choices) > 1 and stroke.after is None:
            key = (tuple(stroke.tokens), stroke.model, stroke.logits, stroke.queries, stroke.dropout)
            key += (stroke.logprobs, stroke.scored_from)
            if (shared := request.shared.get(key)) is not None:
                choice.results[slot] = shared.value
                if shared.value is WAITING_FOR:
                    shared.waiting.append((choice, slot))
                shared.takers -= 1
                if not shared.takers:
                    del request.shared[key]
                return
            if not request.preemptions:
                request.shared[key] = shared = SharedPrefill(len(request.choices) - 1)
        lane = PrefillLane(choice, slot, self._model(stroke.model), stroke, shared)
        request.prefilled_tokens += lane.cached_tokens + len(lane.todo)
        request.cached_tokens += lane.cached_tokens
        choice.lanes.append(lane)

    def _emit(self, choice: Choice, stroke: Emit) -> bool:
        choice.num_emits += 1
        if choice.num_emits > choice.emits_done:  # emit once, also after a preemption
            choice.emits_done += 1
            choice.request.timings.in_bulk = True
            for sampled in stroke.sampled:
                if choice.track.finish_reason is None:
                    self.deliver(choice, choice.track, sampled)
        return choice.track.finish_reason is not None

    def deliver(self, choice: Choice, track: Track, sampled: Sampled, full: bool = False) -> None:
        """Add a token to a track. If it is the choice's main track, also hand the token to the caller."""
        token = track.push(sampled, full)
        if track is choice.track:
            if choice.index == 0:
                choice.request.timings.tokens.append(time.perf_counter())
            choice.request.events.append(token)

    def _harvest(self, choice: Choice) -> None:
        for lane in [lane for lane in choice.lanes if lane.result is not None]:
            choice.lanes.remove(lane)
            choice.results[lane.slot] = lane.result
            if lane.model.index is not None and lane.kv is not None:
                lane.model.index.insert(lane.kv)
            if lane.kv is not None and choice.index == 0:
                choice.request.kv_bytes = lane.kv.nbytes
            if isinstance(lane, PrefillLane) and lane.shared is not None:
                lane.shared.arrived(lane.result)
            lane.close()

    def _model(self, name: str | None) -> Model:
        model = self.models.get(name or self.default)
        if model is None:
            raise InvalidRequest(f"there is no model {name!r} in this engine; it has {', '.join(self.models)}")
        return model
