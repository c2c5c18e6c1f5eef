"""Attention matching: the fit by itself, and that it brings the answer nearer to that of all entries."""

import numpy as np
import pytest

from tests.methods.test_passages import Native
from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_scores
from twostroke.methods import AttentionMatching, method
from twostroke.methods.attention_matching import fit


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log of the mass, result) of each query."""
    masses = np.exp(scores).sum(-1, keepdims=True)
    return np.log(masses[:, 0]), np.exp(scores) / masses @ values


def problem(queries: int = 60, length: int = 50, dim: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    scores = random.standard_normal((queries, 4)) @ random.standard_normal((4, length))
    some = np.sort(np.argsort(-np.exp(scores).sum(0))[:16])
    return scores, random.standard_normal((length, dim)), some


def test_a_fit_has_the_masses_and_the_results_of_all() -> None:
    scores, values, some = problem()
    mass, result = attention(scores, values)
    made, bias = fit(scores, values, some, 1e-6)
    fitted_mass, fitted = attention(scores[:, some] + bias, made)
    plain_mass, plain = attention(scores[:, some], values[some])
    assert np.abs(fitted_mass - mass).mean() < 0.5 * np.abs(plain_mass - mass).mean()
    assert np.linalg.norm(fitted - result) < 0.5 * np.linalg.norm(plain - result)


def test_what_no_query_sees_stays_as_it_is() -> None:
    scores, values, some = problem()
    scores[:, some[-2:]] = -np.inf
    made, bias = fit(scores, values, some, 0.01)
    assert np.array_equal(made[-2:], values[some[-2:]])
    assert (bias[-2:] == 0).all()
    assert np.isfinite(bias).all()


def test_all_entries_stay_as_they_are() -> None:
    scores, values, _ = problem()
    made, bias = fit(scores, values, np.arange(50), 0.01)
    assert np.allclose(bias, 0, atol=1e-9)
    assert np.allclose(made, values)


@needs_native
def test_a_value_has_what_was_fitted(native_llm: Native) -> None:
    """Each head's K as it was, and V and the bias of `fit` from its own scores; V is rounded to bfloat16."""
    llm, technique = native_llm(), AttentionMatching(budget=20)
    ids = PROMPT * 4
    _, (run,), _ = runs_of(llm, technique, ids, max_tokens=2)
    made = queried(llm, ids, technique.queries)
    heads, biases = run.kv.head_positions, run.kv.bias
    assert heads is not None
    assert biases is not None
    for layer, head in np.ndindex(*heads.shape[:2]):
        some = heads[layer, head, :20]
        scores = attention_scores(made.kv, made.queries, layer).reshape(heads.shape[1], -1, len(ids))[head]
        keys, values = made.kv.entries(layer)[:, :, head].astype(np.float32)
        expected, bias = fit(scores.astype(np.float64), values, some, technique.ridge)
        found = run.kv.entries(layer)[:, :20, head].astype(np.float32)
        assert np.array_equal(found[0], keys[some])
        assert np.allclose(found[1], expected, rtol=2**-7, atol=1e-3)
        assert np.allclose(biases[layer, head, :20], bias, atol=1e-5)


@needs_native
def test_entries_are_those_that_queries_attend_to(native_llm: Native) -> None:
    llm = native_llm()
    _, (run,), _ = runs_of(llm, AttentionMatching(budget=20, sinks=2, newest=3), PROMPT * 4, max_tokens=4)
    heads = run.kv.head_positions
    assert heads is not None
    assert (heads[..., :2] == [0, 1]).all()
    assert (heads[..., 17:20] == [len(PROMPT) * 4 - i for i in (3, 2, 1)]).all()
    assert run.kv.bias is not None
    assert np.abs(run.kv.bias[..., :20]).max() > 0.01


def test_bad_options_are_one_line() -> None:
    for option in ({"queries": 0}, {"queries": 65}, {"ridge": 0}, {"budgets": "ada"}, {"budget": 4}):
        with pytest.raises(InvalidRequest, match=f"attention-matching: {next(iter(option))}"):
            method("attention-matching", **option)
