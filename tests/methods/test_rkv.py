"""R-KV: what each reduction leaves, by whole matrices of cosines."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import Queries, attention_scores
from twostroke.kv.cache import KVCache
from twostroke.methods import RKV, Plain, method
from twostroke.methods.rkv import redundant

Native = Callable[..., LLM]
LONG = PROMPT * 4


def shares(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def redundancy(keys: np.ndarray, similar: float) -> np.ndarray:
    """Of one head's keys, [n, D]."""
    units = keys.astype(float) / np.linalg.norm(keys.astype(float), axis=-1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, 0)
    for row in cosines:
        if (alike := np.flatnonzero(row > similar)).size:
            row[alike[-1]] = 0
    return shares(cosines.mean(0))


def reduced(technique: RKV, kv: KVCache, queries: Queries) -> np.ndarray:
    """Indices that stay, [layers, KV heads, budget]."""
    window, sides, stays = technique.window, technique.kernel // 2, []
    past = len(kv) - window
    for layer in range(len(queries.windows)):
        scores = attention_scores(kv, queries, layer).astype(float).reshape(2, -1, window, len(kv))
        for head, group in enumerate(scores):
            mass = np.mean([shares(row[:past]) for row in group.max(0)], 0)
            spread = [mass[max(0, i - sides) : i + sides + 1].max() for i in range(past)]
            repeated = redundancy(kv.keys(layer)[:, head], technique.similar)
            worth = [technique.importance * spread[i] - (1 - technique.importance) * repeated[i] for i in range(past)]
            first = sorted(range(past), key=lambda i: -worth[i])[: technique.budget - window]
            stays.append([*sorted(first), *range(past, len(kv))])
    return np.array(stays).reshape(-1, 2, technique.budget)


@needs_native
@pytest.mark.parametrize(("importance", "similar"), [(0.1, 0.5), (1.0, 0.5), (0.0, 0.2)])
def test_prompt_and_answer_are_reduced(importance: float, similar: float, native_llm: Native) -> None:
    llm = native_llm()
    technique = RKV(budget=24, every=9, window=3, kernel=5, importance=importance, similar=similar)
    made, runs, _ = runs_of(llm, technique, LONG, max_tokens=20)
    prefilled = queried(llm, LONG, 3)
    kv, queries = prefilled.kv, prefilled.queries
    for run in runs:
        kv = kv.gather(reduced(technique, kv, queries))
        answer = llm.decode(kv, max_tokens=9, ignore_eos=True)
        assert [token.id for token in answer][: len(run.tokens)] == run.tokens
        assert run.kv.head_positions is not None
        assert answer.kv.head_positions is not None
        assert (run.kv.head_positions == answer.kv.head_positions[..., : len(run.kv)]).all()
        kv, queries = run.kv, run.queries
    assert [len(run.tokens) for run in runs] == [9, 9, 2]
    assert made != runs_of(llm, Plain(), LONG, max_tokens=20)[0]


@needs_native
def test_room_for_everything_is_the_plain_request(native_llm: Native) -> None:
    llm = native_llm()
    made, runs, _ = runs_of(llm, RKV(budget=500, every=9), LONG)
    assert made == runs_of(llm, Plain(), LONG)[0]
    assert runs[-1].kv.head_positions is None


def test_the_last_of_its_kind_is_found_wherever_it_is() -> None:
    keys = np.random.default_rng(0).standard_normal((2, 300, 8)).astype(np.float32)
    keys[0, 5:9] += 20  # alike, and far from the last ones
    for head, found in zip(keys, redundant(keys, 0.9), strict=True):
        assert np.allclose(found, redundancy(head, 0.9), atol=1e-7)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"budget": 8}, r"budget must be an integer of at least 9 \(window \+ 1\)"),
        ({"every": 8}, r"every must be an integer of at least 9 \(window \+ 1\)"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"importance": 2}, "importance must be a number from 0 to 1"),
    ],
)
def test_bad_parameters(parameters: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("rkv", **parameters)
