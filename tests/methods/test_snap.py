"""SnapKV: the entries kept of a plain and of a repeated prompt, by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_weights
from twostroke.methods import Plain, Repeat, Snap, method
from twostroke.methods.repeat import chosen

Native = Callable[..., LLM]
LONG = PROMPT * 4


def by_hand(mass: list[float], window: int, budget: int, kernel: int, sinks: int) -> list[int]:
    """Each entry's score is the maximum over its neighbourhood; the window and the sinks are always kept."""
    before = len(mass) - window
    worth = [max(mass[max(0, i - kernel // 2) : min(before, i + kernel // 2 + 1)]) for i in range(before)]
    ranked = sorted(range(sinks, before), key=lambda i: -worth[i])
    return sorted([*range(sinks), *ranked[: budget - window - sinks], *range(before, len(mass))])


def seen(llm: LLM, ids: list[int], window: int) -> list[float]:
    """The attention of the last tokens to each token, as the mean over layers and heads."""
    made = queried(llm, ids, window)
    return np.stack(list(attention_weights(made.kv, made.queries))).mean((0, 1)).sum(0).tolist()


@needs_native
@pytest.mark.parametrize(("window", "budget", "kernel", "sinks"), [(8, 30, 7, 0), (1, 2, 1, 0), (5, 40, 3, 4)])
def test_what_stays(window: int, budget: int, kernel: int, sinks: int, native_llm: Native) -> None:
    llm = native_llm()
    technique = Snap(window=window, budget=budget, kernel=kernel, sinks=sinks)
    made, (run,), _ = runs_of(llm, technique, LONG)
    stays = by_hand(seen(llm, LONG, window), window, budget, kernel, sinks)
    assert len(stays) == budget
    assert run.kv.positions == [*stays, *range(len(LONG), len(LONG) + 39)], "and nothing decoded is dropped"
    kept = chosen(llm.prefill(LONG), np.array(stays))
    assert made == [token.id for token in llm.decode(kept, max_tokens=40, ignore_eos=True)]
    assert made != runs_of(llm, Plain(), LONG)[0]


@needs_native
@pytest.mark.parametrize("prompt", [LONG, PROMPT, [7]], ids=len)
def test_room_for_everything_is_the_plain_request(prompt: list[int], native_llm: Native) -> None:
    llm = native_llm()
    made, (run,), _ = runs_of(llm, Snap(window=32, budget=len(LONG)), prompt)
    expected, (plain,), _ = runs_of(llm, Plain(), prompt)
    assert made == expected
    assert run.kv.positions == plain.kv.positions
    assert (run.kv.entries() == plain.kv.entries()).all()


@needs_native
def test_after_repetition(native_llm: Native) -> None:
    """Attention to the last copy and the sinks is computed with both copies visible."""
    llm, n = native_llm(), len(PROMPT)
    repeated = runs_of(llm, Repeat(2, sinks=2), PROMPT)[0]
    assert runs_of(llm, Snap(times=2, keep="last", sinks=2, window=4, budget=n + 2), PROMPT)[0] == repeated
    _, (run,), _ = runs_of(llm, Snap(times=2, keep="last", sinks=2, window=4, budget=11, kernel=3), PROMPT)
    kept = [0, 1, *range(n, 2 * n)]
    mass = seen(llm, PROMPT * 2, 4)
    stays = by_hand([mass[i] for i in kept], window=4, budget=11, kernel=3, sinks=2)
    assert run.kv.positions == [*(kept[i] for i in stays), *range(2 * n, 2 * n + 39)]


@needs_native
def test_what_is_not_kept_is_freed(native_llm: Native) -> None:
    """Pages without kept entries are freed before the first token is decoded."""
    llm, long = native_llm(), [5] * 400 + LONG
    used = [llm.pool.num_used for _ in llm.stream(long, method=Snap(window=4, budget=8), max_tokens=9, ignore_eos=True)]
    assert max(used) <= 8 + 2


def test_equals_are_told_apart_by_where_they_are() -> None:
    snap = Snap(window=2, budget=5, kernel=1)
    assert snap.staying(np.array([0, 1, 1, 0, 1, 1, 0, 9, 9.0])).tolist() == [1, 2, 4, 7, 8]


def test_bad_parameters() -> None:
    for parameters, message in [
        ({"window": 65}, "window must be an integer from 1 to 64"),
        ({"budget": 31}, "budget must be an integer of at least 32"),
        ({"budget": 35, "sinks": 4}, "budget must be an integer of at least 36"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"kernel": 1e9}, "kernel must be an integer"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            method("snap", **parameters)
