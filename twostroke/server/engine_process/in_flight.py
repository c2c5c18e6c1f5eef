"""The server's record of each request that its engine's process has, and what becomes of it when the process dies.

A request goes on from the tokens that were delivered. One that computes in a step that ends the process would end the
next one as well. So two deaths in a step of its own, with no token between them, end it. If that is true of several,
one of them goes on at a time, until it has made a token: the next death shows which one it was.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from twostroke.engine.engine_thread import Update
from twostroke.engine.request import Request
from twostroke.errors import EndsEngine
from twostroke.server.engine_process.messages import Begin, RequestFacts, RequestNews

TWICE = "the engine's process died twice while it computed this request, so the request is given up"


@dataclass
class InFlight:
    """A request that is not done."""

    id: int  # what the two processes call it
    request: Request
    owner: Any  # what its updates carry
    deaths: int = 0  # processes that died in a step of it since its last token
    fresh: bool = True  # nothing has come of it from the process that has it
    cancelled: bool = False  # it is to end

    def begin(self) -> Begin:
        """The message that starts it, behind the tokens that it has."""
        request, self.fresh = self.request, True
        return Begin(
            self.id, request.make_program, request.params, request.prompt_tokens, request.seed,
            request.timings.arrival, request.priority, request.name, request.cache_salt, request.first_choice,
            tuple(tuple(choice.output.ids) for choice in request.choices),
        )  # fmt: skip

    def take(self, news: RequestNews) -> Update:
        """Bring the request of this process up to what its engine's has become."""
        request = self.request
        if news.facts is not None:
            self._take_facts(news.facts)
        request.timings.tokens += news.times
        for token in news.tokens:
            output = request.choices[token.choice].output
            output.ids.append(token.id)
            output.finish_reason = token.finish_reason
        if news.tokens:
            self.deaths, self.fresh = 0, False
        return self.ended(news.error, news.tokens) if news.done else Update(request, self.owner, news.tokens, False)

    def ended(self, error: Exception | None, tokens: tuple[Any, ...] = ()) -> Update:
        """The last update."""
        self.request.error = error
        for choice in self.request.choices:
            choice.done = True
        return Update(self.request, self.owner, tokens, True, error)

    def cut_short(self, error: Exception | None) -> Update:
        """The last update of one that ends before its time, since it was cancelled (None) or with an error."""
        self.request.cancelled = error is None
        return self.ended(error)

    def _take_facts(self, facts: RequestFacts) -> None:
        request, times = self.request, self.request.timings
        times.scheduled = times.scheduled or facts.scheduled
        times.finished, times.loading, times.in_bulk = facts.finished, facts.loading, facts.in_bulk
        request.cancelled = facts.cancelled
        request.kv_bytes, request.preemptions = facts.kv_bytes, facts.preemptions
        if not any(choice.output.ids for choice in request.choices) or not request.prefilled_tokens:
            request.prefilled_tokens, request.cached_by_tier = facts.prefilled_tokens, facts.cached_by_tier
        request.prompt_scores = facts.prompt_scores or request.prompt_scores
        request.choices[0].result = facts.result


class Roster:
    """All requests in flight."""

    def __init__(self) -> None:
        self._by_id: dict[int, InFlight] = {}
        self._by_request: dict[Request, InFlight] = {}
        self._held: list[int] = []  # suspects that wait for another to make a token
        self._trial: int | None = None  # the suspect that goes on
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether there is one."""
        return bool(self._by_id)

    def add(self, request: Request, owner: Any) -> InFlight:
        """Record a request."""
        made = InFlight(self._next, request, owner)
        self._next += 1
        self._by_id[made.id] = self._by_request[request] = made
        return made

    def get(self, id: int) -> InFlight | None:
        """The request of this number, unless it is done."""
        return self._by_id.get(id)

    def of(self, request: Request) -> InFlight | None:
        """The record of a request, unless it is done."""
        return self._by_request.get(request)

    def remove(self, one: InFlight) -> None:
        """Forget one that is done."""
        self._by_id.pop(one.id, None)
        self._by_request.pop(one.request, None)
        if one.id in self._held:
            self._held.remove(one.id)

    def is_held(self, one: InFlight) -> bool:
        """Whether it waits for a suspect."""
        return one.id in self._held

    def clear(self) -> list[InFlight]:
        """Forget all, and return them."""
        gone = list(self._by_id.values())
        self._by_id.clear()
        self._by_request.clear()
        self._held.clear()
        return gone

    def after_death(self, accused: Iterable[int]) -> list[tuple[InFlight, Exception | None]]:
        """Those that end now, each with its error, None if it was cancelled.

        `accused`: who was in the last step. If that was over, who may have been about to begin.
        """
        accused = list(accused) or [id for id, one in self._by_id.items() if one.fresh and id not in self._held]
        ended = [(one, None) for one in list(self._by_id.values()) if one.cancelled]
        for one, _ in ended:
            self.remove(one)
        for id in accused:
            if (found := self._by_id.get(id)) is not None:
                found.deaths += 1
        suspects = [one for one in self._by_id.values() if one.deaths > 1 and one.id not in self._held]
        if len(suspects) == 1:
            self.remove(suspects[0])
            return [*ended, (suspects[0], EndsEngine(TWICE))]
        if suspects:
            self._held = [one.id for one in suspects] + self._held
        return list(ended)

    def to_begin(self) -> Iterator[InFlight]:
        """Those that a new process gets at once: all but the suspects, and one of these."""
        self._trial = self._held.pop(0) if self._held else None
        yield from [one for one in self._by_id.values() if one.id not in self._held]

    def released(self) -> InFlight | None:
        """The next suspect, once the one that went on has made a token or is done."""
        if self._trial is None or ((one := self._by_id.get(self._trial)) is not None and one.deaths):
            return None
        while self._held:
            self._trial = self._held.pop(0)
            if (one := self._by_id.get(self._trial)) is not None:
                return one
        self._trial = None
        return None
