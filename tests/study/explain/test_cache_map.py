"""What techniques do to the cache: whose entries a stroke is given, and what is dropped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.methods.watching import PROMPT
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.methods import Prompt, method
from twostroke.sampling.params import SamplingParams
from twostroke.study.explain.cache_map import CacheMap, EntryRange, cache_map

TinyLLM = Callable[..., LLM]
N = len(PROMPT)


@pytest.fixture
def student(tmp_path: Path) -> str:
    return str(write_model("llama", tmp_path / "student", seed=1))


def followed(llm: LLM, name: str, most: int = 8, **options: Any) -> CacheMap:
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    made = cache_map(llm, Prompt(PROMPT, llm.tokenizer), params, method(name, **options))
    (plain,) = llm.generate([PROMPT], params, method=method(name, **options))
    assert made.text == plain.text
    return made


def test_plain(tiny_llm: TinyLLM) -> None:
    prefill, decode = followed(tiny_llm(), "plain").strokes
    assert (prefill.given, prefill.made, prefill.dropped) == ((), (EntryRange("main", 0, N),), ())
    assert [token.id for token in prefill.tokens] == PROMPT
    assert (decode.given, decode.made) == ((EntryRange("main", 0, N),), (EntryRange("main", N, N + 7),))
    assert len(decode.tokens) == 8


def test_repeat_shows_the_slice(tiny_llm: TinyLLM) -> None:
    made = followed(tiny_llm(), "repeat", sinks=2)
    prefill, decode = made.strokes
    assert prefill.made == (EntryRange("main", 0, 2 * N),)
    assert decode.given == (EntryRange("main", 0, 2), EntryRange("main", N, 2 * N))
    assert decode.dropped == (EntryRange("main", 2, N),)
    assert decode.made == (EntryRange("main", 2 * N, 2 * N + 7),)
    assert made.entries == N + 2 + 7
    assert made.plain_entries == N + 7
    assert made.parameters["sinks"] == 2


def test_overfill_shows_whose_entries(tiny_llm: TinyLLM, student: str) -> None:
    _, decode = followed(tiny_llm(student=student), "overfill").strokes
    assert (decode.model, decode.given) == ("student", (EntryRange("main", 0, N),))
    assert decode.made == (EntryRange("student", N, N + 7),)
    _, decode = followed(tiny_llm(student=student), "overfill", recompute=True).strokes
    assert decode.made == (EntryRange("student", N - 1, N + 7),)


def test_refresh_shows_what_was_replaced(tiny_llm: TinyLLM, student: str) -> None:
    made = followed(tiny_llm(student=student), "refresh", every=4)
    first, run, refreshed, again = made.strokes
    assert (first.model, refreshed.model) == ("main", "main")
    assert run.made == (EntryRange("student", N, N + 3),)
    assert refreshed.made == (EntryRange("main", N, N + 3),)
    assert again.given == (EntryRange("main", 0, N + 3),)
    assert again.dropped == (EntryRange("student", N, N + 3),)
    assert again.made[0] == EntryRange("student", N + 3, N + 7)
    assert made.facts["teacher_tokens"] == 3


def test_speculative_shows_guesses(tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]) -> None:
    """With the model itself as its draft every guess is right; with a stranger, a wrong one ends the stroke."""
    llm = tiny_llm(draft=str(tiny_directory("llama")))
    made = followed(llm, "speculative", draft="draft", guesses=3, adaptive=False)
    judged = [one for one in made.strokes if one.stroke == "decode" and one.model == "main" and one.guesses]
    assert judged
    assert all(guess.kept for one in judged for guess in one.guesses)
    assert made.facts["accepted"] == made.facts["guessed"] == sum(len(one.guesses) for one in judged)


def test_wrong_guesses_are_dropped(tiny_llm: TinyLLM, student: str) -> None:
    made = followed(tiny_llm(draft=student), "speculative", draft="draft", guesses=3, adaptive=False)
    judged = [one for one in made.strokes if one.guesses]
    kept = sum(guess.kept for one in judged for guess in one.guesses)
    assert kept == made.facts["accepted"] < made.facts["guessed"]
    for one in judged:
        flags = [guess.kept for guess in one.guesses]
        assert flags == sorted(flags, reverse=True), "behind a wrong guess nothing is kept"
        assert len(one.tokens) == sum(flags) + 1 or made.strokes[-1] is one
