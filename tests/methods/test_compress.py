"""Prompt compression: the paper's two algorithms by hand, and what must never be dropped."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.watching import needs_native, runs_of
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import Compress, Plain, Prompt, method
from twostroke.methods.compress import Compression
from twostroke.methods.prompt_passages import parted
from twostroke.sampling.params import SamplingParams

Native = Callable[..., LLM]
PASSAGES = ["the quick brown fox jumps", "over the lazy dog and then 42", "the cat and the dog jump over it", "who?"]
TEXT = "\n\n".join(PASSAGES)


def surprise(llm: LLM, before: Sequence[int], tokens: Sequence[int], model: str | None = None) -> list[float]:
    """-log p of each token, read behind the tokens before it in one prefill."""

    def program() -> Program:
        return (yield Prefill([*before, *tokens], logprobs=0, scored_from=len(before), model=model))

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return [np.inf if score is None else -score.logprob for score in request.result.scores]


def by_hand(llm: LLM, asked: Prompt, parts: Sequence[range], room: int, segment: int, model: str | None) -> list[int]:
    """Algorithm 2 over passages that all stay: every segment is read again behind the compressed text.

    Line breaks stay; the texts here have them only behind passages.
    """
    kept: list[int] = []
    left, done = sum(map(len, parts)), 0
    for part in parts:
        kept += asked[done : part.start]
        for start in range(part.start, part.stop, segment):
            tokens = asked[start : min(part.stop, start + segment)]
            worth = surprise(llm, kept, tokens, model)
            breaks = [llm.tokenizer.token_text(token) == "\n" for token in tokens]
            worth = [np.inf if at_end else one for one, at_end in zip(worth, breaks, strict=True)]
            count = max(round(room * len(tokens) / left), worth.count(np.inf))
            stay = sorted(sorted(range(len(tokens)), key=lambda i: -worth[i])[:count])
            kept += [tokens[i] for i in stay]
            room, left = max(0, room - count), left - len(tokens)
        done = part.stop
    return [*kept, *asked[done:]]


@needs_native
@pytest.mark.parametrize("scorer", ["self", "student", "draft"])
@pytest.mark.parametrize("segment", [5, 100])
def test_the_tokens_that_stay(scorer: str, segment: int, native_llm: Native) -> None:
    llm = native_llm(student="int2", draft="int4")
    asked = Prompt(llm.tokenizer.encode(TEXT), llm.tokenizer)
    technique = Compress(0.6, scorer=scorer, segment=segment, numbers=False)
    made, (run,), facts = runs_of(llm, technique, list(asked))
    parts = technique.passages(asked)
    room = round(0.6 * len(asked)) - (len(asked) - sum(map(len, parts)))
    expected = by_hand(llm, asked, parts, room, segment, technique.model)
    assert len(expected) == round(0.6 * len(asked))
    assert run.kv.tokens[: len(expected)] == expected
    assert run.kv.positions == list(range(len(run.kv)))
    assert (facts.dropped_tokens, facts.dropped_passages) == (len(asked) - len(expected), 0)
    plain, (same,), _ = runs_of(llm, Plain(), expected)
    assert made == plain, "it is the plain request of what is left"
    assert (run.kv.entries() == same.kv.entries()).all()
    assert run.kv.canonical_length(llm.model.id) == len(run.kv)


@needs_native
def test_passages_of_low_perplexity_go_first(native_llm: Native) -> None:
    llm = native_llm()
    asked = Prompt(llm.tokenizer.encode(TEXT), llm.tokenizer)
    technique = Compress(budget=20, slack=1, numbers=False)
    parts = technique.passages(asked)
    assert [llm.tokenizer.decode(asked[part.start : part.stop]).strip() for part in parts] == PASSAGES[:-1]
    ranked = sorted(parts, key=lambda part: -np.mean(surprise(llm, [], asked[part.start : part.stop])[1:]))
    room = 20 - (len(asked) - sum(map(len, parts)))
    stay: list[range] = []
    for part in ranked:
        if sum(map(len, stay)) > room:
            break
        stay.append(part)
    assert 0 < len(stay) < len(parts)
    _, (run,), facts = runs_of(llm, technique, list(asked))
    assert facts.dropped_passages == len(parts) - len(stay)
    gone = {i for part in parts if part not in stay for i in part}
    without = Prompt([token for i, token in enumerate(asked) if i not in gone], llm.tokenizer)
    places = [range(one.start - sum(i < one.start for i in gone), one.stop - sum(i < one.stop for i in gone))
              for one in sorted(stay, key=lambda part: part.start)]  # fmt: skip
    assert run.kv.tokens[:20] == by_hand(llm, without, places, room, 100, None)
    assert len(asked) - facts.dropped_tokens == 20


@needs_native
@pytest.mark.parametrize("technique", [Compress(1.0), Compress(budget=4096), Compress(0.01, last=9)])
def test_with_room_for_everything_it_is_the_plain_request(technique: Compress, native_llm: Native) -> None:
    llm = native_llm()
    ids = llm.tokenizer.encode(TEXT)
    made, (run,), facts = runs_of(llm, technique, ids)
    expected, (plain,), _ = runs_of(llm, Plain(), ids)
    assert made == expected
    assert (run.kv.entries() == plain.kv.entries()).all()
    assert facts == Compression(0, 0, 0)


MESSAGES = [
    {"role": "system", "content": "be very brief and the lazy dog sleeps"},
    {"role": "user", "content": "the fox jumps over the dog\n\nthe answer is 3,141 of them"},
    {"role": "assistant", "content": "the brown dog jumps over the lazy cat"},
    {"role": "user", "content": "a long text of the fox and the cat Alice\n\nwho jumps over the dog?"},
]


def test_a_chat_stays_a_chat(tiny_llm: Callable[..., LLM]) -> None:
    """Whatever the budget: template, system message, question, numbers and named texts are whole, in order."""
    llm = tiny_llm()
    for budget in (1, 60, 90):
        # Half of a surrogate pair is in no text.
        technique = method("compress", budget=budget, keep=["cat Alice", "\ud800"], segment=7)
        asked = llm.chat_prompt(MESSAGES)
        _, (run, *_), facts = runs_of(llm, technique, asked, max_tokens=1)
        kept = llm.tokenizer.decode(run.kv.tokens, skip_special=False)
        assert kept.startswith("[system]be very brief and the lazy dog sleeps</s>[user]")
        roles = ["[system]", "</s>[user]", "</s>[assistant]", "</s>[user]", "cat Alice", "who jumps over the dog?"]
        places = [0]
        for one in [*roles, "</s>[assistant]"]:
            places.append(kept.index(one, places[-1]) + len(one))
        assert places[-1] == len(kept)
        assert "3,141" in kept or facts.dropped_passages
        assert facts.dropped_tokens == len(asked) - len(run.kv.tokens)
        assert facts.dropped_tokens > 0


def test_special_tokens_in_a_text_stay(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    ids = llm.tokenizer.encode("the fox</s>jumps over the dog\n\nwho?")
    _, (run,), _ = runs_of(llm, Compress(budget=1), ids, max_tokens=1)
    assert run.kv.tokens.count(1) == ids.count(1) == 1


def test_a_chat_knows_the_texts_of_its_messages(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    asked = llm.chat_prompt(MESSAGES)
    found = [(role, llm.tokenizer.decode(asked[part.start : part.stop])) for role, part in asked.contents]
    assert found == [(one["role"], one["content"]) for one in MESSAGES]
    assert asked.contents[-1] == ("user", asked.turn)
    assert llm.chat_prompt([{"role": "user", "content": ""}]).contents == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([b"a", b" ", b"\n", b"\n\n", b"b\n", b""]), max_size=20))
def test_passages_are_a_partition(pieces: list[bytes]) -> None:
    part = range(3, 3 + len(pieces))
    found = parted(part, pieces)
    assert [i for one in found for i in one] == list(part)
    assert all(found)
    for one in found[:-1]:
        assert b"\n" in b"".join(pieces[: one.stop - 3])[-2:]


def test_the_scorer_must_be_there(tiny_llm: Callable[..., LLM]) -> None:
    with pytest.raises(InvalidRequest, match="method compress needs a draft"):
        tiny_llm().generate([[5, 6]], method=Compress(scorer="draft"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"ratio": 0}, "ratio must be a number above 0 and at most 1"),
        ({"ratio": 1.5}, "ratio must be"),
        ({"budget": 0}, "budget must be an integer of at least 1"),
        ({"scorer": "other"}, "scorer must be one of self, student, draft"),
        ({"keep": [3]}, "keep must be texts, at most 64"),
        ({"keep": ["a"] * 65}, "keep must be texts, at most 64"),
        ({"keep": ""}, "keep must be texts"),
        ({"slack": 0.5}, "slack must be"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("compress", **parameters)
