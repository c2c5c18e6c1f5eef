"""A request and its choices: running programs and their results so far."""

import hashlib
import itertools
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from twostroke.engine.choice_state import NEW, Shortage
from twostroke.engine.decode_lane import DecodeRecord
from twostroke.engine.draft_guesses import DraftGuesses
from twostroke.engine.lane import Lane
from twostroke.engine.output import ChoiceOutput, Token
from twostroke.engine.pending import PENDING, PendingFuture, Raised
from twostroke.engine.strokes import Decode, Program, close_program
from twostroke.engine.timings import Timings
from twostroke.errors import InvalidRequest
from twostroke.kv.pool import PagePool
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.scores import TokenScore

arrival_numbers = itertools.count()
PRIORITY_S = 10.0  # seconds that each unit of priority adds to the arrival time


class Choice:
    """One of a request's n answers: a program, the strokes it waits for, and its tokens.

    A preempted choice drops its program and all values. Started again, the program yields the same strokes, and each
    decode enters the tokens in `records` instead of sampling.
    """

    def __init__(self, request: "Request", index: int) -> None:
        # Weak: a reference cycle would keep a finished request's pages until the garbage collector runs.
        self._request = weakref.ref(request)
        self.index = index
        self.output = ChoiceOutput(request.params, request.tokenizer, index)
        self.program: Program | None = None
        self.lanes: list[Lane] = []
        self.futures: list[PendingFuture] = []
        self.results: list[Any] = []
        self.side_by_side = False
        self.records: list[DecodeRecord] = []
        self.num_decodes = self.num_emits = self.emits_done = self.num_guesses = 0
        self.guesses: DraftGuesses | None = None  # since its program has asked for some
        self.given: Sequence[int] = ()  # its first tokens, which another engine has made and delivered
        self.spares = False  # whether it does without guesses and prefix hits (`spare_pages`)
        self.held_token: Token | None = None  # the last token, while it is not certain that another can follow it
        self.sharing: dict[int, SharedPrefill] = {}  # by slot: prefills that siblings wait for or may take
        self.state = NEW  # changed by `Queues.move` alone
        self.reserved: dict[PagePool, int] = {}  # pages of each pool that it needs to start again, since a preemption
        self.shortage: Shortage | None = None
        self.result: Any = None
        self.done = False

    @property
    def request(self) -> "Request":
        request = self._request()
        assert request is not None, "the engine keeps a request until it is done"
        return request

    @property
    def request_if_kept(self) -> "Request | None":
        """The request; None if it is done and nobody wants it any more."""
        return self._request()

    @property
    def arriving(self) -> bool:
        """Whether all of its strokes wait for pages from other tiers, or for other threads."""
        waits = bool(self.lanes or self.futures)
        return waits and all(lane.missing is not None for lane in self.lanes)

    @property
    def resumable(self) -> bool:
        """Whether all results that the program waits for are there."""
        for result in self.results:
            if result is PENDING:
                return False
        return bool(self.results)

    @property
    def has_news(self) -> bool:
        """Whether a stroke has ended, or all results are there. Asked for at every step, so it is plain loops."""
        for lane in self.lanes:
            if lane.result is not None:
                return True
        return self.resumable

    def take_results(self) -> Any:
        """The results to send to the program, or the first `Raised` among them; clears them."""
        results, self.results = self.results, []
        for result in results:
            if isinstance(result, Raised):
                return result
        return results if self.side_by_side else results[0]

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key: first come, first served; the youngest is preempted first.

        A priority shifts the arrival time, so nothing starves: a request that has waited longer than `PRIORITY_S` per
        unit of difference comes before new requests.
        """
        request = self.request
        return request.timings.arrival + PRIORITY_S * request.priority, request.arrival_order, self.index

    def seed(self, stream: int) -> bytes:
        """Seed of a random stream: depends only on the request's seed, the choice's index and the stream."""
        text = f"{self.request.seed} {self.request.first_choice + self.index} {stream}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def next_record(self) -> DecodeRecord:
        """The record of the decode stroke that the program yields now."""
        self.num_decodes += 1
        if self.num_decodes > len(self.records):
            self.records.append(DecodeRecord())
        return self.records[self.num_decodes - 1]

    def replay_given(self, stroke: Decode, record: DecodeRecord) -> None:
        """Let a decode enter the given tokens, as after a preemption.

        A stroke that guesses, or that tells the program more than ids, samples them again (`_was_given`).
        """
        if record.sampled or stroke.guesses or stroke.until is not None or stroke.stats or stroke.keep_logits:
            return
        for id in self.given[len(self.output.ids) :][: stroke.max_tokens]:
            record.sampled.append(Sampled(id))
            self.output.push(record.sampled[-1])
        ended = self.output.finish_reason is not None or len(record.sampled) == stroke.max_tokens
        if record.sampled and ended:
            record.complete, record.finish_reason = True, self.output.finish_reason

    def spare_pages(self) -> bool:
        """Let its program start again without guesses and prefix hits; the caller preempts it.

        A draft's values take pages. So do entries kept behind a window for wrong guesses, and pages of a hit that the
        program's own values have too. They must not be why an answer ends: it has the length that it has alone, cold.
        Returns False for a choice without any of these, or one that has begun again already, and for strokes side by
        side, of which the first to go on would take the pages of the others.
        """
        request = self.request
        drafts, lookups = self.guesses is not None, any(record.lookup is not None for record in self.records)
        if not (drafts or lookups or self.given or request.preemptions or request.cached_by_tier):
            return False
        if self.spares or (self.side_by_side and len(self.results) > 1):
            return False
        self.spares = True
        if self.guesses is not None and not self.emits_done:
            self.guesses.given_up, self.guesses.told = True, []
            self.given, self.records = tuple(self.output.ids), []
            self.output = ChoiceOutput(request.params, request.tokenizer, self.index)
        return True

    def _was_given(self, token: Token) -> bool:
        """Whether a token is one of the given, sampled again. Raises InvalidRequest if it is another."""
        if token.index >= len(self.given):
            return False
        if token.id != self.given[token.index]:
            raise InvalidRequest(
                f"the answer cannot be continued here: token {token.index} is {token.id}, and was "
                f"{self.given[token.index]}: give every worker the same model, and processors of one kind"
            )
        return True

    def release(self) -> None:
        """Drop the program and every value and page it holds."""
        for lane in self.lanes:
            lane.close()
        self.sharing.clear()
        for pending in self.futures:
            pending.future.cancel()
        self.lanes, self.futures, self.results = [], [], []
        program, self.program = self.program, None
        if program is not None:
            close_program(program)

    def hold_last_token(self) -> None:
        """Keep the last token back if the caller has not taken it, until it is known whether another follows.

        The caller learns from a token whether it is the last.
        """
        events = self.request.events
        if events and events[-1].choice == self.index and self.output.finish_reason is None:
            self.held_token = events.pop()

    def deliver(self, output: ChoiceOutput, sampled: Sampled, made_at: float, full: bool = False) -> None:
        """Add a token to an output. If it is the choice's own, also hand the token to the caller.

        Args:
            output: the choice's own output, or one of tokens that are not emitted yet.
            sampled: the token.
            made_at: when it was made, in seconds of the engine's clock.
            full: whether the context has no room for another.
        """
        token = output.push(sampled, full)
        if output is not self.output or self._was_given(token):
            return
        request = self.request
        if self.index == 0:
            request.timings.tokens.append(made_at)
        self.shortage = None
        if self.held_token is not None:
            self.release_held_token()
        request.events.append(token)

    def release_held_token(self) -> None:
        """Hand over the token that was kept back."""
        if self.held_token is not None:
            self.request.events.append(self.held_token)
            self.held_token = None

    def finish_with_length(self) -> bool:
        """End with "length" at the last token. Returns False if there is none, or if the caller has taken it."""
        if self.output.finish_reason is not None:
            return True
        self.release_held_token()
        events = self.request.events
        for i in range(len(events) - 1, -1, -1):
            if events[i].choice == self.index:
                events[i] = replace(
                    events[i], text=events[i].text + self.output.end_with_length(), finish_reason="length"
                )
                return True
        return False

    def finish(self, result: Any) -> None:
        """Mark as done with the program's return value, and release everything."""
        self.release_held_token()
        self.result, self.done = result, True
        self.release()


class Request:
    """A caller's request.

    Attributes:
        make_program: starts a choice's program; called again after a preemption.
        prompt: token ids that its first prefill begins with, as far as who made it knows them.
        name: what its caller calls it; "" without a name.
        priority: lower is served sooner; the default is 0. Set it before the request is submitted.
        cache_salt: the prefix index shares its entries with requests of the same salt alone; b"" is everybody's. Set it
            before the request is submitted.
        first_choice: of another request's choices, the one whose random numbers the first choice has. Set it before the
            request is submitted.
        result: the return value of the first choice's program.
        prefilled_tokens: total tokens of its prefills; a repeated prompt counts each time.
        cached_by_tier: number of these that were found, by where: "pool", "host", "disk", "remote".
        prompt_scores: log-probabilities of the prompt's tokens, if the program computes them; None before.
        kv_bytes: bytes of K and V in the value of the first choice's last stroke.
    """

    def __init__(
        self, make_program: Callable[[], Program], params: SamplingParams, tokenizer: Tokenizer, prompt_tokens: int = 0
    ) -> None:
        self.make_program, self.params, self.tokenizer = make_program, params, tokenizer
        self.prompt_tokens = prompt_tokens
        self.prompt: Sequence[int] = ()
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.arrival_order = next(arrival_numbers)
        self.priority, self.name, self.cache_salt = 0, "", b""
        self.first_choice = 0
        self.timings = Timings()
        self.events: deque[Token] = deque()  # tokens in the order in which they were made, for the caller to take
        self.error: Exception | None = None  # the error that made the request fail, or None
        self.cancelled = False
        self.prompt_scores: tuple[TokenScore | None, ...] | None = None
        self.prefilled_tokens = self.kv_bytes = 0
        self.cached_by_tier: Counter[str] = Counter()
        self.preemptions = 0
        self.choices = [Choice(self, i) for i in range(params.n)]
        self.shared_prefills: dict[Any, SharedPrefill] = {}

    def take_over(self, *answers: Sequence[int]) -> None:
        """Begin behind tokens of the answers, one for each choice, that another engine has made and delivered.

        The program begins at its start. Its decodes enter the tokens where that is enough, else sample them again. The
        next token has the noise, the penalties and the constraint of its place in the whole answer. Raises
        InvalidRequest for another number of choices, or for a request that was submitted.
        """
        if len(answers) != len(self.choices) or any(choice.output.ids for choice in self.choices):
            raise InvalidRequest("only a request that is not submitted yet can take over answers, one for each choice")
        for choice, answer in zip(self.choices, answers, strict=True):
            choice.given = tuple(answer)

    @property
    def done(self) -> bool:
        return all(choice.done for choice in self.choices)

    @property
    def is_garbage(self) -> bool:
        """Whether the garbage collector is freeing it. If it is not done, its engine is freed with it."""
        return self.choices[0].request_if_kept is None

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of its prefills that were found and not computed."""
        return self.cached_by_tier.total()

    @property
    def result(self) -> Any:
        return self.choices[0].result

    def raise_error(self) -> None:
        """Raise the request's error, if any; only once."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # no reference cycle through the traceback: it would keep pages until the garbage collector runs


@dataclass
class SharedPrefill:
    """A prefill that several choices of a request need: computed once, its pages shared.

    `takers` counts the choices that have not asked yet; the last one removes it from
    `Request.shared_prefills`.
    """

    takers: int
    value: Any = PENDING
    waiting: list[tuple[Choice, int]] = field(default_factory=list)

    def publish(self, value: Any) -> None:
        self.value = value
        for choice, slot in self.waiting:
            choice.results[slot] = value
        self.waiting = []
