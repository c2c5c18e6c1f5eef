"""Chats that outgrow the context: which of the oldest turns go, and how much of each passage stays."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from twostroke.models.checkpoints.tokenizer import Tokenizer

SYSTEM_ROLES = ("system", "developer")
PASSAGE_ROLES = ("user", "tool")  # roles whose texts may have passages


@dataclass(frozen=True)
class LeftOut:
    """The parts of a chat that its prompt leaves out."""

    # messages, tokens: number of oldest messages left out, and of tokens that the prompt is shorter by
    messages: int = 0
    tokens: int = 0
    entries: int = 0  # number of KV entries that were dropped between the first ones and the last
    # passages, passage_tokens: number of passages that were cut short, and of tokens cut
    passages: int = 0
    passage_tokens: int = 0

    def __bool__(self) -> bool:
        return bool(self.messages or self.entries or self.passages)

    @property
    def text(self) -> str:
        """A line for the user; empty if nothing was left out."""
        parts: list[str] = []
        if self.messages:
            parts.append(f"the {_count(self.messages, 'oldest message')} ({self.tokens:,} tokens) left out")
        if self.entries:
            parts.append(f"{self.entries:,} KV entries after the first ones dropped")
        if self.passages:
            parts.append(f"{_count(self.passages, 'passage')} cut by {self.passage_tokens:,} tokens")
        return ", ".join(parts)


def drop_oldest(roles: Sequence[str], fits: Callable[[range], bool]) -> range:
    """The range of messages after the first system message that stay: as many turns as fit, and always the last.

    Args:
        roles: the role of each message.
        fits: says whether the system message and these messages fit. What fits with a turn fits without it too.
    """
    begun = int(roles[0] in SYSTEM_ROLES)
    starts = [begun, *(i for i, role in enumerate(roles) if role == "user" and i > begun)]
    found = bisect_left(starts[:-1], True, key=lambda start: fits(range(start, len(roles))))
    return range(starts[found], len(roles))


def cut_passages(
    messages: Sequence[Mapping[str, Any]], budget: int, tokenizer: Tokenizer
) -> tuple[list[dict[str, Any]], LeftOut]:
    """Cut passages to their first tokens, all to the same number, so that together they take at most `budget`.

    Passages are parts between blank lines of what users and tools say. The last part of each of a user's messages is
    the question and stays whole. No word is cut in two, so a passage may be shorter than its share.
    """
    parts = [re.split(r"(\n\s*\n)", str(one.get("content") or "")) for one in messages]  # texts at even places
    places = [
        (index, place)
        for index, one in enumerate(messages)
        if one.get("role") in PASSAGE_ROLES
        for place in range(0, len(parts[index]) - (2 if one["role"] == "user" else 0), 2)
        if parts[index][place].strip()
    ]
    ids = {where: tokenizer.encode(parts[where[0]][where[1]], add_bos=False) for where in places}
    limit = _max_passage_tokens([len(tokens) for tokens in ids.values()], budget)
    cut = {where: tokens for where, tokens in ids.items() if len(tokens) > limit}
    for (index, place), tokens in cut.items():
        whole = parts[index][place]
        parts[index][place] = _cut_at_word(tokenizer.decode(tokens[:limit]), whole)
    made = [
        {**one, "content": "".join(parts[index])} if any(index == where[0] for where in cut) else dict(one)
        for index, one in enumerate(messages)
    ]
    return made, LeftOut(passages=len(cut), passage_tokens=sum(len(tokens) - limit for tokens in cut.values()))


def _max_passage_tokens(lengths: Sequence[int], budget: int) -> int:
    """The largest number of tokens a passage with which all of them, as far as they have so many, take `budget`."""
    left, share = budget, 0
    for (shorter, length), waiting in zip(pairwise([0, *sorted(lengths)]), range(len(lengths), 0, -1), strict=True):
        step = min(length - shorter, left // waiting)
        share, left = share + step, left - step * waiting
        if step < length - shorter:
            break
    return share


def _cut_at_word(text: str, whole: str) -> str:
    """Return `text`, which begins `whole`, without a word that was cut in two."""
    text = text.rstrip("\ufffd")  # half of a character
    if not whole.startswith(text) or whole[len(text) :][:1].isspace():
        return text.rstrip()
    return text[: len(text) - len(re.split(r"\s", text)[-1])].rstrip()


def _count(count: int, noun: str) -> str:
    return noun if count == 1 else f"{count:,} {noun}s"
