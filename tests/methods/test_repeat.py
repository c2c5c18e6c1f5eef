"""Prompt repetition with slicing: the paper's checks S1 to S3, and an independent computation of decode's context."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.methods import Repeat, method

TinyLLM = Callable[..., LLM]
PROMPT = [5, 9, 17, 33, 65, 129, 200, 11, 4, 7, 250, 3, 90, 21, 8, 77, 41, 30, 12]


def test_s1_the_slice_is_the_second_copy(tiny_llm: TinyLLM) -> None:
    twice = tiny_llm().prefill(PROMPT * 2)
    second = twice[len(PROMPT) :]
    assert (second.entries() == twice.entries()[:, :, len(PROMPT) :]).all()
    assert second.positions == list(range(len(PROMPT), 2 * len(PROMPT)))
    assert second.next_position == 2 * len(PROMPT)
    assert second.nbytes * 2 == twice.nbytes


@pytest.mark.parametrize("sinks", [0, 4])
def test_s2_the_first_token_is_full_repetitions(sinks: int, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    full, kept = (
        llm.generate([PROMPT], method=chosen, max_tokens=8, ignore_eos=True, logprobs=0)[0].tokens
        for chosen in (Repeat(keep="all"), Repeat(sinks=sinks))
    )
    assert kept[0].id == full[0].id
    assert kept[0].logprob == pytest.approx(full[0].logprob, abs=1e-5)


def test_s3_runs_are_alike(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")
    runs = [llm.generate([PROMPT], method=Repeat(sinks=2), max_tokens=16, ignore_eos=True)[0].tokens for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


# Without the families with windows: the test's mask would have to reproduce that of transformers.
@pytest.mark.reference
@pytest.mark.parametrize("family", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("sinks", [0, 4])
def test_decode_sees_exactly_what_is_kept(
    family: str, times: int, sinks: int, tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]
) -> None:
    """transformers over the whole text, with a mask that hides the dropped entries from the generated rows."""
    llm = tiny_llm(family)
    made = llm.generate([PROMPT], method=Repeat(times, sinks), max_tokens=12, ignore_eos=True, logprobs=0)[0].tokens
    whole = PROMPT * times + [token.id for token in made[:-1]]
    prompt_end, copy_start = len(PROMPT) * times, len(PROMPT) * (times - 1)
    sees = torch.ones(len(whole), len(whole), dtype=torch.bool).tril()
    sees[prompt_end:, sinks:copy_start] = False
    mask = torch.zeros(1, 1, len(whole), len(whole)).masked_fill_(~sees, torch.finfo(torch.float32).min)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_directory(family), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = reference(torch.tensor([whole]), attention_mask=mask).logits[0, prompt_end - 1 :]
    assert logits.argmax(-1).tolist() == [token.id for token in made]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor([t.logprob for t in made]), expected, atol=1e-3, rtol=0)


def decoded(llm: LLM, kept: KVCache, count: int = 10) -> list[int]:
    return [token.id for token in llm.decode(kept, max_tokens=count, ignore_eos=True)]


def answer(llm: LLM, prompt: Sequence[int], chosen: Repeat, count: int = 10) -> list[int]:
    return [token.id for token in llm.generate([prompt], method=chosen, max_tokens=count, ignore_eos=True)[0].tokens]


def test_texts_between_copies(tiny_llm: TinyLLM) -> None:
    """They are entered, but belong to no copy."""
    llm = tiny_llm()
    again, then = (llm.tokenizer.encode(text, add_bos=False) for text in (" and again ", " then "))
    whole = llm.prefill([*PROMPT, *again, *PROMPT, *then, *PROMPT])
    expected = decoded(llm, whole[:2] + whole[-len(PROMPT) :])
    assert answer(llm, PROMPT, Repeat((" and again ", " then "), sinks=2)) == expected
    assert answer(llm, PROMPT, Repeat(" and again ", keep="all")) == decoded(
        llm, llm.prefill([*PROMPT, *again, *PROMPT])
    )
    assert Repeat(["a", "b"]) == Repeat(("a", "b"))  # pyright: ignore[reportArgumentType]
    assert answer(llm, PROMPT, Repeat(("",))) == answer(llm, PROMPT, Repeat(2))


def test_the_first_copy(tiny_llm: TinyLLM) -> None:
    """Its entries are those of the plain prompt; the first token and, at the right offset, the positions are not."""
    llm, n = tiny_llm(), len(PROMPT)
    twice, plain = llm.prefill(PROMPT * 2), llm.prefill(PROMPT)
    first = twice[:n]
    np.testing.assert_allclose(first.entries(), plain.entries(), rtol=1.3e-6, atol=1e-5, equal_nan=False)
    made = answer(llm, PROMPT, Repeat(keep="first"))
    assert made == decoded(llm, first.with_tail(twice.tail).resumed_at(2 * n))
    wrong = answer(llm, PROMPT, Repeat(keep="first", offset="wrong"))
    assert wrong == decoded(llm, plain.with_tail(twice.tail))
    assert made[0] == wrong[0] == answer(llm, PROMPT, Repeat(keep="all"))[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3"])
def test_the_wrong_offset(family: str, tiny_llm: TinyLLM) -> None:
    """Keys of the second copy keep their rotation; queries have positions as if the first copy did not exist."""
    llm, n = tiny_llm(family), len(PROMPT)
    twice = llm.prefill(PROMPT * 2)
    kept = twice[n:].resumed_at(n)
    assert (kept.entries() == twice[n:].entries()).all()
    decoding = llm.decode(kept, max_tokens=10, ignore_eos=True)
    tokens = [token.id for token in decoding]
    assert decoding.kv.positions == [*range(n, 2 * n), *range(n, n + 9)]
    assert tokens == answer(llm, PROMPT, Repeat(offset="wrong", sinks=0))
    assert tokens[0] == answer(llm, PROMPT, Repeat())[0]
    # Full repetition drops nothing, so there is no wrong offset.
    assert answer(llm, PROMPT, Repeat(keep="all", offset="wrong")) == answer(llm, PROMPT, Repeat(keep="all"))


def test_a_value_that_goes_on_elsewhere_is_nobodys_prefix(tiny_llm: TinyLLM) -> None:
    """Its continuation must neither use the prefix index nor be stored in it."""
    llm = tiny_llm(page_size=4)
    llm.prefill(PROMPT * 2)
    moved = llm.prefill(PROMPT)[:-1].resumed_at(100)
    longer = llm.prefill(PROMPT[-1:] + PROMPT, after=moved)
    assert longer.positions[len(PROMPT) - 1 :] == list(range(100, 101 + len(PROMPT)))
    assert longer.canonical_length(llm.model.id) == len(PROMPT) - 1
    assert moved.without_last().next_position == 99


CHAT = [{"role": "system", "content": "the lazy dog"}, {"role": "user", "content": "the quick brown fox"}]


@pytest.mark.parametrize("sinks", [0, 30])
def test_the_user_turn_within_one_template(sinks: int, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()
    prompt = llm.tokenizer.encode_chat(CHAT)
    turn = prompt.turn
    assert turn is not None
    assert llm.tokenizer.decode(prompt[turn.start : turn.stop]) == "the quick brown fox"
    head, copy, rest = prompt[: turn.start], prompt[turn.start : turn.stop], prompt[turn.stop :]
    whole = llm.prefill(head + copy + copy + rest)
    chosen = Repeat(scope="turn", sinks=sinks)
    kept = whole[: min(max(sinks, len(head)), len(head + copy))] + whole[len(head + copy) :]
    assert answer(llm, prompt, chosen) == decoded(llm, kept)
    assert [t.id for t in llm.chat(CHAT, method=chosen, max_tokens=10, ignore_eos=True).tokens] == decoded(llm, kept)
    assert answer(llm, prompt, Repeat(scope="turn", keep="all")) == decoded(llm, whole)
    first = (whole[: len(head + copy)] + whole[len(whole) - len(rest) :]).with_tail(whole.tail)
    assert answer(llm, prompt, Repeat(scope="turn", keep="first")) == decoded(llm, first)
    twice = llm.prefill(prompt * 2)
    assert answer(llm, prompt, Repeat(sinks=0)) == decoded(llm, twice[len(prompt) :])  # template and all
    assert answer(llm, prompt, Repeat()) == decoded(llm, twice[:4] + twice[len(prompt) :])
    with pytest.raises(InvalidRequest, match="scope must be 'prompt' where the prompt is no chat"):
        llm.generate([PROMPT], method=chosen)


@pytest.mark.parametrize("content", ["user", "[assistant]", " fox ", "</s>", "e\u0301"])
def test_the_turn_is_found_whatever_it_says(content: str, tiny_llm: TinyLLM) -> None:
    tokenizer = tiny_llm().tokenizer
    messages = [*CHAT, {"role": "assistant", "content": content}, {"role": "user", "content": content}]
    prompt = tokenizer.encode_chat(messages)
    assert prompt.turn is not None
    inside = tokenizer.decode(prompt[prompt.turn.start : prompt.turn.stop], skip_special=False)
    assert inside == content
    assert tokenizer.decode(prompt[: prompt.turn.start], skip_special=False).endswith("[user]")
    assert tokenizer.encode_chat(messages[:1]).turn is None


def test_decode_time_memory(tiny_llm: TinyLLM) -> None:
    """During decode only the pages of the last copy and of the answer are held."""
    llm = tiny_llm(prefix_index="off")
    prompt = PROMPT * 16  # 19 whole pages a copy
    stream = llm.stream(prompt, method=Repeat(sinks=0), max_tokens=10, ignore_eos=True)
    used = []
    for _ in stream:
        used.append(llm.pool.num_used)
    assert max(used) == len(prompt) // 16 + 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"times": 0}, "times must be an integer from 1 to 64"),
        ({"times": ["", 3]}, "times must be a number, or fewer than 64 texts"),
        ({"times": [""] * 64}, "times must be a number, or fewer than 64 texts"),
        ({"times": 2.5}, "times"),
        ({"sinks": -1}, "sinks"),
        ({"keep": "middle"}, "keep must be one of last, all, first"),
        ({"scope": "system"}, "scope must be one of prompt, turn"),
        ({"offset": "left"}, "offset must be one of right, wrong"),
        ({"copies": 3}, "no parameter 'copies'; it has times, sinks, keep, scope, offset"),
    ],
)
def test_bad_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("repeat", **parameters)


def test_unknown_method() -> None:
    with pytest.raises(InvalidRequest, match=r"there are attention-matching, best-of, .*plain, .*repeat"):
        method("repeet")
