"""Number formats against the `gguf` package, bit for bit, and the views and copies of RawTensor."""

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostroke.backends.reference.operations import Operations
from twostroke.errors import CheckpointError
from twostroke.models.formats import tensor as formats
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor

QUANTIZABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # the package has no encoder for K-quants


NUMBERS = {"F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def reference(data: np.ndarray, name: str) -> np.ndarray:
    """By the `gguf` package, or by the definition of those that it has no code for."""
    if name in NUMBERS:
        return data.view(NUMBERS[name]).astype(np.float32)
    if name == "Q8_K":
        blocks = data.reshape(-1, 292)
        return blocks[:, :4].copy().view("<f4") * blocks[:, 4:260].view(np.int8).astype(np.float32)
    if name == "Q1_0":
        blocks = data.reshape(-1, 18)
        d = blocks[:, :2].copy().view("<f2").astype(np.float32)
        bits = blocks[:, 2 + np.arange(128) // 8] >> (np.arange(128) % 8) & 1
        return np.where(bits == 1, d, -d)
    return gguf.dequantize(data, gguf.GGMLQuantizationType[name])


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    # Random bytes make f16 scales that are NaN, whose payload arithmetic need not keep.
    return bool(np.all((ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))))


@pytest.mark.parametrize("name", FORMATS)
def test_block_sizes_are_ggml_s(name: str) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (FORMATS[name].block_size, FORMATS[name].block_bytes) == (block_size, block_bytes)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value)")
@pytest.mark.parametrize("name", FORMATS)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 40))
def test_any_bytes_decode_to_the_reference_s_bits(name: str, seed: int, count: int) -> None:
    fmt = FORMATS[name]
    blocks = np.random.default_rng(seed).integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
    ours = fmt.decode(blocks)
    assert ours.shape == (count, fmt.block_size)
    assert ours.dtype == np.float32
    assert same_bits(ours, reference(blocks, name).reshape(ours.shape))


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_values_come_back_close(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((48, 256)).astype(np.float32)
    packed = gguf.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    tensor = RawTensor.from_bytes("w", name, (48, 256), packed.reshape(-1), "here")
    back = tensor.dequantize()
    assert same_bits(back, reference(packed, name).reshape(48, 256))
    assert np.abs(back - values).max() < {"F32": 1e-9, "F16": 1e-2, "BF16": 3e-2, "Q8_0": 3e-2}.get(name, 0.5)


def random_tensor(name: str, rows: int, columns: int) -> RawTensor:
    data = np.random.default_rng(2).integers(0, 256, rows * FORMATS[name].row_bytes(columns), dtype=np.uint8)
    data.setflags(write=False)  # as a mapped file is
    return RawTensor.from_bytes("w", name, (rows, columns), data, "file: w")


@pytest.mark.filterwarnings("ignore:(overflow|invalid value)")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("chunk", [256, 768, 1 << 20])
def test_chunks_do_not_show(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(name, 7, 512)
    monkeypatch.setattr(formats, "CHUNK_ELEMENTS", chunk)
    whole = FORMATS[name].decode(tensor.data.reshape(-1, FORMATS[name].block_bytes)).reshape(7, 512)
    assert same_bits(tensor.dequantize(), whole)
    half = Operations("cpu", "bfloat16").pack([tensor]).matrix
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.nan_to_num(), torch.from_numpy(whole).to(torch.bfloat16).nan_to_num())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value)")
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_a_view_and_a_permutation_is_lossless(name: str) -> None:
    tensor = random_tensor(name, 6, 256)
    values = tensor.dequantize()
    some = tensor.rows(2, 5)
    assert np.shares_memory(some.data, tensor.data)
    assert np.array_equal(np.nan_to_num(some.dequantize()), np.nan_to_num(values[2:5]))
    order = [3, 1, 5, 0, 2, 4]
    permuted = tensor.permute_rows(order)
    assert np.array_equal(np.nan_to_num(permuted.dequantize()), np.nan_to_num(values[order]))
    assert np.array_equal(permuted.permute_rows(np.argsort(order)).data, tensor.data)


def test_sizes() -> None:
    tensor = random_tensor("Q4_K", 3, 512)
    assert tensor.data.shape == (3, 288)
    assert (tensor.nbytes, tensor.num_elements) == (864, 1536)
    vector = RawTensor.from_bytes("n", "F32", (5,), np.zeros(20, np.uint8), "here")
    assert vector.data.shape == (1, 20)
    assert vector.dequantize().shape == (5,)


def test_misuse_is_refused() -> None:
    tensor = random_tensor("Q8_0", 4, 64)
    for order in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]):
        with pytest.raises(ValueError, match="file: w: not an order"):
            tensor.permute_rows(order)
    with pytest.raises(ValueError, match="no rows 1 to 5"):
        tensor.rows(1, 5)
    with pytest.raises(CheckpointError, match="file: w: 272 bytes where Q8_0"):
        RawTensor.from_bytes("w", "Q8_0", (5, 64), tensor.data.reshape(-1), "file: w")
    with pytest.raises(CheckpointError, match="not whole Q8_0 blocks"):
        RawTensor.from_bytes("w", "Q8_0", (4, 60), tensor.data.reshape(-1), "file: w")


def test_released_bytes_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(random_tensor("Q8_0", 64, 1024).data.tobytes())
    with path.open("rb") as stream:
        whole = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    tensor = RawTensor.from_bytes("w", "Q8_0", (64, 1024), whole, "file: w")
    for part in (tensor, tensor.rows(7, 23), random_tensor("Q8_0", 4, 64)):
        before = part.data.copy()
        part.release()
        assert np.array_equal(part.data, before)
