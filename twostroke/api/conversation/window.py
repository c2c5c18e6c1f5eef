"""Chats in a window of their KV: which entries stay when a turn has no room for all.

It is decided from counts of tokens alone. So a conversation that holds its KV, and a server that computes the same KV
anew for each request, keep the same entries. Where a turn has no room, the first entries stay (the system message's,
and attention sinks), and as many of the last as fill a part of the context (StreamingLLM, Xiao et al. 2023,
arXiv:2309.17453, here at the positions that entries have).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from twostroke.api.conversation.fitting import SYSTEM_ROLES, drop_oldest
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.sampling.params import SamplingParams

# Of the context, how much a prompt takes after something was dropped, so that not every turn drops again.
KEPT_FRACTION = 0.75
Messages = Sequence[Any]


@dataclass(frozen=True)
class Extent:
    """The positions of a value's entries: [0, head) and [tail, end). Without a gap, head and tail are 0."""

    head: int
    tail: int
    end: int

    @classmethod
    def of(cls, kv: KVCache) -> "Extent":
        """The extent of a value whose positions have one gap at most."""
        positions, end = kv.positions, kv.next_position
        first = common_prefix_length(positions, range(end))
        return cls(0, 0, end) if first == end else cls(first, end - (len(positions) - first), end)

    def __len__(self) -> int:
        return self.head + self.end - self.tail

    def window(self, first: int, new: int, limit: int) -> "Extent | None":
        """The entries to keep so that there are `limit` after `new` more; None if that is no window."""
        since = self.end + new - (limit - first)
        return Extent(first, since, self.end) if max(first, self.tail) < since < self.end else None

    def cut(self, kv: KVCache) -> KVCache:
        """Cut these entries out of a value that has all of them and ends with them."""
        return (kv[: self.head] + kv[len(kv) - (self.end - self.tail) :]).with_tail(kv.tail)


@dataclass(frozen=True)
class ContextRoom:
    """The limits that a chat has to fit into."""

    # pages, page_size: number of pages of the pool, and of entries of a page
    pages: int
    page_size: int
    positions: int  # number of positions of the model
    reply: int  # number of tokens that are kept for the reply

    @classmethod
    def of(cls, llm: LLM, max_tokens: int | None) -> "ContextRoom":
        reply = min(max_tokens or 1, llm.max_model_len // 4)
        return cls(llm.pool.num_pages, llm.pool.page_size, llm.model.max_position, reply)

    @property
    def target_tokens(self) -> int:
        """Number of tokens that a prompt is cut down to once something has to go."""
        return int(KEPT_FRACTION * (min(self.positions, self.pages * self.page_size) - self.reply))

    def fits(self, extent: Extent, new: int) -> bool:
        """Whether `new` tokens and a reply fit behind these entries. Entries lie in pages at their positions' places,
        and a page that is cut or shared may have to be copied."""
        end, size = extent.end + new + self.reply, self.page_size
        pages = -(-extent.head // size) + -(-end // size) - extent.tail // size
        return pages + 1 <= self.pages and end <= self.positions


@dataclass(frozen=True)
class WindowPlan:
    """The strokes and cuts that bring the KV of a chat into a window, turn by turn."""

    messages: Messages  # the messages that are left where positions had ended
    parts: tuple[Sequence[int], ...]  # tokens, entered one part after the other
    cuts: tuple[Extent, ...]  # the entries that stay before each part but the first
    extent: Extent  # the extent of the whole prompt, at the end
    whole: int  # number of tokens of all messages, with those that were dropped

    def request(self, llm: LLM, params: SamplingParams) -> Request:
        """The request that answers the chat. Raises InvalidRequest."""
        params.check_vocabulary(llm.config.vocab_size)

        program = partial(_window_program, self.parts, self.cuts)
        return Request(program, params, llm.tokenizer, sum(map(len, self.parts)))


def _window_program(parts: Sequence[Sequence[int]], cuts: Sequence[Extent]) -> Program:
    kv: KVCache | None = None
    for number, part in enumerate(parts):
        if kv is not None:
            kv = cuts[number - 1].cut(kv)
        kv = yield Prefill(part, after=kv, logits="last" if number == len(parts) - 1 else "none")
    assert kv is not None
    yield Decode(kv)


def plan_window(
    messages: Messages,  # all messages, each with a `role`
    encode: Callable[[Messages], ChatTokens],  # renders messages as the prompt that ends with the beginning of a reply
    room: ContextRoom,  # the limits of every turn
    sinks: int,  # first entries that stay, if the system message does not have as many
    system: Callable[[], int],  # counts the tokens of the system message alone
) -> WindowPlan | None:
    """Plan a chat as if each of its turns had been taken with a window; None if a turn has no room even alone."""
    whole, from_turn = len(encode(messages)), 0
    first = max(sinks, system() if _role(messages[0]) in SYSTEM_ROLES else 0)
    while True:
        tokens = encode(messages)
        found = _replay_turns(messages, tokens, room, first, from_turn)
        if not isinstance(found, int):
            return replace(found, whole=whole)
        begun = messages[: int(_role(messages[0]) in SYSTEM_ROLES)]
        so_far = messages[: found + 1]
        roles = [_role(one) for one in so_far]
        stay = drop_oldest(roles, lambda stay: len(encode([*begun, *so_far[stay.start :]])) <= room.target_tokens)  # noqa: B023
        gone = stay.start - len(begun)
        if not gone:
            return None
        messages, from_turn = [*begun, *messages[stay.start :]], found - gone


def _replay_turns(
    messages: Messages, tokens: ChatTokens, room: ContextRoom, first: int, from_turn: int
) -> WindowPlan | int:
    """Return the plan, or the number of the user's message at which positions end.

    Turns before the message number `from_turn` are entered together with it.
    """
    extent, parts, cuts, entered = Extent(0, 0, 0), list[Sequence[int]](), list[Extent](), 0
    for number, begin, end in locate_turns(messages, tokens):
        if number < from_turn:
            continue
        begin = 0 if number == from_turn or not extent.end else begin
        extent = replace(extent, end=begin)
        if not room.fits(extent, end - begin):
            kept = extent.window(first, end - begin, room.target_tokens)
            if kept is None or not room.fits(kept, end - begin):
                return number
            parts.append(tokens[entered:begin])
            cuts.append(kept)
            extent, entered = kept, begin
        extent = replace(extent, end=end)
    return WindowPlan(messages, (*parts, tokens[entered:]), tuple(cuts), extent, 0)


def locate_turns(messages: Messages, tokens: ChatTokens) -> list[tuple[int, int, int]]:
    """(number of the user's message, first token that its turn entered, end of its prompt) of each turn.

    A turn enters what follows the text of the reply before it, and its prompt ends where its own reply's text begins.
    A turn whose reply cannot be found in the tokens is taken together with the next one.
    """
    places = iter(tokens.contents)
    found: list[tuple[int, int, int]] = []
    asked, begin = 0, 0
    for number, message in enumerate(messages):
        role = _role(message)
        if not _text(message):
            continue
        place = next(places, None)
        if place is None or place[0] != role:
            return [(_last_user(messages), 0, len(tokens))]
        if role == "user":
            asked = number
        elif role == "assistant":
            found.append((asked, begin, place[1].start))
            begin = place[1].stop
    return [*found, (_last_user(messages), begin, len(tokens))]


def _last_user(messages: Messages) -> int:
    return max((i for i, one in enumerate(messages) if _role(one) == "user"), default=len(messages) - 1)


def _role(message: Any) -> str:
    return message["role"] if isinstance(message, Mapping) else message.role


def _text(message: Any) -> Any:
    return message["content"] if isinstance(message, Mapping) else message.content
