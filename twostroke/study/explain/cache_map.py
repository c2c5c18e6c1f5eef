"""The effect of a technique on the cache: the entries that each stroke is given, makes and drops, and their owners.

A technique cuts and joins values, and pages may be copied. So an entry is known by its bits, those of its key in the
last layer: two entries with the same bits are the same for every stroke.
"""

from dataclasses import dataclass
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.open_engine import MAIN
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Decoded, GuessRound, Prefill, Prefilled, Program, Stroke, driven
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods import Method, Prompt
from twostroke.methods.method import method_facts
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.shown_tokens import ShownToken, shown_tokens


@dataclass(frozen=True)
class EntryRange:
    """Entries at positions [start, stop), computed by the model of one role: "main", "student", "draft"."""

    owner: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class GuessedToken:
    """A token that was guessed, and whether it was the one sampled."""

    token: ShownToken
    kept: bool


@dataclass(frozen=True)
class CacheStroke:
    """One stroke of a technique."""

    stroke: str  # "prefill" or "decode"; model: the role of the model that computed it
    model: str
    given: tuple[EntryRange, ...]  # the entries that it started from
    # entries of the value decoded from before, or prefilled, that a decode is no longer given
    dropped: tuple[EntryRange, ...]
    made: tuple[EntryRange, ...]  # the entries that it added
    next_position: int  # where its next token goes
    tokens: tuple[ShownToken, ...]  # those that it entered (a prefill) or sampled (a decode)
    guesses: tuple[GuessedToken, ...]  # those of a decode


@dataclass(frozen=True)
class CacheMap:
    """A technique's strokes on a prompt."""

    method: str
    parameters: dict[str, Any]  # of the technique
    strokes: tuple[CacheStroke, ...]
    facts: dict[str, Any]  # what it counted
    entries: int  # of the last value; plain_entries: what the plain request would hold after as many tokens
    plain_entries: int
    text: str  # its answer


def cache_map(llm: LLM, prompt: Prompt, params: SamplingParams, method: Method) -> CacheMap:
    """Run a technique and follow its caches. Raises what `LLM.generate` raises."""
    seen: list[_Recorder] = []

    def program() -> Program:
        recorder = _Recorder(llm)
        seen[:] = [recorder]  # a preempted program starts again
        return (yield from driven(method.program(prompt), recorder.answer))

    request = Request(program, params, llm.tokenizer, len(prompt))
    llm.engine.run([request])
    made = [token.id for token in request.events]
    strokes = tuple(seen[0].strokes)
    decodes = [one for one in strokes if one.stroke == "decode"]
    entries = sum(len(some) for some in (*decodes[-1].given, *decodes[-1].made)) if decodes else 0
    return CacheMap(
        method.name,
        method_facts(method),
        strokes,
        method_facts(request.result),
        entries,
        len(prompt) + max(0, len(made) - 1),
        llm.tokenizer.decode(made),
    )


class _Recorder:
    """Follows a program's strokes and remembers who made which entry."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._owners: dict[bytes, str] = {}
        self._last: dict[bytes, int] = {}  # the entries of the value decoded from last, with their positions
        self._decoded = False
        self.strokes: list[CacheStroke] = []

    def answer(self, asked: Any) -> Program:
        """Strokes of a program (`strokes.driven`), recorded when their results are there."""
        strokes = asked if isinstance(asked, list) else [asked]
        given = [self._given(stroke) for stroke in strokes]
        value = yield asked
        for stroke, before, result in zip(strokes, given, value if isinstance(asked, list) else [value], strict=True):
            self._record(stroke, before, result)
        return value

    def _given(self, stroke: Stroke) -> dict[bytes, int]:
        if isinstance(stroke, Decode):
            return _entries(stroke.kv)
        if isinstance(stroke, Prefill) and stroke.after is not None:
            return _entries(stroke.after)
        return {}

    def _record(self, stroke: Stroke, given: dict[bytes, int], result: Any) -> None:
        if isinstance(stroke, Prefill):
            kv, tokens, rounds = result.kv if isinstance(result, Prefilled) else result, stroke.tokens, []
        elif isinstance(stroke, Decode) and isinstance(result, Decoded):
            kv, tokens, rounds = result.kv, result.tokens, [*result.rounds]
            if stroke.guesses:
                rounds = [GuessRound(stroke.guesses, common_prefix_length(stroke.guesses, tokens))]
        else:
            return
        role, after = stroke.model or MAIN, _entries(kv)
        for entry in after:
            self._owners.setdefault(entry, role)
        dropped: dict[bytes, int] = {}
        if isinstance(stroke, Decode):
            dropped = {entry: at for entry, at in self._last.items() if entry not in given}
        if isinstance(stroke, Decode) or not self._decoded:
            self._last = after
        self._decoded = self._decoded or isinstance(stroke, Decode)
        tokenizer, first = self._llm.tokenizer, kv.next_position
        self.strokes.append(
            CacheStroke(
                "prefill" if isinstance(stroke, Prefill) else "decode",
                role,
                self._spans(given),
                self._spans(dropped),
                self._spans({entry: at for entry, at in after.items() if entry not in given}),
                first,
                shown_tokens(tokenizer, tokens),
                tuple(
                    GuessedToken(token, i < one.stood)
                    for one in rounds
                    for i, token in enumerate(shown_tokens(tokenizer, one.guesses))
                ),
            )
        )

    def _spans(self, entries: dict[bytes, int]) -> tuple[EntryRange, ...]:
        """Runs of entries with one owner at consecutive positions."""
        runs: list[EntryRange] = []
        for entry, at in sorted(entries.items(), key=lambda item: item[1]):
            owner = self._owners.get(entry, MAIN)
            if runs and runs[-1].owner == owner and runs[-1].stop == at:
                runs[-1] = EntryRange(owner, runs[-1].start, at + 1)
            else:
                runs.append(EntryRange(owner, at, at + 1))
        return tuple(runs)


def _entries(kv: KVCache) -> dict[bytes, int]:
    """The bits of each entry, with its position."""
    keys = list(kv.keys(max(kv.pool.geometry.groups[0].layers)))
    return {key.tobytes() + at.to_bytes(8): at for key, at in zip(keys, kv.positions, strict=True)}
