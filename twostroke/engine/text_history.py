"""What an engine has read and said, to guess what comes next: text that occurred before often goes on as it did then.

Saxena 2023 (prompt lookup); Oliaro et al. 2024, "SuffixDecoding" (arXiv:2411.04975), who keep a suffix tree. Here a
table says where each few tokens occurred last, and the longest match is found by going back from there.
"""

from array import array
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
PLACE_BITS = 32  # of a mark, which is a text's number and a place in it; -1: none
PLACES = (1 << PLACE_BITS) - 1


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
        self._latest = array("q", [-1]) * SLOTS  # of each slot: the mark behind its few tokens
        self._latest_view = np.frombuffer(self._latest, np.int64)

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

    def latest(self, slot: int) -> int:
        """The mark in a slot."""
        return self._latest[slot]

    def replace(self, slot: int, mark: int) -> int:
        """Put a mark into a slot. Returns what was there."""
        before = self._latest[slot]
        self._latest[slot] = mark
        return before

    def replace_latest(self, slots: np.ndarray, marks: np.ndarray) -> np.ndarray:
        """Put marks into slots. Returns what was there: [n]."""
        before = self._latest_view[slots]
        self._latest_view[slots] = marks
        return before


class Text:
    """One text. Its last few tokens are not in the table yet: nothing follows them."""

    def __init__(self, history: TextHistory, number: int, group: bytes) -> None:
        self._history, self.number, self.group = history, number, group
        self._seed = crc32(group)  # so that texts of other groups are not even looked at
        self.ids: list[int] = []
        self._marks = number << PLACE_BITS
        self._before = array("q")  # of each place in the table: the mark where the same few tokens were before
        self._slot_of_last: int | None = None  # of its last few tokens, if it is known

    def extend(self, ids: Iterable[int]) -> None:
        length = len(self.ids)
        start = max(NGRAM, length)
        self.ids += ids
        self._slot_of_last = None
        self._history.grown(self.number, len(self.ids) - length)
        if len(self.ids) > start:
            known = np.array(self.ids[start - NGRAM : -1], np.int64)
            slots = self._slots(np.lib.stride_tricks.sliding_window_view(known, NGRAM))
            before = self._history.replace_latest(slots, self._marks + np.arange(start, len(self.ids)))
            self._before.frombytes(before.tobytes())

    def add(self, token: int) -> None:
        """`extend` by one token, quicker."""
        ids = self.ids
        if (length := len(ids)) >= NGRAM:
            self._before.append(self._history.replace(self._slot(), self._marks + length))
        ids.append(token)
        self._slot_of_last = None
        self._history.grown(self.number, 1)

    def find(self) -> TextPlace | None:
        """Where the longest match ends, of up to CANDIDATES places; of equals the latest."""
        if len(self.ids) < NGRAM:
            return None
        best: TextPlace | None = None
        mark = self._history.latest(self._slot())
        for _ in range(CANDIDATES):
            text, place = self._history.of(mark >> PLACE_BITS), mark & PLACES
            if text is None:
                break
            if text.group == self.group:
                match = self._match(text.ids, place)
                if match > (NGRAM - 1 if best is None else best.match):
                    best = TextPlace(match, text, place)
            mark = text.before(place)
        return best

    def before(self, place: int) -> int:
        """The mark where the few tokens before a place occurred before that, or others of their slot."""
        return self._before[place - NGRAM]

    def _match(self, other: Sequence[int], place: int) -> int:
        """How many of the last tokens stand before a place of a text."""
        own, match = self.ids, 0
        most = min(MAX_MATCH, place, len(own))
        while match < most and own[-1 - match] == other[place - 1 - match]:
            match += 1
        return match

    def _slots(self, ngrams: np.ndarray) -> np.ndarray:
        """The slots of [n, NGRAM] tokens."""
        return ((ngrams * FACTORS).sum(1) + self._seed) % SLOTS

    def _slot(self) -> int:
        """The slot of its last few tokens."""
        if self._slot_of_last is None:
            self._slot_of_last = (sum(map(mul, self.ids[-NGRAM:], FACTORS)) + self._seed) % SLOTS
        return self._slot_of_last
