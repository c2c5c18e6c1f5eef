"""Prompt repetition with slicing: the paper's checks S1 to S3, and an independent account of what decode sees."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
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
        llm.generate([PROMPT], method=chosen, max_tokens=8, ignore_eos=True)[0].tokens
        for chosen in (Repeat(keep="all"), Repeat(sinks=sinks))
    )
    assert kept[0].id == full[0].id
    assert kept[0].logprob == pytest.approx(full[0].logprob, abs=1e-5)


def test_s3_runs_are_alike(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")
    runs = [llm.generate([PROMPT], method=Repeat(sinks=2), max_tokens=16, ignore_eos=True)[0].tokens for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


# Not the families with windows: the hand-made mask would have to repeat transformers' own.
@pytest.mark.parametrize("family", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("sinks", [0, 4])
def test_decode_sees_exactly_what_is_kept(
    family: str, times: int, sinks: int, tiny_llm: TinyLLM, tiny_directory: Callable[[str], Path]
) -> None:
    """transformers over the whole text, with a mask that hides the dropped entries from the generated rows."""
    llm = tiny_llm(family)
    made = llm.generate([PROMPT], method=Repeat(times, sinks), max_tokens=12, ignore_eos=True)[0].tokens
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


def test_decode_time_memory(tiny_llm: TinyLLM) -> None:
    """While it decodes, only the last copy's pages and its own are held."""
    llm = tiny_llm(prefix_index="off")
    prompt = PROMPT * 16  # 19 whole pages a copy
    stream = llm.stream(prompt, method=Repeat(), max_tokens=10, ignore_eos=True)
    used = []
    for _ in stream:
        used.append(llm.pool.num_used)
    assert max(used) == len(prompt) // 16 + 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"times": 0}, "times must be an integer from 1 to 64"),
        ({"times": 2.5}, "times"),
        ({"sinks": -1}, "sinks"),
        ({"keep": "first"}, "keep must be one of last, all"),
        ({"copies": 3}, "no parameter 'copies'; it has times, sinks, keep"),
    ],
)
def test_bad_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("repeat", **parameters)


def test_unknown_method() -> None:
    with pytest.raises(InvalidRequest, match="there are best-of, plain, repeat"):
        method("repeet")
