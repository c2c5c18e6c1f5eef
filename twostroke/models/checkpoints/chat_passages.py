"""Conversations with passages that are encoded by themselves, so each has the same ids wherever it stands."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.chat_tokens import END, MARK, ChatTokens, Span
from twostroke.models.checkpoints.tokenizer import Tokenizer

PASSAGE = f"{MARK}passage{END}"  # in a message's content, where a passage is to stand


class PassageTokens(ChatTokens):
    """The ids of a conversation with passages."""

    passages: Sequence[range] = ()  # the indices of each passage that has a token, in order


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], passages: Sequence[str], **options: Any
) -> ChatTokens:
    """The ids of messages whose contents have `PASSAGE` in place of each passage, through the chat template.

    Args:
        tokenizer: the model's.
        messages: as chat templates expect them.
        passages: their texts, in order.
        options: of `Tokenizer.chat`.

    Raises InvalidRequest, also if the template does not write each place once.
    """
    if not passages:
        return tokenizer.encode_chat(messages, **options)
    around = tokenizer.chat(messages, **options).split(PASSAGE)
    if len(around) != len(passages) + 1:
        raise InvalidRequest("the chat template does not write each message once, as named passages need it")
    said, texts = [dict(message) for message in messages], iter(passages)
    for message in said:
        if isinstance(content := message.get("content"), str):
            message["content"] = "".join(_filled(content.split(PASSAGE), texts))
    ids, spans, found, start = list[int](), list[Span](), list[range](), 0
    for index, part in enumerate(parts := list(_filled(around, iter(passages)))):
        lead = "\n" if tokenizer.strips and index and index % 2 == 0 else ""  # no space before a text that goes on
        skip = len(tokenizer.encode(lead, add_bos=False)) if lead else 0
        own, places = tokenizer.encode(lead + part, add_bos=False)[skip:], tokenizer.offsets(lead + part)[skip:]
        if own and index % 2:
            found.append(range(len(ids), len(ids) + len(own)))
        ids += own
        spans += [(start + first - len(lead), start + last - len(lead)) for first, last in places]
        start += len(part)
    made = PassageTokens(ids, said, "".join(parts), partial(tokenizer.chat, **options), partial(_known, spans))
    made.passages = found
    return made


def _filled(around: Sequence[str], texts: Iterator[str]) -> Iterator[str]:
    """What stands around passages, and the passages: there is one part more around them than there are of them."""
    yield around[0]
    for part in around[1:]:
        yield next(texts, "")
        yield part


def _known(spans: Sequence[Span], _: str) -> Sequence[Span]:
    return spans
