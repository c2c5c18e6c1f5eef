"""Budgets by head and layer: the published rules by hand, and that a head sees what it keeps."""

import numpy as np
import pytest

from tests.methods.test_passages import Native
from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_by_head
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.methods import method
from twostroke.methods.budgets import best_by_head, budgets


def random_worth(layers: int = 4, heads: int = 3, length: int = 40) -> np.ndarray:
    worth = np.random.default_rng(0).gamma(0.2, 1.0, (layers, heads, length))
    worth[..., -2:] = np.inf
    return worth


def test_ada_takes_the_best_of_a_layer() -> None:
    worth = random_worth()
    counts = budgets("ada", worth, 10, 2, 0)
    assert (counts.sum(1) == 30).all()
    assert counts.min() < 10 < counts.max()
    for own, of_head in zip(worth, counts, strict=True):
        least = np.sort(own.ravel())[-30]
        assert of_head.tolist() == (own >= least).sum(1).tolist()


@pytest.mark.parametrize("floor", [0.2, 0.5, 1])
def test_ada_leaves_each_head_a_floor(floor: float) -> None:
    worth = random_worth()
    worth[:, 0, :-2] /= 1e6
    counts = budgets("ada", worth, 10, 2, floor)
    assert (counts.sum(1) == 30).all()
    assert counts.min() == counts[0, 0] == max(2, int(floor * 10))


def test_a_pyramid_falls_by_equal_steps() -> None:
    counts = budgets("pyramid", random_worth(layers=5, length=100), 20, 2, 0)
    assert (counts == counts[:, :1]).all()
    assert counts[:, 0].sum() == 5 * 20
    assert np.abs(counts[:, 0] - np.linspace(38, 2, 5)).max() <= 1
    short = budgets("pyramid", random_worth(layers=5, length=25), 20, 2, 0)[:, 0]
    assert (short.max(), short.sum()) == (25, 100)


def test_the_best_of_each_head() -> None:
    worth, counts = random_worth(2, 2, 12), np.array([[3, 5], [2, 7]])
    stays = best_by_head(worth, counts)
    assert stays.shape == (2, 2, 7)
    for layer, head in np.ndindex(2, 2):
        best = np.sort(np.argsort(-worth[layer, head], kind="stable")[: counts[layer, head]])
        assert stays[layer, head].tolist() == [NO_ENTRY] * (7 - len(best)) + best.tolist()


@needs_native
@pytest.mark.parametrize("kind", ["ada", "pyramid"])
@pytest.mark.parametrize("name", ["tova", "keydiff", "lagkv"])
def test_a_value_has_the_largest_budget(kind: str, name: str, native_llm: Native) -> None:
    llm = native_llm()
    ids = PROMPT * 4
    technique = method(name, budgets=kind, budget=20, sinks=2, newest=3)
    _, (run,), _ = runs_of(llm, technique, ids)
    slots = len(run.kv) - (len(run.sampled) - 1)  # the last token is pending
    bias = run.kv.bias
    if bias is None:  # TOVA's and LagKV's worths are those of a layer, so "ada" gives each head as many
        assert (slots, kind, name in ("tova", "lagkv")) == (20, "ada", True)
        return
    kept = slots - np.isneginf(bias).sum(-1)
    assert (kept.max(), kept.sum()) == (slots, 20 * kept.size)
    assert kept.min() >= 5
    if kind == "pyramid":
        assert kept[:, 0].tolist() == [35, 20, 5]
    empty = slots - kept
    assert (np.isneginf(bias[..., :slots]) == (np.arange(slots) < empty[..., None])).all()


@needs_native
def test_equal_budgets_have_no_bias(native_llm: Native) -> None:
    _, (run,), _ = runs_of(native_llm(), method("tova", budget=20), PROMPT * 4)
    assert run.kv.bias is None


@needs_native
def test_heads_of_one_score_have_one_budget(native_llm: Native) -> None:
    """As TOVA's, whose score is the mean over a layer's heads."""
    llm = native_llm()
    made = queried(llm, PROMPT * 4, 1)
    worth = np.repeat(attention_by_head(made.kv, made.queries).mean(1, keepdims=True), 2, 1)
    worth[..., -1:] = np.inf
    assert (budgets("ada", worth, 20, 1, 0.2) == 20).all()


def test_bad_budgets_are_one_line() -> None:
    with pytest.raises(InvalidRequest, match="tova: budgets"):
        method("tova", budgets="many")


@needs_native
def test_ranks_give_heads_the_same_budgets(native_llm: Native) -> None:
    seen = [
        [
            token.id
            for token in llm.generate([PROMPT], method=method("keydiff", budgets="ada", ratio=0.4), max_tokens=8)[
                0
            ].tokens
        ]
        for llm in (native_llm(), native_llm(tp=2))
    ]
    assert seen[0] == seen[1]
