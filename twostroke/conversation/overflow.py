"""What a conversation does with a turn that the context has no room for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from twostroke.conversation.fitting import SYSTEM, LeftOut, without_oldest
from twostroke.fields import Checked, integer, text
from twostroke.kv.cache import KVCache
from twostroke.llm import LLM
from twostroke.sampling.params import SamplingParams

Message = dict[str, str]
Extension = Callable[[str], tuple[KVCache, list[int]]]  # what is to be extended, and by what, for a rendered prompt
# Of the context, how much a prompt takes after something was dropped, so that not every turn drops again.
AFTERWARDS = 0.75


@dataclass(frozen=True)
class Overflow(Checked):
    """How a conversation is kept within the context.

    Attributes:
        when_full: "refuse": the turn raises ContextLengthExceeded. "drop": the oldest turns go, whole, and what is left
            is computed anew behind the system message. "window": KV entries stay, those of the system message, the
            first `sinks` and the last ones (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453, here at the positions
            that entries have); where positions end, as "drop".
        sinks: see "window".
        passage_budget: how many tokens the passages of a message may take together (`fitting.with_cut_passages`).
    """

    when_full: str = text(
        "refuse", choices=("refuse", "drop", "window"), help="A turn without room: refuse it, drop turns, or keep KV."
    )
    sinks: int = integer(4, least=0, help="First KV entries that a window keeps besides the last ones.")
    passage_budget: int | None = integer(None, least=0, help="Most tokens that the passages of a message may take.")


class Turn(NamedTuple):
    """A turn about to be taken: `tokens` entered behind `base` make the rendered `prompt` of `messages`."""

    messages: list[Message]
    prompt: str
    base: KVCache
    tokens: list[int]
    left_out: LeftOut = LeftOut()


def fitted(
    llm: LLM,
    overflow: Overflow,
    turn: Turn,
    params: SamplingParams,
    extension: Callable[[str], tuple[KVCache, list[int]]],
) -> Turn:
    """The same turn, with less before it if it does not fit.

    Args:
        llm: the model.
        overflow: what to do.
        turn: all of the conversation.
        params: of the reply, for which room is left.
        extension: for other prompts of the conversation.

    Raises ContextLengthExceeded if the turn has no room even alone.
    """
    room = min(params.max_tokens or 1, llm.max_model_len // 4)  # for the reply
    if overflow.when_full == "refuse" or _fits(llm, turn.base, len(turn.tokens) + room):
        return turn
    aim = int(AFTERWARDS * (llm.max_model_len - room))
    if overflow.when_full == "window":
        kept = _window(turn.base, max(overflow.sinks, _of_system(llm, turn)), aim - len(turn.tokens))
        if kept is not None and _fits(llm, kept, len(turn.tokens) + room):
            return turn._replace(base=kept, left_out=LeftOut(entries=len(turn.base) - len(kept)))
    return _without_oldest(llm, turn, aim, room, extension)


def _fits(llm: LLM, base: KVCache, more: int) -> bool:
    """Whether so many tokens behind `base` fit into the pool and the model's positions."""
    # Pages, since a window has two that are not full; and one more, since a page that is cut may have to be copied.
    pages = base.num_pages + -(-more // llm.pool.page_size) + 1
    return pages <= llm.pool.num_pages and base.next_position + more <= llm.model.max_position


def _window(base: KVCache, first: int, most: int) -> KVCache | None:
    """The first entries and the last, `most` of them; None if that is no window."""
    if not first < most < len(base):
        return None
    return (base[:first] + base[len(base) - (most - first) :]).with_tail(base.tail)


def _of_system(llm: LLM, turn: Turn) -> int:
    """How many of the first entries are the system message's."""
    if turn.messages[0]["role"] not in SYSTEM:
        return 0
    alone = llm.tokenizer.encode_chat(turn.messages[:1], add_generation_prompt=False)
    pairs = zip(alone, turn.base.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without_oldest(llm: LLM, turn: Turn, aim: int, room: int, extension: Extension) -> Turn:
    messages, tokenizer = turn.messages, llm.tokenizer
    begun = messages[: int(messages[0]["role"] in SYSTEM)]

    def length(stay: range) -> int:
        return len(tokenizer.encode(tokenizer.chat([*begun, *messages[stay.start :]]), add_bos=False))

    stay = without_oldest([message["role"] for message in messages], lambda stay: length(stay) <= aim)
    left = length(stay)
    llm.model.require_room(left + room - 1)
    kept = [*begun, *messages[stay.start :]]
    left_out = LeftOut(messages=len(messages) - len(kept), tokens=length(range(len(begun), len(messages))) - left)
    prompt = tokenizer.chat(kept)
    return Turn(kept, prompt, *extension(prompt), left_out)


def cut_too(left_out: LeftOut, cut: LeftOut) -> LeftOut:
    """Both: what was dropped of the conversation, and what was cut of a message."""
    return replace(left_out, passages=cut.passages, passage_tokens=cut.passage_tokens)
