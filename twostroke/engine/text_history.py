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


class TextPlace(NamedTuple):
    """An earlier place of a text's last `match` tokens: before `start` of a text that goes on there."""

    match: int
    text: "Text"
    start: int

    @property
    def next_token(self) -> int:
        return self.text.ids[self.start]

    def tokens(self, most: int) -> Sequence[int]:
        """What followed there, at most so many tokens."""
        return self.text.ids[self.start : self.start + most]

    def moved(self) -> "TextPlace | None":
        """The place behind its next token; None: the text ends there."""
        return TextPlace(self.match + 1, self.text, self.start + 1) if self.start + 1 < len(self.text.ids) else None


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

    def replace(self, slot: int, text: int, place: int) -> tuple[int, int]:
        """Put a place of a text into a slot. Returns what was there."""
        before = self.latest(slot)
        self._latest[slot] = text, place
        return before

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

    def add(self, token: int) -> None:
        """`extend` by one token, quicker."""
        ids = self.ids
        if (length := len(ids)) >= NGRAM:
            self._before.append(self._history.replace(self._slot(ids[-NGRAM:]), self.number, length))
        ids.append(token)
        self._history.grown(self.number, 1)

    def find(self) -> TextPlace | None:
        """Where the longest match ends, of up to CANDIDATES places; of equals the latest."""
        if len(self.ids) < NGRAM:
            return None
        best: TextPlace | None = None
        number, index = self._history.latest(self._slot(self.ids[-NGRAM:]))
        for _ in range(CANDIDATES):
            text = self._history.of(number)
            if text is None:
                break
            if text.group == self.group:
                match = self._match(text, index)
                if match > (NGRAM - 1 if best is None else best.match):
                    best = TextPlace(match, text, index)
            number, index = text.before(index)
        return best

    def before(self, place: int) -> tuple[int, int]:
        """(text, place) where the few tokens before a place occurred before that, or others of their slot."""
        return self._before[place - NGRAM]

    def _match(self, text: "Text", place: int) -> int:
        """How many of the last tokens stand before a place of a text."""
        match = 0
        before = text.ids[max(0, place - MAX_MATCH) : place]
        for own, other in zip(reversed(self.ids[-MAX_MATCH:]), reversed(before), strict=False):
            if own != other:
                break
            match += 1
        return match

    def _slots(self, ngrams: np.ndarray) -> np.ndarray:
        """The slots of [n, NGRAM] tokens."""
        return ((ngrams * FACTORS).sum(1) + self._seed) % SLOTS

    def _slot(self, ngram: Sequence[int]) -> int:
        return (sum(map(mul, ngram, FACTORS)) + self._seed) % SLOTS
