"""Decides how many guesses of the next tokens pay, so that speculation is never slower than plain decoding.

A guess costs a row of a step, which all sequences of the step wait for, and perhaps a step of a draft. It yields a
token if it and those before it are right. So some number of guesses is expected to be quickest, which may be none: in a
full batch a row costs nearly a token's time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import log, log1p
from operator import itemgetter
from typing import TypeVar

from twostroke.engine.acceptance import FORGET_OWN, AcceptanceByKind
from twostroke.engine.draft_guesses import MAX_WAIT, DraftGuesses
from twostroke.engine.guess_prices import GuessPrices
from twostroke.engine.lookup import LookupGuesses
from twostroke.engine.lookup_lane import LookupLane
from twostroke.engine.model import Model
from twostroke.engine.page_budget import PageBudget
from twostroke.engine.request import Choice
from twostroke.engine.step import Chunk
from twostroke.engine.strokes import Guess, Guesses, Lookup
from twostroke.engine.text_history import TextHistory

Key = TypeVar("Key", bound=Hashable)

ROUND_S = 2e-4  # of the program and the engine, for a round of a draft
MARGIN = 1.02  # by which guesses must be expected to be quicker
TRY_SHARE = 0.015  # of the time in which choices with a draft decode, for guesses of which nothing is expected
FIRST_TRY_S = 1.0  # for the first such guess: nothing is known of a draft then
MAX_SALTS = 4096  # of which it is known how lookups fared


class GuessJudge:
    """One for an engine: what all choices have read and said, and how guesses of each kind fared.

    Attributes:
        asked: whether any program has asked for guesses. Steps of others need no judge.
    """

    def __init__(
        self,
        prices: GuessPrices,
        budget: PageBudget,
        decoding: Callable[[], int],  # how many sequences decode now
        try_seconds: float = FIRST_TRY_S,  # that a first try may cost
    ) -> None:
        self._prices, self._budget, self._decoding = prices, budget, decoding
        self._history = TextHistory()
        self._lookups, self._drafts = AcceptanceByKind(), AcceptanceByKind(forget=FORGET_OWN)  # a bad draft is dear
        self._lookups_of: dict[bytes, AcceptanceByKind] = {}  # by salt
        self._seconds = 0.0  # of all steps
        self._try_seconds = try_seconds  # that a draft's guess may cost which is not expected to pay
        self.asked = False

    # Lookups, of a whole step ---------------------------------------------------------------------------------------

    def lookup(self, asked: Lookup, salt: bytes) -> LookupGuesses:
        """Guesses for a decode; `salt`: of its request."""
        self.asked = True
        if salt not in self._lookups_of and len(self._lookups_of) >= MAX_SALTS:
            self._lookups_of.clear()
        of_salt = self._lookups_of.setdefault(salt, AcceptanceByKind(self._lookups))
        return LookupGuesses(asked, self._history.begin(salt), of_salt)

    def guess(self, running: Iterable[Choice]) -> None:
        """Let lanes guess as many tokens in the next step as pay together."""
        offers: defaultdict[Model, dict[LookupLane, Sequence[int]]] = defaultdict(dict)
        decoding: defaultdict[Model, int] = defaultdict(int)
        for choice in running:
            for lane in choice.lanes:
                if lane.decoding:
                    decoding[lane.model] += 1
                    if isinstance(lane, LookupLane) and (guesses := lane.offered_guesses()):
                        offers[lane.model][lane] = guesses
        for model, lanes in offers.items():
            self._guess(model, lanes, decoding[model])

    def _guess(self, model: Model, offers: Mapping[LookupLane, Sequence[int]], sequences: int) -> None:
        counts = Counter({lane: len(guesses) for lane, guesses in offers.items() if not lane.lookup.asked.judged})
        judged = {lane: lane.lookup.chances(len(offers[lane])) for lane in offers if lane not in counts}
        if judged:
            counts |= self.counts(model, judged, sequences, max(len(lane.writer) for lane in judged))
        # Nobody gives up a page for a guess: there must be room for what all lanes enter.
        wanted = sum(self._budget.pages_for(model.pool, 1 + count) for count in counts.values())
        if counts and self._budget.could_hold(model.pool, wanted + sequences * model.pool.pages_to_go_on):
            for lane, count in counts.items():
                lane.guess(offers[lane][:count])

    def counts(
        self, model: Model, chances: Mapping[Key, Sequence[float]], sequences: int, context: int
    ) -> Counter[Key]:
        """The number of guesses of each with which, together, sequences are expected to be quickest.

        A guess makes its own sequence quicker and all of the step slower. What is greatest is the product of all
        speeds, so that a few do not gain at the cost of the others (proportional fairness, Kelly 1997).

        Args:
            model: that of the step.
            chances: of each one's guesses to stand, none greater than that before it.
            sequences: how many make a token in the step, with or without guesses.
            context: entries before them.
        """
        gains: list[tuple[float, Key]] = []
        for key, some in chances.items():
            tokens = 1.0
            for chance in some:
                gains.append((log1p(chance / tokens), key))
                tokens += chance
        gains.sort(key=itemgetter(0), reverse=True)
        seconds = self._prices.of_step(model, sequences, context)
        plain, most = log(seconds(0) / MARGIN), len(gains)
        best, found, gained = 0.0, 0, 0.0
        for count, (gain, _) in enumerate(gains, 1):
            gained += gain
            if count > 8 and count % (count // 16 * 4 or 4) and count < most:  # a look takes time too
                continue
            lost = sequences * (log(seconds(count)) - plain)
            if gained - lost > best:
                best, found = gained - lost, count
        return Counter(key for _, key in gains[:found])

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step of these chunks took so long. Only steps in which each row makes a token are like those judged."""
        self._seconds += seconds
        models = {chunk.lane.model for chunk in chunks} if self.asked else ()
        if len(models) == 1 and all(len(chunk.tokens) == chunk.logit_rows for chunk in chunks):
            guesses = sum(chunk.logit_rows for chunk in chunks) - len(chunks)
            context = max(int(chunk.slot_mapping.positions[0]) for chunk in chunks)
            self._prices.observe(chunks[0].lane.model, len(chunks), guesses, context, seconds)

    # Drafts, of one sequence ----------------------------------------------------------------------------------------

    def begin(self, prompt_tokens: int, max_tokens: int | None, salt: bytes) -> DraftGuesses:
        """For a choice: `max_tokens` is the most that its answer may have, `salt` that of its request."""
        self.asked = True
        return DraftGuesses(self._drafts, prompt_tokens, max_tokens, salt, self._seconds)

    def advise(self, asks: Guess, choice: DraftGuesses, made: int, model: Model, draft: Model) -> Guesses:
        """How many guesses of a draft pay now; `made`: tokens of the answer so far."""
        choice.learn(asks)
        self._try_seconds += TRY_SHARE * (self._seconds - choice.asked_at) / self._decoding()
        choice.asked_at = self._seconds
        if choice.given_up:
            return Guesses(0)
        count = self._count(asks, choice, made, model, draft) if asks.judged else asks.most
        told = Guesses(count) if count else Guesses(0, max_tokens=choice.longer_wait())
        choice.told.append(told)
        return told

    def _count(self, asks: Guess, choice: DraftGuesses, made: int, model: Model, draft: Model) -> int:
        """The number of guesses of which the product of all speeds is expected to be greatest; 0: none pays.

        What the draft must read first is paid by all tokens that are still to come.
        """
        most, rate, context = min(asks.most, choice.left(made) - 1), choice.rate(asks), choice.prompt_tokens + made
        if most < 1:
            return 0
        sequences = self._decoding()
        judging, drafting = self._prices.of_step(model, sequences, context), self._prices.seconds(draft, 1, 0, context)
        plain = judging(0) * MARGIN ** (-1 / sequences)

        def best(rate: float, reading: float) -> int:
            """`reading`: its seconds for each token that is still to come."""
            gain, found, share, tokens = 0.0, 0, 1.0, 1.0
            for count in range(1, most + 1):
                share *= rate
                tokens += share
                seconds = ROUND_S + judging(count) + count * drafting + reading * tokens
                gained = log(tokens) - sequences * log(seconds / plain)
                if gained > gain:
                    gain, found = gained, count
                elif found or count > 4:  # a row may be dear where instructions for more rows begin
                    break
            return found

        if not best(1.0, 0.0):  # right guesses that need no reading would not pay either
            choice.wait = MAX_WAIT
            return 0
        reading = max(0.0, self._reading(asks, choice.salt, context, draft) - drafting)
        if found := best(rate, reading / choice.rest(made)):
            self._try_seconds = 0.0  # saved while guesses pay, it would be spent at once when they do not
            return found
        return self._try(ROUND_S + judging(1) - judging(0) + drafting + reading)

    def _reading(self, asks: Guess, salt: bytes, context: int, draft: Model) -> float:
        """Expected seconds until a draft has read what it has not."""
        unread = len(asks.unread)
        known = max(0, context - unread)
        if not known and draft.index is not None:  # nothing was read for this answer, but perhaps for another
            known = len(draft.index.match(asks.unread[:-1], salt))
            unread -= known
        return self._prices.reading(draft, known, unread) if unread > 1 else 0.0

    def _try(self, seconds: float) -> int:
        """A guess that is not expected to pay, now and then: guesses may have become good. It costs so many seconds."""
        if seconds > self._try_seconds:
            return 0
        self._try_seconds = 0.0
        return 1
