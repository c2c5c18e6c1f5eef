"""DuoAttention: which heads retrieve, what the others see, and that it is measured once."""

import json
import random
import string
from pathlib import Path

import numpy as np
import pytest

from tests.methods.test_passages import Native
from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_weights
from twostroke.methods import DuoAttention, Plain, method
from twostroke.methods.duo_attention import TOKENS, measured, place

LONG = PROMPT * 4


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    measured.cache_clear()


def kept(llm: LLM, technique: DuoAttention) -> list[list[list[int]]]:
    """The entries of the prompt that each head decodes from."""
    _, (run,), _ = runs_of(llm, technique, LONG, max_tokens=4)
    slots = run.kv.head_positions
    assert slots is not None
    sees = np.ones(slots.shape, bool) if run.kv.bias is None else run.kv.bias == 0
    rows = [[head[own].tolist() for head, own in zip(*both, strict=True)] for both in zip(slots, sees, strict=True)]
    assert all(head[-3:] == [len(LONG), len(LONG) + 1, len(LONG) + 2] for layer in rows for head in layer)
    return [[head[:-3] for head in layer] for layer in rows]


@needs_native
def test_retrieval_heads_see_everything_and_others_the_ends(native_llm: Native) -> None:
    llm = native_llm()
    ends = [*range(2), *range(len(LONG) - 5, len(LONG))]
    heads = [head for layer in kept(llm, DuoAttention(retrieval=0.5, sinks=2, recent=5)) for head in layer]
    assert sorted(map(len, heads)) == [len(ends)] * 3 + [len(LONG)] * 3
    assert all(head in (ends, list(range(len(LONG)))) for head in heads)
    assert kept(llm, DuoAttention(retrieval=0, sinks=2, recent=5)) == [[ends, ends]] * 3


@needs_native
def test_heads_are_ranked_by_what_they_could_copy(native_llm: Native) -> None:
    llm = native_llm()
    rows = kept(llm, DuoAttention(retrieval=0.5, sinks=2, recent=5))
    everything = np.array([[len(head) == len(LONG) for head in layer] for layer in rows])
    (file,) = place("x").parent.iterdir()
    worth = measured(file.name.removesuffix(f"-{TOKENS}.json"), everything.shape)
    assert worth is not None
    assert worth[everything].min() >= worth[~everything].max()
    # By hand: what the second copy's tokens attend to in the first, at the same token and at the next.
    drawn = random.Random(0)
    words = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 6))) for _ in range(400)]
    once = llm.tokenizer.encode(" ".join(words), add_bos=False)[:TOKENS]
    made = queried(llm, once * 2, len(once))
    for layer, weights in enumerate(attention_weights(made.kv, made.queries)):
        copied = [float(sum(head[i, i] + head[i, i + 1] for i in range(len(once)))) / len(once) for head in weights]
        expected = np.array(copied).reshape(worth.shape[1], -1).max(-1)
        np.testing.assert_allclose(worth[layer], expected, rtol=1e-5)


@needs_native
def test_it_is_measured_once_and_damage_is_measured_again(native_llm: Native) -> None:
    technique = DuoAttention(retrieval=0.5, sinks=2, recent=5)
    llm = native_llm()
    first = runs_of(llm, technique, LONG)[0]
    (file,) = place("x").parent.iterdir()
    known = file.read_bytes()
    for damage in (b"[[1, 2]]", b"{", b"null"):
        file.write_bytes(damage)
        measured.cache_clear()
        assert runs_of(llm, technique, LONG)[0] == first
        assert file.read_bytes() == known
    file.write_text(json.dumps([[-value for value in row] for row in json.loads(known)]))
    measured.cache_clear()
    assert runs_of(llm, technique, LONG)[0] != first, "it is read, not measured again"


@needs_native
@pytest.mark.parametrize("technique", [DuoAttention(retrieval=1, sinks=2, recent=5), DuoAttention()], ids=repr)
def test_with_everything_seen_it_is_the_plain_request(technique: DuoAttention, native_llm: Native) -> None:
    llm = native_llm()
    assert runs_of(llm, technique, LONG)[0] == runs_of(llm, Plain(), LONG)[0]


def test_bad_parameters_are_one_line() -> None:
    with pytest.raises(InvalidRequest, match="retrieval must be a number from 0 to 1"):
        method("duo-attention", retrieval=2)
