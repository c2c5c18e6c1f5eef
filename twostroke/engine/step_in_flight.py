"""One step in flight: the tokens of a step are read after the next step was launched.

A device computes while Python works, if it has something to compute. So a step is launched before the tokens of the
step before it are known: a decoding lane enters a placeholder (`RaggedBatch.drawn`). The order is

    forward of step t + 1, tokens of step t are read and delivered, step t + 1 is sampled, forward of step t + 2, ...

A step is sampled when all tokens before it are known. So penalties, grammars and conditions need no special care, and
nothing is drawn for a lane that has ended. Such a lane has at most one row too many, which its writer removes.

On a backend that computes in the calling thread nothing can overlap: there a step's tokens are read at once.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from twostroke.backends.interface import DrawnTokens, LazyLogits
from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.model import Model
from twostroke.engine.placement import Placement
from twostroke.engine.request import Choice
from twostroke.engine.step import Chunk, ScheduledStep, run_forward
from twostroke.errors import NotFinite
from twostroke.sampling.draw import Draw, Sampled
from twostroke.sampling.statistics import NO_TOKEN

Guarded = Callable[..., None]  # RequestManager.guarded: an exception of the action ends only these requests
PAUSE = 0.1  # part of a step's time that may pass between two calls; after a longer pause the time does not count


class PendingDraws:
    """Tokens that one model draws: the i-th is for `lanes[i]`. Without lanes only the step is waited for."""

    def __init__(self, lanes: Sequence[tuple[Choice, DecodeLane]], drawn: DrawnTokens) -> None:
        self.lanes, self.drawn = lanes, drawn
        self.tokens: list[tuple[tuple[Choice, DecodeLane], Sampled]] = []

    def read(self) -> None:
        """Wait for the tokens."""
        self.tokens = list(zip(self.lanes, self.drawn.read(), strict=True))


class StepInFlight:
    """The step whose tokens are not read yet, if there is one."""

    def __init__(self, placement: Placement, clock: Clock = SYSTEM) -> None:
        self._placement, self._clock = placement, clock
        self._pending: dict[Model, PendingDraws] = {}
        self.step: ScheduledStep | None = None  # the step that was sampled last; None if its tokens are read
        self._launched_at = self._collected_at = 0.0  # when a step was sampled, and its tokens read, last

    def clear(self) -> None:
        """Forget the step: nobody waits for its tokens any more."""
        self._pending, self.step = {}, None

    def launch_forward(self, chunks: Sequence[Chunk], guarded: Guarded) -> list[Model]:
        """Launch a forward pass for each model that the chunks need. Returns these models."""
        models = list(dict.fromkeys(chunk.lane.model for chunk in chunks))
        for model in models:
            # Not those whose request has failed since through a sibling choice.
            group = [chunk for chunk in chunks if chunk.lane.model is model and not chunk.choice.done]
            if group:
                before = self._pending.get(model)  # whose tokens the placeholders of its lanes stand for
                drawn = None if before is None else before.drawn
                guarded({chunk.choice.request for chunk in group}, run_forward, model, group, drawn)
        return models

    def launch_sampling(
        self,
        step: ScheduledStep,  # the step that is sampled
        ready: Iterable[tuple[Choice, DecodeLane]],  # lanes with rows to sample from, with their choices
        guarded: Guarded,  # calls an action on behalf of requests
        ahead: bool = False,  # whether lanes may enter their tokens before these are read
        # models with rows in this step; for each there is something to wait for, even if nothing is drawn
        computing: Collection[Model] = (),
    ) -> None:
        """Draw a token for every lane that is ready. Constraints are user code: an error ends only its own request."""
        asked: dict[Model, list[tuple[Choice, DecodeLane, LazyLogits, Draw]]] = {model: [] for model in computing}

        def ask(choice: Choice, lane: DecodeLane) -> None:
            for model, row, draw in lane.take_draws():
                asked.setdefault(model, []).append((choice, lane, row, draw))

        for choice, lane in ready:
            if not choice.done:
                guarded({choice.request}, ask, choice, lane)
        for model, asks in asked.items():
            live = [one for one in asks if not one[0].done]  # others failed through a sibling choice
            if live or model in computing:
                guarded({choice.request for choice, _, _, _ in live}, self._draw, model, live, ahead)
        self.step, self._launched_at = step, self._clock()

    def _draw(self, model: Model, asks: Sequence[tuple[Choice, DecodeLane, LazyLogits, Draw]], ahead: bool) -> None:
        drawn = model.compiled.sample([row for _, _, row, _ in asks], [draw for _, _, _, draw in asks])
        self._pending[model] = PendingDraws([(choice, lane) for choice, lane, _, _ in asks], drawn)
        if ahead:
            for i, (_, lane, _, _) in enumerate(asks):
                lane.enter_placeholder(model, i)

    def collect_tokens(self, guarded: Guarded, entered: float) -> float | None:
        """Wait for the tokens, and hand them to their lanes.

        Returns the seconds that the step took: from its beginning, or from the end of the step before if that is
        later. None if that is not known, since the caller paused before it entered the engine at time `entered`.
        """
        step, pendings = self.step, list(self._pending.values())
        began = entered if step is None else step.began
        self.clear()
        for pending in pendings:
            waiting = {choice.request for choice, lane in pending.lanes if _waits(choice, lane)}
            if step is not None and not pending.lanes:  # it waits for prefills alone
                waiting = {chunk.choice.request for chunk in step.chunks if not chunk.choice.done}
            guarded(waiting, pending.read)
        now = self._clock()
        seconds, self._collected_at = now - max(began, self._collected_at), now
        for pending in pendings:
            for (choice, lane), sampled in pending.tokens:  # none if reading them failed
                if sampled.id == NO_TOKEN:
                    lane.model.pool.wipes = True  # the pages of this request must not reach others
                if _waits(choice, lane):
                    guarded({choice.request}, self._take, choice, lane, sampled)
        return seconds if entered - self._launched_at <= PAUSE * seconds else None

    def _take(self, choice: Choice, lane: DecodeLane, sampled: Sampled) -> None:
        if sampled.id == NO_TOKEN:
            raise NotFinite(f"model {lane.model.name}")
        choice.deliver(lane.output, sampled, self._clock(), lane.full)
        lane.sampled(sampled)
        if lane.output is choice.output and not self._placement.next_has_room(lane):
            choice.hold_last_token()


def _waits(choice: Choice, lane: DecodeLane) -> bool:
    """Whether a lane still wants its token: it was not preempted or ended, and no guess before was wrong."""
    return lane in choice.lanes and lane.awaits_token
