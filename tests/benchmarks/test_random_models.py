"""Files of random weights for the comparison of engines: blocks that every engine reads as the same sane numbers."""

import gguf
import numpy as np
import pytest

from benchmarks.peer.random_gguf import Type, values
from benchmarks.peer.random_shapes import SHAPES


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K, Type.Q8_0, Type.MXFP4])
def test_matrices_keep_the_scale_of_what_passes(kind: Type) -> None:
    made = values(np.random.default_rng(1), "blk.0.ffn_up.weight", (256, 1024), kind)
    weights = gguf.quants.dequantize(made, kind)
    assert weights.shape == (256, 1024)
    assert abs(weights.mean()) < 0.1 / 32
    assert 0.7 / 32 < weights.std() < 1.5 / 32


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.2), ("qwen3-8b", 8.2), ("qwen3-30b-a3b", 30.5)])
def test_shapes_have_the_parameters_of_their_models(name: str, billions: float) -> None:
    """Llama's has 0.2 more than the model, of the larger vocabulary."""
    total = sum(np.prod(size) for _, size, _ in SHAPES[f"random-{name}"].tensors())
    assert total / 1e9 == pytest.approx(billions, rel=0.01)
