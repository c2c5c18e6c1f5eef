"""FINCH: what stays after each chunk, by the paper's formula one row at a time; and a prompt larger than the pool."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_weights
from twostroke.kv.cache import KVCache
from twostroke.methods import Finch, Plain, method

Native = Callable[..., LLM]
LONG = PROMPT * 4
ASKING = 5


def chosen_by_hand(llm: LLM, ids: list[int], after: KVCache | None, count: int, sinks: int) -> np.ndarray:
    made = queried(llm, ids, ASKING, after)
    text, heads = len(made.kv) - ASKING, []
    for weights in attention_weights(made.kv, made.queries):
        for head in weights.astype(float).reshape(2, -1, ASKING, len(made.kv)):
            mass = np.sum([rows[row, :text] * (text + row + 1) for rows in head for row in range(ASKING)], 0)
            others = sorted(range(sinks, text), key=lambda i: -mass[i])
            heads.append(sorted([*range(sinks), *others[: count - sinks]]))
    return np.array(heads).reshape(-1, 2, count)


@needs_native
@pytest.mark.parametrize("sinks", [0, 2])
def test_two_chunks(sinks: int, native_llm: Native) -> None:
    llm, technique = native_llm(), Finch(budget=25, question=ASKING, chunk=40, sinks=sinks)
    made, (run,), _ = runs_of(llm, technique, LONG)
    text, question = LONG[:-ASKING], LONG[-ASKING:]
    count = 20 * 40 // len(text)
    first = chosen_by_hand(llm, text[:40] + question, None, count, sinks)
    kv = llm.prefill(text[:40]).gather(first).resumed_at(40)
    second = chosen_by_hand(llm, text[40:] + question, kv, 20, sinks)
    kv = llm.prefill(text[40:] + question, after=kv)
    asked = np.broadcast_to(np.arange(len(kv) - ASKING, len(kv)), (*second.shape[:2], ASKING))
    kv = kv.gather(np.concatenate([second, asked], -1))
    assert run.kv.head_positions is not None
    assert kv.head_positions is not None
    assert (run.kv.head_positions[..., :25] == kv.head_positions).all()
    assert len({tuple(row) for layer in kv.head_positions.tolist() for row in layer}) > 1, "heads differ"
    assert made == [token.id for token in llm.decode(kv, max_tokens=40, ignore_eos=True)]
    assert made != runs_of(llm, Plain(), LONG)[0]


@needs_native
@pytest.mark.parametrize("chunk", [7, 40, 512])
def test_room_for_everything_is_the_plain_request(chunk: int, native_llm: Native) -> None:
    llm = native_llm()
    made, (run,), _ = runs_of(llm, Finch(ratio=1, question=ASKING, chunk=chunk), LONG)
    expected, (plain,), _ = runs_of(llm, Plain(), LONG)
    assert made == expected
    assert run.kv.head_positions is None
    assert (run.kv.entries() == plain.kv.entries()).all()


@needs_native
def test_a_prompt_larger_than_the_pool(native_llm: Native) -> None:
    large = native_llm()
    small = native_llm(kv_bytes=8 * large.pool.page_bytes)
    technique = Finch(budget=24, question=ASKING, chunk=32)
    assert runs_of(small, technique, LONG * 3)[0] == runs_of(large, technique, LONG * 3)[0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"budget": 9, "question": 8, "sinks": 2}, r"budget must be an integer of at least 10 \(sinks \+ question\)"),
        ({"question": 65}, "question must be an integer from 1 to 64"),
        ({"chunk": 0}, "chunk must be an integer of at least 1"),
        ({"ratio": 0}, "ratio must be a number above 0 and at most 1"),
    ],
)
def test_bad_parameters(parameters: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("finch", **parameters)
