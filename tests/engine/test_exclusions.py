"""Tokens and words that an answer must not have, and what its text shows of its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.sampling.exclusions import Exclusions
from twostroke.sampling.params import SamplingParams

PROMPTS = ["the quick brown", "a"]
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(native_directory: Path) -> LLM:
    return LLM(str(native_directory), kv_bytes=16 << 20, threads=1)


def answers(llm: LLM, **sampling: Any) -> list[list[int]]:
    return [[token.id for token in made.tokens] for made in llm.generate(PROMPTS, **(SAMPLED | sampling))]


def test_allowed_token_ids(llm: LLM) -> None:
    some = (5, 17, 300)
    for temperature in (0.0, 1.0):
        made = answers(llm, allowed_token_ids=some, temperature=temperature)
        assert {id for answer in made for id in answer} <= set(some)
        fields: Any = SAMPLED | {"allowed_token_ids": some, "temperature": temperature}
        assert [token.id for token in llm.generate(PROMPTS[:1], **fields)[0].tokens] == made[0]
    everything = tuple(range(llm.config.vocab_size))
    assert answers(llm, allowed_token_ids=everything) == answers(llm)
    with pytest.raises(InvalidRequest, match="allowed_token_ids must be ids below"):
        answers(llm, allowed_token_ids=(5, 999999))


def test_bad_words(llm: LLM) -> None:
    plain = answers(llm)[0]
    one, two = llm.tokenizer.token_text(plain[0]), plain[4:6]
    assert plain[0] not in answers(llm, bad_words=(one,))[0]
    word = "".join(map(llm.tokenizer.token_text, two))
    if llm.tokenizer.encode(word, add_bos=False) == two:
        made = answers(llm, bad_words=(word,))[0]
        assert made[:5] == plain[:5]
        assert made[5] != plain[5]
    assert answers(llm, bad_words=("zebra crossing",))[0] == plain


def test_a_word_of_several_tokens() -> None:
    """Its last token is excluded behind the others, and nowhere else; also with a space before it."""
    spelled = {"ab": [1, 2], " ab": [7, 2], "c": [3], " c": [3], "d": [4], " d": [8, 9]}
    params = SamplingParams(bad_words=("ab", " c", "d"))
    exclusions = Exclusions(params, spelled.__getitem__)
    for ids, excluded in (([], {3, 4}), ([1], {2, 3, 4}), ([5, 7], {2, 3, 4}), ([1, 5], {3, 4})):
        assert set(np.flatnonzero(~exclusions.mask(ids, 10, None)).tolist()) == excluded
    grammar = np.array([True, False, True, True])
    assert exclusions.mask([1], 10, grammar).tolist() == [True, False, False, False]
    with pytest.raises(InvalidRequest, match="leave no token"):
        exclusions.mask([], 10, np.array([False, False, False, True]))


def test_nothing_is_left(llm: LLM) -> None:
    """The request fails alone."""
    word = llm.tokenizer.token_text(270)
    with pytest.raises(InvalidRequest, match="leave no token"):
        llm.generate(["a"], allowed_token_ids=(270,), bad_words=(word,), max_tokens=3)
    assert len(answers(llm)[0]) == 24


def test_stop_strings_in_the_text(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[:1], **SAMPLED)[0].text
    stop = whole[6:9]
    at = whole.index(stop)
    cut = llm.generate(PROMPTS[:1], stop=(stop,), **SAMPLED)[0]
    shown = llm.generate(PROMPTS[:1], stop=(stop,), include_stop_str_in_output=True, **SAMPLED)[0]
    assert (cut.text, shown.text) == (whole[:at], whole[: at + len(stop)])
    assert [token.id for token in cut.tokens] == [token.id for token in shown.tokens]


def test_special_tokens_in_the_text(llm: LLM) -> None:
    bias = {llm.tokenizer.bos_id or 0: 100.0}
    for skip, text in ((True, ""), (False, "<s><s><s>")):
        made = llm.generate(["a"], max_tokens=3, logit_bias=bias, skip_special_tokens=skip, ignore_eos=True)[0]
        assert made.text == text


def test_in_every_backend(tiny_directory: Callable[[str], Path]) -> None:
    other = LLM(str(tiny_directory("llama")), backend="reference", kv_bytes=16 << 20, threads=1)
    assert {id for answer in answers(other, allowed_token_ids=(5, 17)) for id in answer} <= {5, 17}
