"""Sets a thought apart from the answer in a text that arrives in pieces. No part of a mark gets into either."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import Enum

from twostroke.api.reasoning.forms import ReasoningForm
from twostroke.sampling.answer_reader import AnswerReader, AnswerSpan, PlainText, ThoughtText

MAX_HEADER = 300  # characters of a message's header in harmony


class Phase(Enum):
    """Where a text is: before it is known whether a thought comes, within it, or behind it."""

    UNDECIDED = "undecided"
    THOUGHT = "thought"
    ANSWER = "answer"


class ReasoningReader(ABC):
    """Follows one choice's text.

    Attributes:
        phase: where the text is.
        answer: reads the answer behind the thought, if anything does.
    """

    def __init__(self, phase: Phase, answer: AnswerReader | None = None) -> None:
        self.phase, self.answer = phase, answer
        self._text = ""  # has arrived, and is not told yet
        self._answering = False  # whether `answer` may hold text back

    def spans(self, text: str, ended: bool = False, cut: bool = False) -> Sequence[AnswerSpan]:
        """The stretches that are certain after this text; those of the answer as its reader tells them."""
        self._text += text
        found: list[AnswerSpan] = []
        while self._step(found, ended):
            pass
        if self.answer is None:
            return found
        told: list[AnswerSpan] = []
        for span in found:
            if span.plain:
                told += self.answer.spans(span.written)
                self._answering = True
            else:
                told += self._flush(cut=False)
                told.append(span)
        return [*told, *(self._flush(cut) if ended else ())]

    @abstractmethod
    def _step(self, found: list[AnswerSpan], ended: bool) -> bool:
        """Tell one more stretch. Returns whether there may be another."""

    def _flush(self, cut: bool) -> Sequence[AnswerSpan]:
        """What the answer's reader holds back, where its text is over."""
        answering, self._answering = self._answering, False
        return self.answer.spans("", ended=True, cut=cut) if self.answer is not None and answering else ()

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken


class MarkedReader(ReasoningReader):
    """Reads a thought between two marks. Only the text's beginning can be one; a mark in the answer is text."""

    def __init__(self, form: ReasoningForm, phase: Phase, answer: AnswerReader | None = None) -> None:
        super().__init__(phase, answer)
        self._form = form
        self._fresh = phase is not Phase.ANSWER  # nothing but white space since a part began
        self._ends_with = ""  # the mark behind the answer, once one has come before it

    def _step(self, found: list[AnswerSpan], ended: bool) -> bool:
        if self._fresh:
            return self._begin(found, ended)
        return self._speak(found, ended) if self.phase is Phase.ANSWER else self._think(found, ended)

    def _begin(self, found: list[AnswerSpan], ended: bool) -> bool:
        """Read the mark before a part, and white space, which is not shown."""
        body = self._text.lstrip()
        space = len(self._text) - len(body)
        mark = self._form.opener.rstrip()  # also if the prompt has it already: some models repeat it
        if self.phase is Phase.ANSWER:
            mark, after = self._form.around or ("", "")
            self._ends_with = after if mark and body.startswith(mark) else self._ends_with
        if mark and body.startswith(mark):
            _tell(found, self._take(space + len(mark)))
            self.phase = Phase.THOUGHT if self.phase is Phase.UNDECIDED else self.phase
            return True
        if not ended and (not body or mark.startswith(body)):
            return False
        self._fresh = False
        if self.phase is Phase.UNDECIDED:  # no thought: the answer keeps its white space
            self.phase = Phase.ANSWER
        else:
            _tell(found, self._take(space))
        return True

    def _speak(self, found: list[AnswerSpan], ended: bool) -> bool:
        end = self._text.rstrip()
        held = len(self._ends_with) if end.endswith(self._ends_with) else arriving(end, self._ends_with)
        text = self._take(len(end) - held if held else len(self._text))
        _tell(found, text, answer=text)
        if ended and held:
            _tell(found, self._take(len(self._text)))
        return False

    def _think(self, found: list[AnswerSpan], ended: bool) -> bool:
        closer, text = self._form.closer, self._text
        at = text.find(closer)
        shown = text[: at if at >= 0 else len(text) - arriving(text, closer)].rstrip()
        _tell(found, self._take(len(shown)), shown)
        if at >= 0:
            _tell(found, self._take(at + len(closer) - len(shown)))
            self.phase, self._fresh = Phase.ANSWER, True
        elif ended:  # cut within a mark, perhaps
            _tell(found, self._take(len(self._text)))
        return at >= 0


class HarmonyReader(ReasoningReader):
    """Reads the messages of one turn of gpt-oss, each behind a header that names its channel.

    `analysis` is a thought, `final` and `commentary` are the answer. A call of a function stays as it is written, for
    the answer's reader; without one, its header is left out.
    """

    def __init__(self, phase: Phase, answer: AnswerReader | None = None) -> None:
        super().__init__(phase, answer)
        self._thoughts = 0  # messages

    def _step(self, found: list[AnswerSpan], ended: bool) -> bool:
        if self.phase is Phase.UNDECIDED:
            return self._header(found, ended)
        text = self._text
        ends = [at for mark in (*_BEGINS, _END) if (at := text.find(mark)) >= 0]
        size = min(ends) if ends else len(text) - (0 if ended else max(arriving(text, m) for m in (*_BEGINS, _END)))
        shown = self._take(size)
        plain = self.phase is Phase.ANSWER
        _tell(found, shown, "" if plain else shown, shown if plain else "")
        if not ends:
            return False
        if self._text.startswith(_END):
            _tell(found, self._take(len(_END)))
        self.phase = Phase.UNDECIDED
        return True

    def _header(self, found: list[AnswerSpan], ended: bool) -> bool:
        text = self._text
        begins = any(text.startswith(mark) or mark.startswith(text) for mark in (*_BEGINS, " to=", _END))
        if text.startswith(_END):
            _tell(found, self._take(len(_END)))
            return True
        at = text.find(_MESSAGE)
        if not begins or (at < 0 and len(text) > MAX_HEADER):
            self.phase = Phase.ANSWER
            return bool(text)
        if at < 0:
            if ended:  # cut within a header
                _tell(found, self._take(len(text)))
            return False
        header = self._take(at + len(_MESSAGE))
        if " to=" in header:
            self.phase = Phase.ANSWER
            _tell(found, header, answer="" if self.answer is None else header)
        elif "<|channel|>analysis" in header:
            self.phase = Phase.THOUGHT
            _tell(found, header, "\n\n" if self._thoughts else "")
            self._thoughts += 1
        else:
            self.phase = Phase.ANSWER
            _tell(found, header)
        return True


_BEGINS = ("<|start|>", "<|channel|>")
_MESSAGE, _END = "<|message|>", "<|end|>"


def arriving(text: str, mark: str) -> int:
    """The length of the longest end of a text that begins a mark and is not all of it."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _tell(found: list[AnswerSpan], written: str, thought: str = "", answer: str = "") -> None:
    """Tell a stretch, unless it is empty, and what is shown of it, in the thought or in the answer."""
    if written:
        shown = (PlainText(answer),) if answer else (ThoughtText(thought),) if thought else ()
        found.append(AnswerSpan(written, bool(answer), shown))


def parts_of(spans: Iterable[AnswerSpan]) -> tuple[str, str]:
    """What is shown of the thought and of the answer in these stretches."""
    pieces = [piece for span in spans for piece in span.pieces]
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ThoughtText))
    return thought, "".join(piece.text for piece in pieces if isinstance(piece, PlainText))
