"""Encoders: values that a format can represent are exact, others as close as the format allows."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import CheckpointError
from twostroke.models.formats import encode
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.encode import ENCODERS, Encoder
from twostroke.models.formats.tensor import RawTensor


def stored(values: np.ndarray, name: str = "F32") -> RawTensor:
    """A matrix in a format that the `gguf` package can write."""
    data = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[name]).view(np.uint8)
    return RawTensor.from_bytes("w", name, values.shape, data.reshape(-1), "file: w")


def groups(seed: int, count: int = 64) -> np.ndarray:
    """[count, 32] float32: groups of any scale and offset, some with outliers, some constant, some zero."""
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.uniform(-5, 2, (count, 1))
    x = random.standard_normal((count, 32)) * scale + random.choice([0, 0, 1, -20], (count, 1)) * scale
    x[random.random((count, 32)) < 0.01] *= 10
    x[0], x[1] = 0, x[1, 0]
    return x.astype(np.float32)


def error(values: np.ndarray, tensor: RawTensor) -> np.ndarray:
    """The squared error of each group."""
    return ((tensor.dequantize().reshape(values.shape) - values) ** 2).sum(-1, dtype=np.float64)


@pytest.mark.parametrize("name", ENCODERS)
@given(seed=st.integers(0, 1 << 32))
def test_what_a_format_holds_comes_back_exactly(name: str, seed: int) -> None:
    held = stored(groups(seed), name)
    again = Encoder(name)(stored(held.dequantize()))
    assert again.format == name
    assert np.array_equal(again.dequantize(), held.dequantize())


@given(seed=st.integers(0, 1 << 32))
def test_bf16_rounds_as_pytorch_does(seed: int) -> None:
    values = groups(seed)
    ours = Encoder("BF16")(stored(values)).dequantize()
    assert np.array_equal(ours, torch.from_numpy(values).to(torch.bfloat16).float().numpy())


@given(seed=st.integers(0, 1 << 32))
def test_int8_is_within_half_a_step(seed: int) -> None:
    values = groups(seed)
    got = Encoder("Q8_0")(stored(values)).dequantize()
    # A scale is a float16 not below greatest / 127: 2^-10 above it at most, or 2^-24 where it is subnormal.
    step = np.abs(values).max(1, keepdims=True) / 127 * (1 + 2**-10) + 2**-24
    assert (np.abs(got - values) <= 0.5001 * step).all()


@given(seed=st.integers(0, 1 << 32))
def test_int4_is_never_worse_than_the_plain_choice(seed: int) -> None:
    values = groups(seed)
    plain, searched = stored(values, "Q4_1"), Encoder("Q4_1")(stored(values))
    # ggml rounds codes before its scale is rounded, we after: the two may differ within float32's precision.
    assert (error(values, searched) <= error(values, plain) * (1 + 1e-5) + 1e-12 * (values**2).sum(1)).all()


def test_int4_is_a_fifth_better_than_the_plain_choice() -> None:
    values = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    assert error(values, Encoder("Q4_1")(stored(values))).mean() < 0.82 * error(values, stored(values, "Q4_1")).mean()


@pytest.mark.parametrize("source", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ENCODERS)
def test_sources_chunks_and_threads_do_not_show(source: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = stored(np.random.default_rng(3).standard_normal((48, 256)), source)
    expected = Encoder(name, threads=1)(stored(tensor.dequantize()))
    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 768)
    made, outline = Encoder(name, threads=3)(tensor), Encoder(name).outline(tensor)
    assert np.array_equal(made.data, expected.data)
    assert (made.name, made.shape, made.source) == (tensor.name, tensor.shape, tensor.source)
    assert (outline.format, outline.shape, outline.nbytes) == (made.format, made.shape, made.nbytes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ENCODERS)
def test_damaged_weights_are_refused(name: str, value: float) -> None:
    values = np.zeros((4, 64), np.float32)
    values[2, 5] = value
    with pytest.raises(CheckpointError, match="file: w: damaged"):
        Encoder(name)(stored(values))


@pytest.mark.parametrize("value", [7e4, -7e4, 8e6, 3e38])
def test_large_weights_are_held_or_refused_but_not_called_damaged(value: float) -> None:
    """bfloat16 holds what float32 does; scales of other formats are float16."""
    values = np.zeros((4, 64), np.float32)
    values[2, 5] = value
    for name, most in {"BF16": 3.3e38, "Q8_0": 8.3e6, "Q4_1": 65504}.items():
        if abs(value) <= most:
            found = Encoder(name)(stored(values)).dequantize()
            np.testing.assert_allclose(found, values, rtol=1 / 250)
        else:
            with pytest.raises(CheckpointError, match=f"file: w: values up to .* are too large for {name}: use"):
                Encoder(name)(stored(values))


def test_every_encoder_has_a_format() -> None:
    assert set(ENCODERS) <= set(FORMATS)
