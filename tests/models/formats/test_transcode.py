"""Formats without a kernel, in the nearest that has one: exact, or within the error that is told."""

import gguf
import numpy as np
import pytest

from tests.models.formats.blocks import random_matrix
from twostroke.backends.native.weights import FORMATS as KERNELS
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.gguf.file import TYPE_NAMES
from twostroke.models.formats import encode
from twostroke.models.formats.blocks import FORMATS, SCALED
from twostroke.models.formats.encode import Encoder
from twostroke.models.formats.transcode import SUBSTITUTES

WHOLE_NUMBERS = ("I16", "I32", "I64")  # of any size: not weights


def test_every_type_of_gguf_is_read_and_has_a_kernel_or_the_nearest() -> None:
    known = set(TYPE_NAMES.values())
    assert {kind.name for kind in gguf.GGMLQuantizationType} <= known
    assert known - set(FORMATS) == {"Q8_1"}  # of activations; no file holds it
    assert set(FORMATS) == set(KERNELS) | set(SUBSTITUTES)
    assert not set(KERNELS) & set(SUBSTITUTES)
    assert {near.format for near in SUBSTITUTES.values()} <= set(KERNELS)


@pytest.mark.parametrize("name", sorted(set(SUBSTITUTES) - set(WHOLE_NUMBERS)))
def test_the_error_is_the_one_that_is_told(name: str) -> None:
    tensor, near = random_matrix(name, 64, 1024), SUBSTITUTES[name]
    before, after = tensor.dequantize(), Encoder(near.format)(tensor)
    assert (after.format, after.shape) == (near.format, tensor.shape)
    if near.error == 0:
        assert np.array_equal(after.dequantize(), before)
        return
    change = np.sqrt(np.mean((after.dequantize() - before) ** 2) / np.mean(before**2))
    assert 0.5 * near.error < change < 1.05 * near.error


@pytest.mark.parametrize("name", sorted(set(SUBSTITUTES) - {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}))
def test_no_encoding_of_four_bits_is_nearer(name: str) -> None:
    tensor = random_matrix(name, 64, 1024, size=0.01) if name not in WHOLE_NUMBERS else random_matrix("I8", 64, 1024)
    before = tensor.dequantize()
    distances = [
        np.abs(Encoder(format)(tensor).dequantize() - before).sum() for format in (SUBSTITUTES[name].format, "Q4_1")
    ]
    assert distances[0] <= distances[1]


@pytest.mark.parametrize("name", sorted(SCALED.keys() - {"MXFP4"}))
def test_chunks_and_threads_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, encoder = random_matrix(name, 48, 512), Encoder(SUBSTITUTES[name].format, threads=3)
    whole = encoder(tensor)
    monkeypatch.setattr(encode, "CHUNK_ELEMENTS", 768)
    assert np.array_equal(encoder(tensor).data, whole.data)


@pytest.mark.parametrize("name", sorted({"Q2_K", "NVFP4", *SCALED} - {"MXFP4"}))
def test_damaged_scales_are_refused(name: str) -> None:
    tensor = random_matrix(name, 8, 512)
    damaged = tensor.data.copy()
    damaged[3] = 0x7F if name == "NVFP4" else 0xFF  # NaN in every float16 and float32
    raw = random_matrix(name, 8, 512)
    broken = type(raw)("w", name, raw.shape, damaged, "file: w")
    if name == "NVFP4":  # whose numbers are all finite
        assert np.isfinite(broken.dequantize()).all()
        return
    with pytest.raises(CheckpointError, match="file: w: damaged"):
        Encoder(SUBSTITUTES[name].format)(broken)
