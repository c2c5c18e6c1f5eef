"""Techniques as counts of strokes: what a prefill enters, what decode starts from, and what a token costs.

Each class is the plan's view of a technique of `methods`. What a count cannot tell (how many guesses stand) is an
assumption that is printed with the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from twostroke.engine.options import GUESSER
from twostroke.errors import InvalidRequest
from twostroke.models.cost import SequenceRows
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.roofline import Roofline, StepTime
from twostroke.study.roofline.suggestions import did_you_mean
from twostroke.study.roofline.weight_formats import FORMATS, WeightFormat

STUDENT = FORMATS["int4-w4a8"]  # the engine's `--student int4`
# Shares of guesses that stand, from docs/results/speculation.md: lookup where answers repeat their prompt, a draft of a
# third of the size on open questions, a model's own int4 copy. Of heads of multi-token prediction others published 0.65
# of mixed texts (github.com/tenstorrent/vllm/issues/442), 0.77 (2.8 tokens of three guesses,
# github.com/kyuz0/amd-strix-halo-vllm-toolboxes/issues/53) and 0.76 to 0.83 (github.com/vllm-project/vllm/pull/48892).
ACCEPTED = {"lookup": 0.6, "draft": 0.5, "student": 0.9, GUESSER: 0.7}
SEGMENT = 100  # tokens that compression judges at once
WITH_DRAFT = {"speculative-draft": "MODEL", "compress": "MODEL", "speculative-mtp": GUESSER}
PADDING = 1024  # rows by which vocabularies of one tokenizer may differ: 151,936 and 152,064 in Qwen2.5


@dataclass(frozen=True)
class Companion:
    """A smaller model beside the engine's own, and the format of its weights; None for that of the engine's own."""

    model: ModelSpec
    weights: WeightFormat | None = None

    def roofline(self, beside: Roofline) -> Roofline:
        """Its roofline on the same devices, or on one of them if its heads cannot be divided."""
        tp = beside.tp if self.model.divides(beside.tp) else 1
        return Roofline(self.model, beside.machine, self.weights or beside.weights, tp)

    def total(self, beside: WeightFormat) -> int:
        """Bytes of its weights beside a model in that format."""
        return (self.weights or beside).total(self.model)


@dataclass(frozen=True)
class Technique:
    """The plain request, and what the others change of it."""

    name: str = "plain"  # for people
    # the field `method` of a request to this engine; empty for the plain one
    method: Mapping[str, Any] = field(default_factory=dict[str, Any])
    role: str = ""  # the companion's role, "student", "draft" or "mtp" (the model's own head), and the companion
    companion: Companion | None = None
    assumed: str = ""  # what the prediction rests on besides the machine's fractions

    def entered(self, prompt: int) -> int:
        """Tokens that the prefill of a prompt enters into the engine's own model."""
        return prompt

    def kept(self, prompt: int) -> int:
        """Entries that decode starts from."""
        return prompt

    def held(self, prompt: int, output: int) -> int:
        """Entries of a sequence at its end."""
        return self.kept(prompt) + output

    def context(self, prompt: int, output: int) -> int:
        """Mean entries before a decoded token."""
        return self.kept(prompt) + output // 2

    @property
    def own_kv(self) -> bool:
        """Whether the companion holds KV of its own, of the same length."""
        return False

    def prefill(self, roofline: Roofline, prompt: int, shared: int) -> StepTime:
        """The time of everything before the first token; `shared` first tokens are in the prefix index."""
        return roofline.step([SequenceRows(self.entered(prompt) - shared, shared, 1)])

    def decode(self, roofline: Roofline, context: int, batch: int) -> StepTime:
        """The mean cost of one token of each of `batch` sequences."""
        return roofline.step({SequenceRows(1, context, 1): batch})


@dataclass(frozen=True)
class RepeatedPrompt(Technique):
    """`repeat`: the prompt `times` times. All copies are kept, or the last one alone (PTDO)."""

    times: int = 2
    all_kept: bool = True

    def entered(self, prompt: int) -> int:
        return self.times * prompt

    def kept(self, prompt: int) -> int:
        return self.entered(prompt) if self.all_kept else prompt


@dataclass(frozen=True)
class WindowedDecode(Technique):
    """`drop`: decode from `entries` at most, sinks included, once all of the prompt was prefilled."""

    entries: int = 1024

    def kept(self, prompt: int) -> int:
        return min(prompt, self.entries)

    def held(self, prompt: int, output: int) -> int:
        return min(prompt + output, self.entries)

    def context(self, prompt: int, output: int) -> int:
        return min(prompt + output // 2, self.entries)


@dataclass(frozen=True)
class CompressedPrompt(Technique):
    """`compress`: the companion reads the prompt in segments, and `ratio` of its tokens are prefilled.

    It reads all passages first, to choose among them: at half and below there are more than it goes through. Then the
    tokens kept of a segment are entered again behind those kept before them. So the companion enters (2 + ratio) x
    prompt tokens, and computes logits of two thirds or more of them.
    """

    ratio: float = 0.5

    def entered(self, prompt: int) -> int:
        return max(1, round(self.ratio * prompt))

    def kept(self, prompt: int) -> int:
        return self.entered(prompt)

    def prefill(self, roofline: Roofline, prompt: int, shared: int) -> StepTime:
        """A prefix in the index is compressed as well, so nothing of it is found."""
        assert self.companion is not None
        draft, size = self.companion.roofline(roofline), min(SEGMENT, prompt)
        segments, known = ceil(prompt / size), self.entered(prompt) // 2
        chosen = draft.step({SequenceRows(size, 0, size): segments})
        scored = draft.step([SequenceRows(round(size * (1 + self.ratio)), known, size)])
        return chosen + scored * segments + roofline.step([SequenceRows(self.entered(prompt), 0, 1)])


@dataclass(frozen=True)
class SpeculatedDecode(Technique):
    """`speculative`: `guesses` a round, of which each stands with probability `accepted` if those before it do.

    A round makes (1 - a^(k + 1)) / (1 - a) tokens on average (Leviathan et al. 2023, arXiv:2211.17192, equation 1).
    A draft with KV of its own prefills behind the first token, so TTFT is the plain one.
    """

    guesses: int = 4
    accepted: float = 0.6

    @property
    def tokens_a_round(self) -> float:
        return sum(self.accepted**made for made in range(self.guesses + 1))

    @property
    def own_kv(self) -> bool:
        return self.role in ("draft", GUESSER)

    def decode(self, roofline: Roofline, context: int, batch: int) -> StepTime:
        count = self.guesses + 1
        step = roofline.step({SequenceRows(count, context, count): batch})
        if self.companion is not None:
            drafts = self.companion.roofline(roofline).step({SequenceRows(1, context, 1): batch})
            step = step + drafts * self.guesses
        return step * (1 / self.tokens_a_round)


@dataclass(frozen=True)
class StudentDecode(Technique):
    """`overfill` and `refresh`: the teacher prefills and the companion decodes.

    Every `every` tokens the teacher enters what was decoded; None for never. A token's mean cost has its part of that.
    """

    every: int | None = None

    def held(self, prompt: int, output: int) -> int:
        """Entries of a sequence at its end, and the student's since the last refresh."""
        return prompt + output + (self.every or 0)

    def decode(self, roofline: Roofline, context: int, batch: int) -> StepTime:
        assert self.companion is not None
        step = self.companion.roofline(roofline).step({SequenceRows(1, context, 1): batch})
        if self.every is None:
            return step
        refresh = roofline.step({SequenceRows(self.every, max(0, context - self.every)): batch})
        return step + refresh * (1 / self.every)


PLAIN = Technique()


def techniques(model: ModelSpec, draft: Companion | None = None, accepted: float | None = None) -> dict[str, Technique]:
    """The techniques that a plan knows for a model, by the names of `--method`.

    Args:
        model: the engine's own model.
        draft: a smaller model with the same tokenizer, or the model's own head, if there is one.
        accepted: the share of guesses that stand, in place of `ACCEPTED`.

    Raises InvalidRequest for a share that is none, and for a draft whose tokens are others.
    """
    if draft is not None and abs(draft.model.vocab - model.vocab) > PADDING:
        raise InvalidRequest(
            f"{draft.model.name} has a vocabulary of {draft.model.vocab:,} tokens and {model.name} one of "
            f"{model.vocab:,}: a draft needs the model's tokenizer"
        )
    if accepted is not None and not 0 <= accepted < 1:
        raise InvalidRequest(f"the share of guesses that stand must be from 0 to below 1, not {accepted:g}")
    student = Companion(model, STUDENT)
    head, draft = (draft, None) if draft is not None and draft.model.config.takes_hidden else (None, draft)
    found: dict[str, Technique] = {
        "plain": PLAIN,
        "repeat": RepeatedPrompt("prompt repetition, all kept", {"name": "repeat", "keep": "all"}),
        "ptdo": RepeatedPrompt("PTDO (prefill twice, decode once)", {"name": "repeat", "sinks": 4}, all_kept=False),
        "drop": WindowedDecode("decode from the last 1,024 entries", {"name": "drop", "sinks": 4, "window": 1020}),
        "overfill": StudentDecode("an int4 student decodes (OverFill)", {"name": "overfill"}, "student", student),
        "refresh": StudentDecode(
            "an int4 student decodes, refreshed every 64 tokens",
            {"name": "refresh", "every": 64},
            "student",
            student,
            every=64,
        ),
    }
    for source, companion in (("lookup", None), ("student", student), ("draft", draft), (GUESSER, head)):
        if source in ("draft", GUESSER) and companion is None:
            continue
        share = ACCEPTED[source] if accepted is None else accepted
        words = {"lookup": "prompt lookup", "student": "its int4 student", GUESSER: "its own head"}.get(source, "")
        found["lookup" if source == "lookup" else f"speculative-{source}"] = SpeculatedDecode(
            f"speculation by {words or (draft.model.name if draft else '')}",
            {"name": "speculative", "draft": source, "guesses": 4, "adaptive": False},
            "" if companion is None else source,
            companion,
            f"{share:.0%} of guesses stand",
            accepted=share,
        )
    if draft is not None:
        found["compress"] = CompressedPrompt(
            f"prompts compressed to half by {draft.model.name}",
            {"name": "compress", "ratio": 0.5, "scorer": "draft"},
            "draft",
            draft,
        )
    return found


def choose_technique(known: Mapping[str, Technique], method: str) -> Technique:
    """The technique of that name. Raises InvalidRequest."""
    if method in WITH_DRAFT and method not in known:
        raise InvalidRequest(f"the method {method} needs a draft: say --draft {WITH_DRAFT[method]}")
    if method not in known:
        hint = did_you_mean(method, known)
        raise InvalidRequest(f"there is no plan for the method {method!r}: {hint}there is one for {', '.join(known)}")
    return known[method]
