"""Passages joined in any order: the value by hand, what comes from the prefix index, and the error that is reported."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods.watching import needs_native, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.methods import Passages, Plain, method
from twostroke.methods.passages import Joining
from twostroke.sampling.params import SamplingParams

Native = Callable[..., LLM]
WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "and then the cat jumps over the dog",
    "a dog and a fox and a cat",
]
QUESTION = "who jumps over the dog?"
ASKED = SamplingParams(max_tokens=8, ignore_eos=True)


def prompt(llm: LLM, *texts: str) -> list[int]:
    return llm.tokenizer.encode("\n\n".join([*texts, QUESTION]))


def parts_of(ids: list[int], llm: LLM) -> list[list[int]]:
    """A prompt cut behind its blank lines."""
    found: list[list[int]] = [[]]
    for token in ids:
        found[-1].append(token)
        if "".join(map(llm.tokenizer.token_text, found[-1])).endswith("\n\n"):
            found.append([])
    return found


@needs_native
@pytest.mark.parametrize("mend", [0, 3])
def test_the_value_by_hand(mend: int, native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    ids = prompt(llm, *WORDS)
    *passages, question = parts_of(ids, llm)
    assert len(passages) == 3
    _, (run,), facts = runs_of(llm, Passages(mend=mend, least=4), ids)
    kv = llm.prefill(passages[0])
    for passage in passages[1:]:
        kv = llm.prefill(passage[:mend], kv) if mend else kv
        kv += llm.prefill(passage)[mend:].at(kv.next_position)
    kv = llm.prefill(question, kv)
    assert run.kv[: len(ids)].tokens == kv.tokens == ids
    assert run.kv[: len(ids)].entries().tobytes() == kv.entries().tobytes()
    assert run.kv.positions == list(range(len(run.kv)))
    assert run.kv.canonical_length(llm.model.id) == len(passages[0]) + mend
    rest = sum(map(len, passages[1:]))
    assert facts == Joining(3, rest - 2 * mend, 2 * mend)


@needs_native
def test_all_mended_is_the_plain_request(native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    ids = prompt(llm, *WORDS)
    made, (run,), facts = runs_of(llm, Passages(mend=1000, least=4), ids)
    plain, (same,), _ = runs_of(llm, Plain(), ids)
    assert made == plain
    assert run.kv.entries().tobytes() == same.kv.entries().tobytes()
    assert facts.moved_tokens == 0


@needs_native
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_passages_come_from_the_index_in_any_order(index: str, native_llm: Native) -> None:
    llm = native_llm(prefix_index=index)
    technique, texts = Passages(mend=2, least=4), [f"{one} " * 12 for one in WORDS]
    first = llm.generate([prompt(llm, *texts)], ASKED, method=technique)[0]
    again = prompt(llm, *texts[::-1])
    hit = llm.generate([again], ASKED, method=technique)[0]
    cold = native_llm(prefix_index="off").generate([again], ASKED, method=technique)[0]
    assert first.cached_tokens == 0
    assert hit.cached_tokens > 0.7 * len(again)
    assert list(hit.tokens) == list(cold.tokens)


@needs_native
def test_the_error_is_that_to_a_plain_prefill(native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    ids = prompt(llm, *WORDS)

    def logprobs(kv: KVCache) -> np.ndarray:
        assert kv.tail is not None
        logits = np.asarray(kv.tail.logits, np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    *passages, question = parts_of(ids, llm)
    kv = llm.prefill(passages[0])
    for passage in passages[1:]:
        kv += llm.prefill(passage).at(kv.next_position)
    p, q = logprobs(llm.prefill(ids)), logprobs(llm.prefill(question, kv))
    expected = float((np.exp(p) * (p - q)).sum())
    _, _, facts = runs_of(llm, Passages(mend=0, least=4, checked=1), ids)
    assert facts.kl == pytest.approx(expected, rel=1e-6)
    assert facts.kl > 1e-4
    assert not facts.plain
    exact, _, below = runs_of(llm, Passages(mend=0, least=4, checked=1, bound=facts.kl / 2), ids)
    assert below.plain
    assert exact == runs_of(llm, Plain(), ids)[0]
    assert not runs_of(llm, Passages(mend=0, least=4, checked=1, bound=2 * facts.kl), ids)[2].plain


@needs_native
def test_a_share_is_checked_always_the_same(native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    technique = Passages(least=4, checked=0.5)
    prompts = [prompt(llm, *WORDS, "a dog " * (i + 2)) for i in range(24)]
    found = [runs_of(llm, technique, ids)[2].kl is not None for ids in prompts]
    assert 4 <= sum(found) <= 20
    assert found[:6] == [runs_of(llm, technique, ids)[2].kl is not None for ids in prompts[:6]]


@needs_native
def test_a_prompt_of_one_passage_is_plain(native_llm: Native) -> None:
    llm = native_llm()
    ids = prompt(llm, WORDS[0])
    made, _, facts = runs_of(llm, Passages(least=4), ids)
    assert (facts, made) == (Joining(0), runs_of(llm, Plain(), ids)[0])


@pytest.mark.parametrize(
    ("option", "words"),
    [({"mend": -1}, "mend"), ({"least": 0}, "least"), ({"last": 0}, "last"), ({"checked": 1.5}, "checked"),
     ({"bound": -1}, "bound"), ({"mend": "many"}, "mend")],
)  # fmt: skip
def test_bad_options_are_one_line(option: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"passages: .*{words}"):
        method("passages", **option)
