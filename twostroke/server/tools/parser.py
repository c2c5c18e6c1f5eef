"""Parses tool calls out of a text that arrives in pieces. Names and arguments are passed on once they are certain.

A choice's tokens are parsed into what an API shows: thoughts, text, calls, and why the turn ended.
"""

import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.api.reasoning.reader import Phase, ReasoningReader
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import AnswerSpan, CallArguments, CallStart, Piece, PlainText
from twostroke.server.tools.dialects import ANY, OPEN, formats_of, markup_of
from twostroke.server.tools.json_calls import JsonCalls
from twostroke.server.tools.text_buffer import (
    ArgumentsText,
    CallFormat,
    FunctionName,
    NotACall,
    Offered,
    Reading,
    TextBuffer,
)

THOUGHT = "</think>"  # an answer begins anew behind it
_ID_LETTERS = string.ascii_letters + string.digits


class ToolParser:
    """Passes text on until a call may begin, and then lets the formats read it.

    White space before a call, between calls, and after the last one is not part of the text.

    Attributes:
        calls: how many calls have begun.
        complete: whether all of them have ended.
    """

    def __init__(
        self,
        offered: Offered,
        formats: Sequence[CallFormat] = ANY,
        max_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        """`max_calls`: further calls are left out; `only_calls`: so is all other text."""
        self.calls, self.complete = 0, True
        self._offered, self._formats, self._max_calls, self._only_calls = offered, formats, max_calls, only_calls
        self._source, self._space = TextBuffer(), ""
        self._fresh = True  # nothing but white space since the beginning, or since a call
        self._candidates: list[CallFormat] = []
        self._reading: Reading[None] | None = None
        self._openers = {one.opener for one in formats if not one.loose} | {THOUGHT}

    def spans(self, text: str, ended: bool = False, cut: bool = False) -> list[AnswerSpan]:
        """The stretches that are certain after this text; all that is held back, once the text has `ended`.

        The beginning of a call, without a complete name, is plain text; if the text was `cut` off, it is left out.
        """
        self._source.text += text
        self._source.ended = ended
        spans: list[AnswerSpan] = []
        while self._pass_text(spans) if self._reading is None else self._read(spans, cut):
            pass
        return spans

    def _pass_text(self, spans: list[AnswerSpan]) -> bool:
        """Pass text on up to where a call may begin. Returns whether there is more to do."""
        source = self._source
        if self._fresh:
            self._space += source.take(len(source.text) - len(source.text.lstrip()))
            text = source.text
            if text and (source.ended or not _arriving(text, (one.opener for one in self._formats), whole=True)):
                return self._try_formats([one for one in self._formats if text.startswith(one.opener)])
            if source.ended:
                self._emit_text(spans, 0)
            return False
        text = source.text
        found = [(at, opener) for opener in self._openers if (at := text.find(opener)) >= 0]
        if not found:
            self._emit_text(spans, len(text) - (0 if source.ended else _arriving(text, self._openers)))
            return False
        at, opener = min(found)
        if opener == THOUGHT:
            self._emit_text(spans, at + len(THOUGHT))
            self._fresh = True
            return True
        self._emit_text(spans, at)
        return self._try_formats([one for one in self._formats if source.text.startswith(one.opener) and not one.loose])

    def _emit_text(self, spans: list[AnswerSpan], count: int) -> None:
        """Pass on the white space held back, and text from the source's beginning."""
        text, space = self._source.take(count), self._space
        self._space = ""
        told = (space.lstrip("\n") if text else "") + text if self.calls and self._fresh else space + text
        if self._only_calls:
            told = ""
        if spans and spans[-1].plain and not space:
            before = spans.pop()
            text = before.written + text
            told = "".join(piece.text for piece in before.pieces if isinstance(piece, PlainText)) + told
        if space + text:
            spans.append(AnswerSpan(space + text, True, (PlainText(told),) if told else ()))
        self._fresh = False

    def _try_formats(self, formats: list[CallFormat]) -> bool:
        self._candidates = formats
        self._reading = formats[0].read(self._source, self._offered) if formats else _no_call()
        return True

    def _read(self, spans: list[AnswerSpan], cut: bool) -> bool:
        """Go on with a format. Returns whether there is more to do."""
        assert self._reading is not None
        source, before = self._source, self._source.text
        try:
            event = next(self._reading)
        except StopIteration:
            event, self._reading, self._fresh = None, None, True
        except NotACall:
            return self._try_next_format(spans, cut)
        taken = before[: len(before) - len(source.text)]
        pieces = self._pieces(event)
        if taken or pieces or self._reading is None:
            spans.append(AnswerSpan(self._space + taken, False, pieces))
            self._space = ""
        return event is not None or self._reading is None

    def _try_next_format(self, spans: list[AnswerSpan], cut: bool) -> bool:
        """The format reads no call here: try the next one. Without any, the text is plain."""
        tried, *others = self._candidates or [None]
        if others:
            return self._try_formats([one for one in others if one is not None])
        self._reading = None
        source = self._source
        if cut and source.ended and tried is not None and self._may_be_call():
            spans.append(AnswerSpan(self._space + source.take(len(source.text)), False))
            self._space = ""
            return False
        self._emit_text(spans, 1)
        return True

    def _may_be_call(self) -> bool:
        """Whether the text that is left is the beginning of a call, as far as it goes."""
        text = self._source.text
        for one in self._formats:
            if not text.startswith(one.opener) or (one.loose and not any(name in text for name in self._offered)):
                continue
            try:
                if next(one.read(_copy(self._source), self._offered)) is None:
                    return True
            except NotACall:
                pass
        return False

    def _pieces(self, event: FunctionName | ArgumentsText | None) -> tuple[Piece, ...]:
        if self._max_calls is not None and self.calls > self._max_calls:
            return ()
        match event:
            case FunctionName(name):
                self.calls += 1
                if self._max_calls is not None and self.calls > self._max_calls:
                    return ()
                self.complete = False
                return (CallStart(self.calls - 1, new_id(), name),)
            case ArgumentsText(text, last):
                self.complete = last
                return (CallArguments(self.calls - 1, text),) if text else ()
            case None:
                return ()


@dataclass(frozen=True)
class ToolParserFactory:
    """How the answers to one request are read: makes a parser for each choice."""

    offered: Offered  # the functions that may be called, by name
    formats: tuple[CallFormat, ...] = ANY  # how the model writes calls
    max_calls: int | None = None  # calls beyond this number are left out; None for all
    only_calls: bool = False  # the answer must call, so other text in it is left out
    shown: frozenset[int] = frozenset()  # special tokens that are written in calls

    @property
    def tagged(self) -> bool:
        """Whether `<tool_call>` begins nothing but a call in JSON."""
        return all(isinstance(one, JsonCalls) for one in self.formats if one.opener == OPEN)

    def __call__(self) -> ToolParser:
        return ToolParser(self.offered, self.formats, self.max_calls, self.only_calls)


def parser_factory(
    tokenizer: Tokenizer, functions: Sequence[Mapping[str, Any]], *, parallel: bool = True, required: bool = False
) -> ToolParserFactory:
    """How a model's calls of these functions, as OpenAI describes them, are read.

    `parallel`: there may be several; `required`: there is nothing else.
    """
    special = {tokenizer.token_text(id): id for id in tokenizer.special_ids}
    formats = formats_of(tokenizer.template_for(tools=True), special)
    markup = markup_of(formats)
    shown = frozenset(id for text, id in special.items() if text in markup)
    offered = {str(function["name"]): function for function in functions}
    return ToolParserFactory(offered, formats, None if parallel else 1, required, shown - tokenizer.eos_ids)


class ChoiceParser:
    """Reads the tokens of one choice. Every API that has conversations writes its answers from these pieces."""

    def __init__(self, request: Request) -> None:
        """`request`: the choice's, which says how thoughts and calls in the text are read."""
        reader = request.params.reader
        self._reader = None if reader is None else reader()
        self._tools = self._reader.answer if isinstance(self._reader, ReasoningReader) else self._reader
        self.reasoning_tokens = 0  # tokens of the thought so far, its marks included
        self._undecided = 0  # tokens that belong to the thought if one begins

    def read(self, token: Token) -> list[Piece]:
        """The pieces that are certain after this token."""
        if self._reader is None:
            return [PlainText(token.text)] if token.text else []
        before = self._phase
        spans = [*self._reader.spans(token.text)]
        if token.finish_reason is not None:
            spans += self._reader.spans("", ended=True, cut=token.finish_reason == "length")
        self._count(before, self._phase)
        return [piece for span in spans for piece in span.pieces]

    def reason(self, token: Token) -> str | None:
        """Why the turn ended with this token, once it is read: "stop", "length" or "tool_calls"; None if it goes on."""
        called = isinstance(self._tools, ToolParser) and self._tools.calls > 0 and self._tools.complete
        return "tool_calls" if token.finish_reason == "stop" and called else token.finish_reason

    @property
    def _phase(self) -> Phase:
        return self._reader.phase if isinstance(self._reader, ReasoningReader) else Phase.ANSWER

    def _count(self, before: Phase, after: Phase) -> None:
        if Phase.THOUGHT in (before, after):
            self.reasoning_tokens += self._undecided + 1
        self._undecided = self._undecided + 1 if after is before is Phase.UNDECIDED else 0


def new_id() -> str:
    """A call's id: nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


def _arriving(text: str, openers: Iterable[str], whole: bool = False) -> int:
    """The length of the longest end of the text that begins an opener; `whole`: only all of the text counts."""
    lengths = (len(text),) if whole else range(1, len(text) + 1)
    return max(
        (size for opener in openers for size in lengths if size < len(opener) and opener.startswith(text[-size:])),
        default=0,
    )


def _copy(source: TextBuffer) -> TextBuffer:
    other = TextBuffer()
    other.text = source.text
    return other


def _no_call() -> Reading[None]:
    raise NotACall
    yield
