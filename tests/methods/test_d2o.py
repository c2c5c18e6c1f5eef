"""D2O: what is merged by hand, and what a value has of it."""

import numpy as np
import pytest

from tests.methods.test_passages import Native
from tests.methods.watching import PROMPT, needs_native, runs_of
from twostroke.errors import InvalidRequest
from twostroke.methods import D2O, HeavyHitters, method
from twostroke.methods.d2o import merged


def test_entries_that_are_alike_become_one() -> None:
    """Of three dropped entries one has the key of 0, one nearly that of 3, and one is like none: below the mean."""
    keys = np.array([[1, 0], [2, 0], [-1, -1], [0, 1], [0.1, 1]], np.float32)
    values = np.array([[1, 1], [3, 5], [100, 100], [0, 2], [4, 2]], np.float32)
    made_keys, made, counts = merged(keys, values, np.array([0, 3]))
    near = 1 / np.sqrt(1.01)
    assert np.array_equal(counts, [2, 2])
    assert np.allclose(made_keys[0], [1.5, 0])
    assert np.allclose(made[0], [2, 3])
    assert np.allclose(made[1], (np.e * values[3] + np.exp(near) * values[4]) / (np.e + np.exp(near)))


def test_equal_entries_with_their_mass_are_as_good_as_all() -> None:
    """Attention to n equal entries is attention to one that counts n times."""
    random = np.random.default_rng(0)
    keys, values = (np.repeat(random.standard_normal((4, 8)), 5, 0) for _ in range(2))
    made_keys, made, counts = merged(keys, values, np.arange(0, 20, 5))
    query = random.standard_normal(8)
    every, few = np.exp(keys @ query), counts * np.exp(made_keys @ query)
    assert np.allclose(few @ made / few.sum(), every @ values / every.sum())


@needs_native
@pytest.mark.parametrize("mass", [True, False])
def test_a_value_has_what_was_merged(native_llm: Native, mass: bool) -> None:
    """At the places that H2O keeps, from its entries; K and V are rounded to bfloat16."""
    llm, ids = native_llm(), PROMPT * 4
    whole = llm.prefill(ids)
    _, (chosen,), _ = runs_of(llm, HeavyHitters(budget=20, sinks=2), ids, max_tokens=2)
    _, (run,), _ = runs_of(llm, D2O(mass=mass, budget=20, sinks=2), ids, max_tokens=2)
    heads, biases = run.kv.head_positions, run.kv.bias
    assert heads is not None
    assert chosen.kv.head_positions is not None
    assert np.array_equal(heads[..., :20], chosen.kv.head_positions[..., :20])
    assert (biases is not None) == mass
    for layer, head in np.ndindex(*heads.shape[:2]):
        keys, values = whole.entries(layer)[:, :, head].astype(np.float32)
        made_keys, made, counts = merged(keys, values, heads[layer, head, :20])
        found = run.kv.entries(layer)[:, :20, head].astype(np.float32)
        assert np.allclose(found[0], made_keys, rtol=2**-7, atol=1e-3)
        assert np.allclose(found[1], made, rtol=2**-7, atol=1e-3)
        assert counts.sum() > 20
        assert biases is None or np.allclose(biases[layer, head, :20], np.log(counts), atol=1e-6)


def test_bad_options_are_one_line() -> None:
    for option in ({"budgets": "ada"}, {"mass": 2}, {"budget": 0}, {"recent": 1.5}):
        with pytest.raises(InvalidRequest, match=f"d2o: {next(iter(option))}"):
            method("d2o", **option)
