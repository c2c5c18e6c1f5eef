"""Descriptions of models: their `repr`, which identities contain, and what it tells apart."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import GeometryMismatch
from twostroke.kv.geometry import Geometry
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig, QueryGrowth
from twostroke.models.rope import NO_ROPE, Rope, amplitudes, frequencies

ATTENTION = Attention(4, 2, 16, 0.25, Rope(1e4))
CONFIG = ModelConfig("llama", 384, 64, 2048, 1e-5, (Layer(ATTENTION, GatedMLP(96)),))


def test_the_repr_of_a_plain_model_is_that_of_older_versions() -> None:
    """A cache on disk was written with it."""
    assert repr(CONFIG) == (
        "ModelConfig(architecture='llama', vocab_size=384, hidden_size=64, max_position=2048, norm_eps=1e-05, "
        "layers=(Layer(attention=Attention(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, "
        "rope=Rope(base=10000.0, factors=None, amplitude=1.0), window=None, bias=False, qk_norm=False), "
        "feed_forward=GatedMLP(intermediate_size=96, activation='silu'), post_norms=False),), tied=False, "
        "embedding_scale=1.0)"
    )
    assert repr(Experts(8, 2, 32)) == (
        "Experts(count=8, chosen=2, intermediate_size=32, activation='silu', normalized=True)"
    )


def with_attention(attention: Attention) -> ModelConfig:
    return replace(CONFIG, layers=(replace(CONFIG.layers[0], mixer=attention),))


@pytest.mark.parametrize(
    "other",
    [
        with_attention(replace(ATTENTION, rope=Rope(1e4, rotated=8))),
        with_attention(replace(ATTENTION, rope=NO_ROPE)),
        with_attention(replace(ATTENTION, growth=QueryGrowth(0.1, 64))),
        with_attention(replace(ATTENTION, whole_norm=True)),
        with_attention(replace(ATTENTION, sink_logits=True)),
        with_attention(replace(ATTENTION, value_norm=True)),
        with_attention(replace(ATTENTION, keys_as_values=True)),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], scaled=True),)),
        replace(CONFIG, token_inputs=32),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], pre_norms=False),)),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], feed_forward=Experts(8, 2, 32, shared_size=64)),)),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], feed_forward=Experts(8, 2, 32, bias=True)),)),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], feed_forward=Experts(8, 2, 32, sigmoid=True)),)),
        replace(CONFIG, layers=(replace(CONFIG.layers[0], feed_forward=Experts(8, 2, 32, selection_bias=True)),)),
        replace(CONFIG, residual_scale=0.5),
        replace(CONFIG, logit_scale=0.5),
        replace(CONFIG, score_cap=50.0),
        replace(CONFIG, logit_cap=30.0),
    ],
)
def test_every_other_model_has_another_repr(other: ModelConfig) -> None:
    assert repr(other) != repr(CONFIG)


def test_another_factor_is_another_model(tiny_directory: Callable[[str], Path]) -> None:
    """Of the same tensors."""
    found = open_huggingface(tiny_directory("granite"))
    other: Checkpoint = replace(found, config=replace(found.config, logit_scale=0.25))
    assert other.weights_id != found.weights_id


def test_entries_of_another_rope_do_not_fit() -> None:
    """The message says which layers have none."""
    mine, theirs = (
        Geometry.of(with_attention(replace(ATTENTION, rope=rope)), "float32", "t") for rope in (Rope(1e4), NO_ROPE)
    )
    part = Geometry.of(with_attention(replace(ATTENTION, rope=Rope(1e4, rotated=8))), "float32", "t")
    assert len({one.fingerprint for one in (mine, theirs, part)}) == 3
    with pytest.raises(GeometryMismatch, match=r"ropes \[1 layers: no RoPE\] is not \[1 layers: base 10000\]"):
        mine.require(theirs, "joining")
    with pytest.raises(GeometryMismatch, match="base 10000 of 8 numbers"):
        mine.require(part, "joining")


def test_a_part_of_a_head_is_rotated() -> None:
    """As the first numbers of a shorter head; the others keep their angle and size."""
    rope = Rope(1e4, amplitude=1.5, rotated=8)
    assert np.array_equal(frequencies(rope, 16)[:4], frequencies(Rope(1e4), 8))
    assert (frequencies(rope, 16)[4:] == 0).all()
    assert amplitudes(rope, 16).tolist() == [1.5] * 4 + [1.0] * 4
    assert (frequencies(NO_ROPE, 16) == 0).all()
    assert (amplitudes(NO_ROPE, 16) == 1).all()


def test_queries_grow_in_steps() -> None:
    factors = QueryGrowth(0.5, 10).factors(np.array([0, 9, 10, 19, 20]))
    np.testing.assert_allclose(factors, 1 + 0.5 * np.log([1, 1, 2, 2, 3]), rtol=1e-6)
