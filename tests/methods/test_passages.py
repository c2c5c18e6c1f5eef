"""Passages joined in any order: the value by hand, what comes from the prefix index, and the error that is reported."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.methods.watching import needs_native, runs_of
from tests.watching import answers
from twostroke.api.llm import LLM
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.methods import Passages, Plain, Prompt, method
from twostroke.methods.deviation import stretches
from twostroke.methods.passages import Joining
from twostroke.models.checkpoints.chat_passages import PASSAGE, PassageTokens, encode_chat
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
@pytest.mark.parametrize("first", [0, 3])
def test_the_value_by_hand(first: int, native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    ids = prompt(llm, *WORDS)
    *passages, question = parts_of(ids, llm)
    assert len(passages) == 3
    _, (run,), facts = runs_of(llm, Passages(first=first, least=4), ids)
    kv = llm.prefill(passages[0])
    for passage in passages[1:]:
        kv = llm.prefill(passage[:first], kv) if first else kv
        kv += llm.prefill(passage)[first:].at(kv.next_position)
    kv = llm.prefill(question, kv)
    assert run.kv[: len(ids)].tokens == kv.tokens == ids
    assert run.kv[: len(ids)].entries().tobytes() == kv.entries().tobytes()
    assert run.kv.positions == list(range(len(run.kv)))
    assert run.kv.canonical_length(llm.model.id) == len(passages[0]) + first
    rest = sum(map(len, passages[1:]))
    assert replace(facts, deviation=None) == Joining(3, rest - 2 * first, 2 * first)
    assert (facts.deviation is None) == (not first)


@needs_native
def test_all_mended_is_the_plain_request(native_llm: Native) -> None:
    llm = native_llm(prefix_index="off")
    ids = prompt(llm, *WORDS)
    made, (run,), facts = runs_of(llm, Passages(first=1000, least=4), ids)
    plain, (same,), _ = runs_of(llm, Plain(), ids)
    assert made == plain
    assert run.kv.entries().tobytes() == same.kv.entries().tobytes()
    assert facts.moved_tokens == 0


@needs_native
def test_passages_come_from_the_index_in_any_order(native_llm: Native) -> None:
    llm = native_llm(prefix_index="radix")
    technique, texts = Passages(first=2, least=4), [f"{one} " * 12 for one in WORDS]
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
    _, _, facts = runs_of(llm, Passages(first=0, least=4, checked=1), ids)
    assert facts.kl == pytest.approx(expected, rel=1e-6)
    assert facts.kl > 1e-4
    assert not facts.plain
    exact, _, below = runs_of(llm, Passages(first=0, least=4, checked=1, bound=facts.kl / 2), ids)
    assert below.plain
    assert exact == runs_of(llm, Plain(), ids)[0]
    assert not runs_of(llm, Passages(first=0, least=4, checked=1, bound=2 * facts.kl), ids)[2].plain


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
    [({"first": -1}, "first"), ({"least": 0}, "least"), ({"last": 0}, "last"), ({"checked": 1.5}, "checked"),
     ({"bound": -1}, "bound"), ({"mend": "many"}, "epic, cacheblend"), ({"share": 1.1}, "share")],
)  # fmt: skip
def test_bad_options_are_one_line(option: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"passages: .*{words}"):
        method("passages", **option)


def v_distances(made: KVCache, own: KVCache) -> np.ndarray:
    one, other = (kv.entries(1)[1].astype(np.float64) for kv in (made, own))
    return ((one - other) ** 2).sum((1, 2))


@needs_native
def test_cacheblend_computes_again_what_deviates_most(native_llm: Native) -> None:
    llm = native_llm(draft="first-layers")
    ids = prompt(llm, *WORDS)
    *passages, question = parts_of(ids, llm)
    whole, own = llm.prefill(ids), [llm.prefill(one) for one in passages]
    starts = [len(passages[0]), len(passages[0]) + len(passages[1])]
    gaps = [v_distances(whole[at : at + len(kv)], kv) for at, kv in zip(starts, own[1:], strict=True)]
    least = np.sort(np.concatenate(gaps))[::-1][round(0.4 * sum(map(len, gaps))) - 1]
    kv, mended = own[0], 0
    for passage, alone, gap in zip(passages[1:], own[1:], gaps, strict=True):
        before, block, again = kv, alone.at(kv.next_position), gap >= least
        lead = list(again).index(False)
        before = llm.prefill(passage[:lead], before) if lead else before
        kv, place = before, lead
        for first, last in stretches(again):
            if first:
                fresh = llm.prefill(passage[first:last], before + block[lead:first])
                kv, place = kv + block[place:first] + fresh[len(fresh) - (last - first) :], last
        kv, mended = kv + block[place:], mended + int(again.sum())
    kv = llm.prefill(question, kv)
    _, (run,), facts = runs_of(llm, Passages(mend="cacheblend", share=0.4, least=4), ids)
    assert 0 < mended == facts.mended_tokens < sum(map(len, gaps))
    assert run.kv[: len(ids)].entries().tobytes() == kv.entries().tobytes()
    assert run.kv.tokens[: len(ids)] == ids
    assert facts.deviation > 0


@needs_native
def test_cacheblend_of_nothing_and_of_everything(native_llm: Native) -> None:
    llm = native_llm(draft="first-layers")
    ids = prompt(llm, *WORDS)
    for one, same in (
        (Passages(mend="cacheblend", share=1, least=4), Plain()),
        (Passages(mend="cacheblend", share=0, least=4), Passages(first=0, least=4)),
    ):
        made, (run,), _ = runs_of(llm, one, ids)
        expected, (other,), _ = runs_of(llm, same, ids)
        assert made == expected
        assert run.kv.entries().tobytes() == other.kv.entries().tobytes()


@needs_native
def test_cacheblend_needs_the_first_layers(native_llm: Native) -> None:
    llm = native_llm()
    with pytest.raises(InvalidRequest, match=r"needs a first-layers: open the model with one \(--draft first-layers"):
        llm.generate([prompt(llm, *WORDS)], ASKED, method=Passages(mend="cacheblend"))


@needs_native
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0)])
def test_named_passages_are_read_behind_nothing(order: tuple[int, ...], native_llm: Native) -> None:
    """Each has its own tokens wherever it stands, and its entries are those of its text as a prompt."""
    llm = native_llm(prefix_index="radix")
    named = [WORDS[index] for index in order]
    content = f"read {PASSAGE} and{PASSAGE}\n{PASSAGE}\n\n{QUESTION}"
    ids = encode_chat(llm.tokenizer, [{"role": "user", "content": content}], named, add_generation_prompt=True)
    assert isinstance(ids, PassageTokens)
    texts = [llm.tokenizer.encode(one, add_bos=False) for one in named]
    assert [ids[one.start : one.stop] for one in ids.passages] == texts
    [(role, said)] = ids.contents
    assert (role, llm.tokenizer.decode(ids[said.start : said.stop])) == (
        "user", f"read {named[0]} and{named[1]}\n{named[2]}\n\n{QUESTION}"
    )  # fmt: skip
    kv = KVCache.empty(llm.pool)
    for place, text in zip(ids.passages, texts, strict=True):
        kv = llm.prefill(ids[len(kv) : place.start + 3], kv)
        own = llm.prefill(Prompt(ids, llm.tokenizer).alone(place))
        kv += own[len(own) - len(text) + 3 :].at(kv.next_position)
    kv = llm.prefill(ids[len(kv) :], kv)
    _, (run,), facts = runs_of(llm, Passages(first=3), ids)
    assert run.kv[: len(ids)].entries().tobytes() == kv.entries().tobytes()
    assert (facts.passages, facts.mended_tokens) == (3, 9)


def test_a_template_that_leaves_messages_out_is_refused(native_llm: Native) -> None:
    llm = native_llm()
    for content in ("no place", f"{PASSAGE}{PASSAGE}"):
        with pytest.raises(InvalidRequest, match="does not write each message once"):
            encode_chat(llm.tokenizer, [{"role": "user", "content": content}], ["the fox"])


@needs_native
def test_cacheblend_under_other_schedules(native_llm: Native) -> None:
    """In chunks, from the index, and preempted beside others: the same bits."""
    cold, full = (native_llm(draft="first-layers", prefix_index=index) for index in ("off", "radix"))
    small = native_llm(draft="first-layers", prefix_index="radix", kv_bytes=30 * full.pool.page_bytes)
    technique, params = Passages(mend="cacheblend", share=0.2, least=4), replace(ASKED, logprobs=2)
    prompts = [prompt(cold, *texts) for texts in (WORDS, WORDS[::-1], [*WORDS, *WORDS])]
    expected = [answers(cold, [cold.request(ids, params, technique)], SchedulerConfig(512))[0] for ids in prompts]
    for llm, chunk in ((full, 7), (full, 512), (small, 16)):
        made = answers(llm, [llm.request(ids, params, technique) for ids in prompts], SchedulerConfig(chunk))
        assert made == expected
