"""How one model thinks: whether its answers have thoughts, where they begin, and what a request makes of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.api.reasoning.constraint import ReasoningConstraintFactory, ReasoningTokens
from twostroke.api.reasoning.forms import FORMS, form_name
from twostroke.api.reasoning.reader import HarmonyReader, MarkedReader, Phase, ReasoningReader, parts_of
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.answer_reader import AnswerReaderFactory
from twostroke.sampling.params import SamplingParams

TAIL = 32  # tokens at a prompt's end, among which a mark is looked for


@dataclass(frozen=True)
class ReasoningReaderFactory:
    """Makes a reader for each choice."""

    tokens: ReasoningTokens  # the marks
    phase: Phase  # where the prompt ends
    answer: AnswerReaderFactory | None = None  # makes the reader of the answer behind the thought, if it has one

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose text the reader must see."""
        return self.tokens.shown | (frozenset() if self.answer is None else self.answer.shown)

    def __call__(self) -> ReasoningReader:
        answer = None if self.answer is None else self.answer()
        if self.tokens.form.messages:
            return HarmonyReader(self.phase, answer)
        return MarkedReader(self.tokens.form, self.phase, answer)


class Reasoning:
    """The thoughts of one model, in the form that it writes them. Safe to share between threads."""

    def __init__(self, name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`name` is a form's; `vocab_size` is the model's, which may be padded past the tokenizer's."""
        self.form = FORMS[name]
        self._tokenizer, self._tokens = tokenizer, ReasoningTokens(self.form, tokenizer, vocab_size)

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, parser: str = "auto") -> "Reasoning | None":
        """That of a model; None if its answers have no thoughts that could be set apart.

        `parser`: a form's name, "none", or "auto" for what the chat template has.
        """
        names = (form_name(tokenizer.template_for(tools)) for tools in (False, True))
        name = next(filter(None, names), None) if parser == "auto" else parser
        return None if name in (None, "none") else cls(name, tokenizer, vocab_size)

    def phase_after(self, prompt: str | Sequence[int], said: str = "") -> Phase:
        """Where an answer to a prompt begins: a template may have opened a thought, or closed one.

        `said`: the text of the assistant's message that the answer goes on with.
        """
        form, opener = self.form, self.form.opener.rstrip()
        if said.strip():
            opened, closed = said.rfind(opener), said.rfind(form.closer)
            return Phase.THOUGHT if opened > closed else Phase.ANSWER
        tail = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt[-TAIL:], skip_special=False)
        if tail.rstrip().endswith(opener):
            return Phase.THOUGHT
        return Phase.ANSWER if tail.rstrip().endswith(form.lead or form.closer) else Phase.UNDECIDED

    def applied(
        self, params: SamplingParams, phase: Phase, *, budget: int | None = None, lead: bool = True
    ) -> SamplingParams:
        """The parameters of an answer that may begin with a thought.

        Its grammar and its stop strings apply behind the thought. Nothing else changes which tokens are sampled.

        Args:
            params: those of the answer.
            phase: where the prompt ends.
            budget: the most tokens of the thought; None for any number.
            lead: whether the answer's own markup must come before what its grammar describes.
        """
        if phase is Phase.ANSWER and not self.form.messages:
            return params
        if phase is not Phase.ANSWER and (params.constraint is not None or budget is not None):
            if params.constraint is not None:
                self._tokens.prepare()
            follow = ReasoningConstraintFactory(self._tokens, phase, params.constraint, budget, lead)
            params = replace(params, constraint=follow)
        return replace(params, reader=ReasoningReaderFactory(self._tokens, phase, params.reader))


def described(params: SamplingParams) -> dict[str, Any] | None:
    """What `Reasoning.applied` was told, where it decides which tokens are sampled: a grammar, a budget or stop strings
    apply to a part of the answer. None where it does not."""
    reader, follow = params.reader, params.constraint
    if not isinstance(reader, ReasoningReaderFactory) or not (
        params.stop or isinstance(follow, ReasoningConstraintFactory)
    ):
        return None
    name = next(name for name, form in FORMS.items() if form == reader.tokens.form)
    limits = (follow.budget, follow.lead) if isinstance(follow, ReasoningConstraintFactory) else (None, True)
    return {"form": name, "phase": reader.phase.value, "budget": limits[0], "lead": limits[1]}


def applied_again(
    told: Mapping[str, Any], params: SamplingParams, tokenizer: Tokenizer, vocab_size: int
) -> SamplingParams:
    """The parameters that `described` has told of, where `params` are those of the answer. Raises ValueError."""
    form, phase, budget, lead = (told.get(name) for name in ("form", "phase", "budget", "lead"))
    if len(told) != 4 or form not in FORMS or type(budget) not in (int, type(None)) or type(lead) is not bool:
        raise ValueError("a thought is described by form, phase, budget and lead")
    return Reasoning(form, tokenizer, vocab_size).applied(params, Phase(phase), budget=budget, lead=lead)


def parts_reader(params: SamplingParams) -> Callable[[str, bool], tuple[str, str]]:
    """Reads an answer's text as it comes, and whether it has ended: (thought, answer), as far as they are certain.

    Without a reader of thoughts in `params`, all of it is the answer.
    """
    if not isinstance(params.reader, ReasoningReaderFactory):
        return lambda text, ended: ("", text)
    reader = replace(params.reader, answer=None)()
    return lambda text, ended: parts_of(reader.spans(text, ended))


def set_apart(text: str, params: SamplingParams) -> tuple[str, str]:
    """(thought, answer) of a whole text, see `parts_reader`."""
    return parts_reader(params)(text, True)
