"""Turns of a conversation that the context has no room for: refused, or fitted by leaving something out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from twostroke.api.conversation.fitting import SYSTEM_ROLES, LeftOut, drop_oldest
from twostroke.api.conversation.window import ContextRoom, Extent
from twostroke.api.llm import LLM
from twostroke.fields import Checked, integer, text
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.sampling.params import SamplingParams

Message = dict[str, str]
Extension = Callable[[str], tuple[KVCache, list[int]]]  # what is to be extended, and by what, for a rendered prompt


@dataclass(frozen=True)
class Overflow(Checked):
    """The rule that keeps a conversation within the context.

    Attributes:
        when_full: "refuse": the turn raises ContextLengthExceeded. "drop": the oldest turns go, whole, and what is left
            is computed anew behind the system message. "window": KV entries stay, those of the system message, the
            first `sinks` and the last ones (`window`); where positions end, as "drop".
        sinks: see "window".
        passage_budget: how many tokens the passages of a message may take together (`fitting.cut_passages`).
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


def fit_turn(
    llm: LLM,
    overflow: Overflow,
    turn: Turn,
    params: SamplingParams,
    extension: Callable[[str], tuple[KVCache, list[int]]],
) -> Turn:
    """Return the turn, with less before it if it does not fit.

    Args:
        llm: the model.
        overflow: what to do.
        turn: all of the conversation.
        params: parameters of the reply, for which room is left.
        extension: finds what to extend for another prompt of the conversation.

    Raises ContextLengthExceeded if the turn has no room even alone.
    """
    room, base = ContextRoom.of(llm, params.max_tokens), turn.base
    new = len(turn.tokens) + (base.pending is not None)
    if overflow.when_full == "refuse" or room.fits(Extent.of(base), new):
        return turn
    if overflow.when_full == "window":
        if base.pending is not None and base.pending not in llm.tokenizer.special_ids:
            # The reply was cut short. Its last token is entered before the cut, where a server enters it.
            base, new = llm.prefill([base.pending], after=base.with_tail(None)), new - 1
        kept = Extent.of(base).window(max(overflow.sinks, _num_system_entries(llm, turn)), new, room.target_tokens)
        if kept is not None and room.fits(kept, new):
            cut = kept.cut(base)
            return turn._replace(base=cut, left_out=LeftOut(entries=len(base) - len(cut)))
    return _drop_oldest_turns(llm, turn, room.target_tokens, room.reply, extension)


def _num_system_entries(llm: LLM, turn: Turn) -> int:
    """Number of leading entries that belong to the system message."""
    if turn.messages[0]["role"] not in SYSTEM_ROLES:
        return 0
    return common_prefix_length(
        llm.tokenizer.encode_chat(turn.messages[:1], add_generation_prompt=False), turn.base.tokens
    )


def _drop_oldest_turns(llm: LLM, turn: Turn, aim: int, room: int, extension: Extension) -> Turn:
    messages, tokenizer = turn.messages, llm.tokenizer
    begun = messages[: int(messages[0]["role"] in SYSTEM_ROLES)]

    def length(stay: range) -> int:
        return len(tokenizer.encode(tokenizer.chat([*begun, *messages[stay.start :]]), add_bos=False))

    stay = drop_oldest([message["role"] for message in messages], lambda stay: length(stay) <= aim)
    left = length(stay)
    llm.model.require_room(left + room - 1)
    kept = [*begun, *messages[stay.start :]]
    left_out = LeftOut(messages=len(messages) - len(kept), tokens=length(range(len(begun), len(messages))) - left)
    prompt = tokenizer.chat(kept)
    return Turn(kept, prompt, *extension(prompt), left_out)


def including_passages(left_out: LeftOut, cut: LeftOut) -> LeftOut:
    """Add the passages that were cut of a message to what was left out of the conversation."""
    return replace(left_out, passages=cut.passages, passage_tokens=cut.passage_tokens)
