"""Prompt compression: tokens that a small model finds unsurprising are dropped before the prompt is prefilled.

Jiang et al. 2023, "LLMLingua: Compressing Prompts for Accelerated Inference of Large Language Models"
(arXiv:2310.05736). Its budget controller (algorithm 1) drops whole demonstrations, and its iterative token-level
compression (algorithm 2) goes through what is left in segments, each judged behind the compressed text before it. Here
demonstrations are passages of the prompt; the question, system messages and the chat template stay whole, where the
paper compresses instruction and question a little; and the budget of tokens is met exactly, where the paper compares
with a percentile of each segment.
"""

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.engine.strokes import Decode, Prefill, Prefilled, Program
from twostroke.fields import Rule, flag, integer, number, text
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt
from twostroke.methods.prompt_passages import passages_of

SIDE_BY_SIDE = 8  # passages that are scored at once
MAX_KEEP_TEXTS = 64  # texts to keep: a limit for requests over HTTP


@dataclass(frozen=True)
class Compression:
    """A summary of what was dropped."""

    dropped_tokens: int  # of the prompt, those of dropped passages included
    dropped_passages: int  # passages that went as a whole
    scored_tokens: int  # what the scoring model was given to read


@dataclass(frozen=True)
class Compress(Method, name="compress"):
    """Drop what a model expects anyway, prefill what is left, decode.

    Passages are parted by blank lines; in a text that has none, by lines. Never dropped: the chat template, system
    messages, assistants' messages after the last user's, and what the parameters say. Special tokens, and the line
    break behind a passage, go only with the whole passage.
    """

    ratio: float = number(0.5, above=0, most=1)  # the share of the prompt's tokens that is kept
    # how many tokens are kept, instead of a ratio. What must stay whole may exceed either.
    budget: int | None = integer(None, least=1)
    # the model whose surprise counts: the engine's own ("self"), or the "student" or "draft" beside it
    scorer: str = text("self", choices=("self", "student", "draft"))
    first: int = integer(0, least=0)  # how many passages at the beginning stay whole, such as an instruction
    last: int = integer(1, least=0)  # how many passages at the end of the last user's text stay whole: the question
    keep: str | tuple[str, ...] = ()  # texts that stay whole wherever they are
    numbers: bool = flag(True)  # whether words that have digits stay whole; they go only with the whole passage
    segment: int = integer(100, least=1)  # how many tokens are judged at once
    # passages stay until they have this many times the tokens that are kept in the end (the paper's k)
    slack: float = number(2.0, least=1)

    def __post_init__(self) -> None:
        if isinstance(self.keep, str):
            object.__setattr__(self, "keep", (self.keep,))
        few = Rule(
            tuple,
            each=Rule(str, least=1),
            test=lambda texts: len(texts) <= MAX_KEEP_TEXTS,
            words=f"texts, at most {MAX_KEEP_TEXTS}",
        )
        self.check("keep", few)
        super().__post_init__()

    @property
    def companions(self) -> tuple[str, ...]:
        return () if self.scorer == "self" else (self.scorer,)

    def program(self, prompt: Prompt) -> Program:
        wanted = self.budget or round(self.ratio * len(prompt))
        passages = self.passages(prompt)
        room = wanted - (len(prompt) - total(passages))  # for tokens of passages
        if room >= total(passages):
            yield Decode((yield Prefill(prompt)))
            return Compression(0, 0, 0)
        demonstrations, read = yield from self.control_budget(prompt, passages, max(0, room))
        kept, kv, more = yield from self.compress_tokens(prompt, passages, demonstrations, max(0, room))
        if self.model is not None:
            kv = None  # it is another model's
        kv = yield Prefill(kept[len(kv or ()) :], kv)
        yield Decode(kv)
        return Compression(len(prompt) - len(kept), len(passages) - len(demonstrations), read + more)

    def control_budget(
        self, prompt: Prompt, passages: Sequence[range], room: int
    ) -> Generator[Any, Any, tuple[list[range], int]]:
        """Algorithm 1: the passages of highest perplexity, until they have `slack` times `room` tokens.

        Those with texts to keep are all taken first. Returns them in the order of the prompt, and how many tokens were
        read.
        """
        if self.slack * room >= total(passages):
            return list(passages), 0
        perplexities: list[float] = []
        for start in range(0, len(passages), SIDE_BY_SIDE):
            some = passages[start : start + SIDE_BY_SIDE]
            strokes = [Prefill(prompt[one.start : one.stop], model=self.model, logprobs=0) for one in some]
            made: list[Prefilled] = yield list(strokes)
            perplexities += [perplexity(surprises(one)) for one in made]
            del made
        chosen = [one for one in passages if self.kept_texts(b"".join(prompt.pieces(one)))]
        for index in np.argsort(-np.array(perplexities), kind="stable").tolist():
            if total(chosen) > self.slack * room:
                break
            chosen += [passages[index]] if passages[index] not in chosen else []
        return sorted(chosen, key=lambda one: one.start), total(passages)

    def compress_tokens(
        self, prompt: Prompt, passages: Sequence[range], demonstrations: Sequence[range], room: int
    ) -> Generator[Any, Any, tuple[list[int], KVCache | None, int]]:
        """Algorithm 2: of each segment, the tokens of highest surprise behind the compressed text before it.

        Returns the compressed prompt, the scoring model's value of its beginning, and how many tokens were read.
        """
        whole = self.whole(prompt, demonstrations)
        kv: KVCache | None = None
        kept: list[int] = []
        left, read = total(demonstrations), 0
        for part, compressed in stretches(len(prompt), passages, demonstrations, self.segment):
            tokens = prompt[part.start : part.stop]
            if not compressed:
                kept += tokens
                continue
            known = kept[len(kv or ()) :]
            made: Prefilled = yield Prefill([*known, *tokens], kv, model=self.model, logprobs=0, scored_from=len(known))
            kv, read = made.kv[: len(kept)] if kept else None, read + len(known) + len(tokens)
            worth = np.where(whole[part.start : part.stop], np.inf, surprises(made))
            del made
            count = max(round(room * len(part) / left), int(np.isinf(worth).sum()))
            stay = np.sort(np.argsort(-worth, kind="stable")[:count])
            kept += [tokens[index] for index in stay.tolist()]
            room, left = max(0, room - count), left - len(part)
        return kept, kv, read

    @property
    def model(self) -> str | None:
        """The role of the model that scores; None for the engine's own."""
        return None if self.scorer == "self" else self.scorer

    def passages(self, prompt: Prompt) -> list[range]:
        """The parts of the prompt from which tokens may be dropped, in order."""
        found = passages_of(prompt, self.last)[self.first :]
        if found and found[-1].stop == len(prompt):  # something must be left to decode from
            found[-1] = range(found[-1].start, len(prompt) - 1)
        return [one for one in found if one]

    def whole(self, prompt: Prompt, passages: Sequence[range]) -> np.ndarray:
        """[n] bool: tokens of the prompt that stay although they are in a passage."""
        whole = np.zeros(len(prompt), bool)
        for part in passages:
            pieces = prompt.pieces(part)
            ends = np.cumsum([len(piece) for piece in pieces])
            data = b"".join(pieces)
            spans = [m.span() for m in re.finditer(rb"\S+", data) if self.numbers and re.search(rb"\d", m[0])]
            spans += self.kept_texts(data)
            spans.append((len(data.rstrip()), len(data)))  # the line break behind it
            inside = whole[part.start : part.stop]
            for start, stop in spans:
                first, last = np.searchsorted(ends, [start, max(start, stop - 1)], side="right")
                inside[first : last + (stop > start)] = True
            inside[[not piece for piece in pieces]] = True  # special tokens
        return whole

    def kept_texts(self, data: bytes) -> list[tuple[int, int]]:
        """The byte ranges (start, stop) of the texts to keep."""
        return [m.span() for one in self.keep for m in re.finditer(re.escape(one.encode(errors="surrogatepass")), data)]


def stretches(
    length: int, passages: Sequence[range], demonstrations: Sequence[range], segment: int
) -> list[tuple[range, bool]]:
    """The prompt in order, without dropped passages: what stays (False), and segments to compress (True)."""
    found: list[tuple[range, bool]] = []
    done, stay = 0, set(demonstrations)
    for passage in passages:
        found.append((range(done, passage.start), False))
        if passage in stay:
            starts = range(passage.start, passage.stop, segment)
            found += [(range(start, min(passage.stop, start + segment)), True) for start in starts]
        done = passage.stop
    return [*found, (range(done, length), False)]


def surprises(made: Prefilled) -> np.ndarray:
    """-log p of each token scored; infinite for the first token of a context, of which nothing is known."""
    return np.array([np.inf if score is None else -score.logprob for score in made.scores])


def perplexity(surprise: np.ndarray) -> float:
    """The perplexity of a text read alone, whose first token has no probability."""
    known = surprise[np.isfinite(surprise)]
    return float(np.exp(known.mean())) if len(known) else 0.0


def total(parts: Sequence[range]) -> int:
    return sum(map(len, parts))
