"""What an engine has read and said, to guess what comes next: text that occurred before often goes on as it did then.

Saxena 2023 (prompt lookup); Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), who keep a suffix tree. Here a
table says where each few tokens occurred last, and the longest match is found by going back from there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from operator import mul
from typing import NamedTuple
from zlib import crc32

import numpy as np

NGRAM = 3  # tokens that must occur before
CANDIDATES = 4  # earlier places that are compared
MAX_MATCH = 32  # tokens that are compared
SLOTS = 1 << 18  # of the table; a later place takes the slot of an earlier one
FACTORS = (1_000_003, 998_244_353, 1_540_483_477)  # of the numbers of a slot
MAX_TOKENS = 1 << 20  # of all texts: the oldest are forgotten


class Continuation(NamedTuple):
    """What followed the last `match` tokens of a text at an earlier place."""

    match: int
    tokens: Sequence[int]


NOTHING = Continuation(0, ())


class TextHistory:
    """Texts that grow, each in a group: only texts of its own group are found for it."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens, self.num_tokens = max_tokens, 0
        self._texts: OrderedDict[int, Text] = OrderedDict()
        self._numbers = count()
        self._latest = np.full((SLOTS, 2), -1, np.int64)  # of each slot: a text, and the place behind its few tokens

    def begin(self, group: bytes) -> "Text":
        """A new text, empty. `group`: a cache salt."""
        number = next(self._numbers)
        self._texts[number] = text = Text(self, number, group)
        return text

    def of(self, number: int) -> "Text | None":
        """The text of this number; None: there is none, or it is forgotten."""
        return self._texts.get(number)

    def grown(self, number: int, more: int) -> None:
        """Count tokens that a text has got, and forget the oldest texts if there are too many."""
        if number not in self._texts:
            return
        self.num_tokens += more
        while self.num_tokens > self._max_tokens and len(self._texts) > 1:
            self.num_tokens -= len(self._texts.popitem(last=False)[1].ids)

    def latest(self, slot: int) -> tuple[int, int]:
        """(text, place) in a slot."""
        text, place = self._latest[slot].tolist()
        return text, place

    def replace_latest(self, slots: np.ndarray, text: int, places: np.ndarray) -> np.ndarray:
        """Put places of a text into slots. Returns what was there: [n, 2]."""
        before = self._latest[slots]
        self._latest[slots, 0], self._latest[slots, 1] = text, places
        return before


class Text:
    """One text. Its last few tokens are not in the table yet: nothing follows them."""

    def __init__(self, history: TextHistory, number: int, group: bytes) -> None:
        self._history, self.number, self.group = history, number, group
        self._seed = crc32(group)  # so that texts of other groups are not even looked at
        self.ids: list[int] = []
        self._before: list[tuple[int, int]] = []  # of each place in the table: where the same few tokens were before

    def extend(self, ids: Iterable[int]) -> None:
        length = len(self.ids)
        start = max(NGRAM, length)
        self.ids += ids
        self._history.grown(self.number, len(self.ids) - length)
        if len(self.ids) > start:
            known = np.array(self.ids[start - NGRAM : -1], np.int64)
            slots = self._slots(np.lib.stride_tricks.sliding_window_view(known, NGRAM))
            before = self._history.replace_latest(slots, self.number, np.arange(start, len(self.ids)))
            self._before += map(tuple, before.tolist())

    def occurs(self, more: Sequence[int]) -> bool:
        """Whether the last few tokens, with these behind the text, occurred before. This is quick."""
        last = [*self.ids[-NGRAM:], *more[-NGRAM:]][-NGRAM:]
        if len(last) < NGRAM:
            return False
        number, place = self._history.latest(self._slot(last))
        text = self._history.of(number)
        return text is not None and text.group == self.group and text.ids[place - NGRAM : place] == last

    def continuation(self, most: int) -> Continuation:
        """What followed the longest match, of up to CANDIDATES places; of equals the latest."""
        if len(self.ids) < NGRAM:
            return NOTHING
        best, (number, place) = NOTHING, self._history.latest(self._slot(self.ids[-NGRAM:]))
        for _ in range(CANDIDATES):
            text = self._history.of(number)
            if text is None:
                break
            if text.group == self.group and (match := self._match(text, place)) > max(best.match, NGRAM - 1):
                best = Continuation(match, text.ids[place : place + most])
            number, place = text.before(place)
        return best

    def before(self, place: int) -> tuple[int, int]:
        """(text, place) where the few tokens before a place occurred before that, or others of their slot."""
        return self._before[place - NGRAM]

    def _match(self, text: "Text", place: int) -> int:
        """How many of the last tokens stand before a place of a text."""
        match = 0
        for own, other in zip(reversed(self.ids[-MAX_MATCH:]), reversed(text.ids[:place][-MAX_MATCH:]), strict=False):
            if own != other:
                break
            match += 1
        return match

    def _slots(self, ngrams: np.ndarray) -> np.ndarray:
        """The slots of [n, NGRAM] tokens."""
        return ((ngrams * FACTORS).sum(1) + self._seed) % SLOTS

    def _slot(self, ngram: Sequence[int]) -> int:
        return (sum(map(mul, ngram, FACTORS)) + self._seed) % SLOTS
