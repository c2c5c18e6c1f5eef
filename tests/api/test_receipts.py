"""Receipts: an answer that comes out again has the same bits, and every forgery is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.methods.watching import needs_native
from tests.watching import entered_rows
from twostroke.api.llm import LLM
from twostroke.api.receipt_check import verify
from twostroke.api.receipts import STRETCH, Receipt, digest
from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams
from twostroke.server.grammar import Grammars, choice

PROMPT = [5, 9, 17, 33, 65, 129, 200, 11, 4, 7, 250, 3, 90, 21, 8, 77, 41, 30, 12]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate home, so that no key is made in this user's."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def llm(tiny_directory: Callable[[str], Path]) -> LLM:
    return LLM(str(tiny_directory("qwen3")), kv_bytes=8 << 20, threads=1)


def receipt_of(llm: LLM, **params: Any) -> Receipt:
    chosen: dict[str, Any] = {"max_tokens": 80, "logprobs": 0} | params
    request = llm.request(PROMPT, SamplingParams(**chosen))
    llm.engine.run([request])
    return Receipt.of(llm, PROMPT, request, list(request.events))


@needs_native
@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": True},
        DRAWN,
        DRAWN | {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
        DRAWN | {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "min_tokens": 9},
        {"temperature": 1.0, "stop_token_ids": (80, 81, 82, 83), "max_tokens": 200},
        {"ignore_eos": True, "max_tokens": 1},
        {"ignore_eos": True, "max_tokens": None},
    ],
    ids=range(7),
)
def test_the_same_bits(llm: LLM, params: dict[str, Any], tmp_path: Path) -> None:
    """Alone, beside others, and in a file."""
    made = receipt_of(llm, **params)
    made.save(tmp_path / "receipt.json")
    assert Receipt.load(tmp_path / "receipt.json") == made
    others = [llm.engine.submit(llm.request([7] * 50, SamplingParams(max_tokens=60, ignore_eos=True))) for _ in "ab"]
    found = verify(llm, made)
    assert (found.wrong, found.sealed) == (None, True)
    llm.engine.finish(others)


@needs_native
def test_a_check_takes_few_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = receipt_of(llm, **DRAWN, max_tokens=200)
    passes = entered_rows(llm, monkeypatch)
    assert verify(llm, made).wrong is None
    assert len(passes) <= 2 + 200 // 50


def resealed(made: Receipt, **changes: Any) -> Receipt:
    """A forgery by somebody who makes all digests anew, but has no key."""
    changed = replace(made, **changes)
    return replace(changed, prompt_digest=digest(list(changed.prompt)), options_digest=digest(changed.options))


FORGERIES: dict[str, tuple[Callable[[Receipt], Receipt], str]] = {
    "a token": (lambda r: replace(r, tokens=(*r.tokens[:40], r.tokens[40] ^ 1, *r.tokens[41:])), "token 40 differs"),
    "the last token": (lambda r: replace(r, tokens=(*r.tokens[:-1], r.tokens[-1] ^ 1)), "token 79 differs"),
    "tokens left out": (lambda r: resealed(r, tokens=r.tokens[:64], logprobs=r.logprobs[:2]), "it goes on"),
    "tokens added": (lambda r: replace(r, tokens=(*r.tokens, 7, 8)), "ends after 80"),
    "digests left out": (lambda r: replace(r, logprobs=r.logprobs[:1]), "the tokens were altered"),
    "the prompt": (lambda r: replace(r, prompt=(*r.prompt[:-1], 13)), "the prompt was altered"),
    "the prompt and its digest": (lambda r: resealed(r, prompt=(*r.prompt[:-1], 13)), "differs"),
    "an option": (lambda r: replace(r, options=r.options | {"temperature": 0.5}), "the options were altered"),
    "an option and its digest": (lambda r: resealed(r, options=r.options | {"temperature": 0.2}), "differs"),
    "the seed and its digest": (lambda r: resealed(r, options=r.options | {"seed": 4}), "token 0 differs"),
    "log-probabilities": (
        lambda r: replace(r, logprobs=(r.logprobs[0], "0" * 32, *r.logprobs[2:])),
        f"the log-probabilities of tokens {STRETCH} to {2 * STRETCH - 1} differ",
    ),
    "which answer": (lambda r: resealed(r, options=r.options | {"choice": 1}), "token 0 differs"),
    "the end": (lambda r: replace(r, finish_reason="stop"), "ends with length"),
    "the identity": (lambda r: replace(r, identity="0" * 32), "other weights"),
}


@needs_native
@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_named(llm: LLM, name: str) -> None:
    forge, word = FORGERIES[name]
    made = receipt_of(llm, **DRAWN)
    found = verify(llm, forge(made))
    assert found.wrong is not None
    assert word in found.wrong
    assert found.sealed is False, "whoever has no key makes no seal"


@needs_native
def test_an_answer_that_follows_a_grammar(llm: LLM) -> None:
    """Its grammar is a part of it: another one is named, and so is none."""
    grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
    made = receipt_of(llm, temperature=1.0, seed=3, constraint=grammars.compile(choice(["fox", "foxes"])))
    assert verify(llm, made, grammars.remake).wrong is None
    other = {"text": choice(["dog"]), "json_after": None}
    assert "differs" in (
        verify(llm, resealed(made, options=made.options | {"grammar": other}), grammars.remake).wrong or ""
    )
    free = resealed(made, options={name: value for name, value in made.options.items() if name != "grammar"})
    assert verify(llm, free, grammars.remake).wrong is not None
    for bad in (7, {"text": 1, "json_after": None}, {"text": "x"}):
        with pytest.raises(InvalidRequest, match="grammar"):
            verify(llm, resealed(made, options=made.options | {"grammar": bad}), grammars.remake)
    with pytest.raises(InvalidRequest, match="follows a grammar"):
        verify(llm, made)


def test_other_weights_and_another_arithmetic(llm: LLM, tiny_directory: Callable[[str], Path]) -> None:
    made = receipt_of(llm, **DRAWN)
    other = LLM(str(tiny_directory("qwen3")), kv_bytes=8 << 20, threads=1, weights="int8")
    assert "it was made by other weights" in (verify(other, made).wrong or "")
    if llm.backend.label != "reference":
        reference = LLM(str(tiny_directory("qwen3")), kv_bytes=8 << 20, backend="reference")
        found = verify(reference, made)
        assert "another arithmetic" in (found.wrong or "")
        assert (found.sealed, found.seconds) == (True, None)


def test_a_seal_of_another_key(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = receipt_of(llm, **DRAWN)
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "other"))
    assert verify(llm, made).sealed is False
    assert verify(llm, replace(made, seal=None)).sealed is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"receipt": null}', "[" * 10**5, '{"format": "twostroke-receipt-1"}', "changed"]
)
def test_what_is_no_receipt(llm: LLM, tmp_path: Path, text: str) -> None:
    value = receipt_of(llm, max_tokens=2).as_json() | {"tokens": ["a"]}
    (tmp_path / "file").write_text(json.dumps(value) if text == "changed" else text)
    with pytest.raises(InvalidRequest, match="this is no receipt"):
        Receipt.load(tmp_path / "file")


def test_the_response_that_it_came_in(llm: LLM, tmp_path: Path) -> None:
    made = receipt_of(llm, max_tokens=2)
    file, value = tmp_path / "file", made.as_json()
    for around in ({"receipt": value}, {"receipts": [value, value]}, {"response": {"receipt": value}}):
        file.write_text(json.dumps(around))
        assert Receipt.load(file) == made


def test_an_answer_without_a_receipt(llm: LLM) -> None:
    request = llm.request(PROMPT, SamplingParams(max_tokens=3))
    llm.engine.run([request])
    with pytest.raises(InvalidRequest, match="has log-probabilities"):
        Receipt.of(llm, PROMPT, request, list(request.events))
    with pytest.raises(InvalidRequest, match="options are none of a request"):
        verify(llm, resealed(receipt_of(llm), options={"warmth": 1}))
