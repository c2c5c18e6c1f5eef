"""Quantized matrices as each method stores them, against the method's own package or a packer written from its text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.quantized.compressed import check_compressed, unpack_compressed
from twostroke.models.checkpoints.huggingface.quantized.gptq import unpack_awq, unpack_gptq
from twostroke.models.checkpoints.huggingface.quantized.low_bit_floats import (
    unpack_bitsandbytes,
    unpack_fp4,
    unpack_fp8,
)
from twostroke.models.checkpoints.huggingface.quantized.mlx import unpack_mlx
from twostroke.models.checkpoints.huggingface.safetensors import read_safetensors
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor

DATA = Path(__file__).parent / "data"
Tensors = dict[str, RawTensor]


def case(file: str, name: str) -> tuple[Tensors, np.ndarray]:
    """The tensors of a case as those of a module X, and the values that the method's package computes."""
    tensors = read_safetensors(DATA / file)
    own = {f"X.{key.removeprefix(name + '.')}": value for key, value in tensors.items() if key.startswith(name + ".")}
    expected = own.pop("X.expected")
    flat = np.ascontiguousarray(expected.data).reshape(-1)
    values = flat.view("<f4") if expected.format == "F32" else flat.view(ml_dtypes.bfloat16)
    return own, values.reshape(expected.shape)


def values(tensors: Tensors) -> np.ndarray:
    assert set(tensors) <= {"X.weight", "X.input_global_scale"}
    return tensors["X.weight"].unpack().dequantize()


def compressed_config(name: str) -> dict[str, Any]:
    with safe_open(DATA / "compressed_tensors.safetensors", "np") as file:
        weights = json.loads(file.metadata()["args"])[name]
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("name", "format"),
    [("group2", "Q4_0"), ("group3", "Q4_0"), ("group4", "Q4_0"), ("group5", "Q5_0"), ("group8", "Q8_0"),
     ("asymmetric", "Q5_0"), ("channel4", "Q4_0"), ("int8", "F32")],
)  # fmt: skip
def test_compressed_integers_are_those_of_the_package(name: str, format: str) -> None:
    tensors, expected = case("compressed_tensors.safetensors", name)
    found = unpack_compressed(compressed_config(name), tensors, "config.json")
    assert found["X.weight"].format == format
    assert np.array_equal(values(found), expected)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_block", "mxfp8"])
def test_fp8_is_that_of_compressed_tensors(name: str) -> None:
    tensors, expected = case("compressed_tensors.safetensors", name)
    block = {"weight_block_size": [4, 32]} if name == "fp8_block" else {}
    assert np.array_equal(values(unpack_fp8(block, tensors, "")).astype(expected.dtype), expected)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_fp4_is_that_of_compressed_tensors(name: str) -> None:
    tensors, expected = case("compressed_tensors.safetensors", name)
    assert np.array_equal(values(unpack_fp4({}, tensors, "")).astype(expected.dtype), expected)


@pytest.mark.parametrize("name", ["nf4_nested", "fp4"])
def test_four_bits_are_those_of_bitsandbytes(name: str) -> None:
    tensors, expected = case("bitsandbytes.safetensors", name)
    assert np.allclose(values(unpack_bitsandbytes({}, tensors, "")), expected, rtol=1e-6, atol=0)


def stored(tmp_path: Path, **arrays: np.ndarray) -> Tensors:
    save_file({f"X.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}, tmp_path / "x.safetensors")
    return read_safetensors(tmp_path / "x.safetensors")


def pack_gptq(numbers: np.ndarray, bits: int) -> np.ndarray:
    """[n, m] -> [n * bits / 32, m]: number i of a column is at bit i * bits of a column's words."""
    words = np.zeros((numbers.shape[0] * bits // 32, numbers.shape[1]), np.uint64)
    for i, row in enumerate(numbers.astype(np.uint64)):
        word, shift = divmod(i * bits, 32)
        words[word] |= row << np.uint64(shift) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            words[word + 1] |= row >> np.uint64(32 - shift)
    return words.astype(np.uint32).view(np.int32)


GPTQ = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def gptq_case(bits: int, groups: int, symmetric: bool, version: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """64 rows and 128 columns; the arrays of a module, and its values."""
    random, top = np.random.default_rng(bits), 1 << bits
    codes = random.integers(0, top, (128, 64))  # [columns, rows], as stored
    zeros = np.full((groups, 64), top // 2) if symmetric else random.integers(1, top, (groups, 64))
    scales = random.uniform(0.001, 0.02, (groups, 64)).astype(np.float16)
    index = np.arange(128) // (128 // groups)
    expected = (scales[index].astype(np.float32) * (codes - zeros[index]).astype(np.float32)).T
    arrays = {
        "qweight": pack_gptq(codes, bits),
        "qzeros": pack_gptq((zeros - (version == 1)).T, bits).T,
        "scales": scales,
        "g_idx": index.astype(np.int32),
    }
    return arrays, expected


@GPTQ
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(bits: int, groups: int, symmetric: bool, version: int, tmp_path: Path) -> None:
    arrays, expected = gptq_case(bits, groups, symmetric, version)
    config = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    tensors = stored(tmp_path, **arrays)
    found = unpack_gptq(config, tensors, "")
    assert np.array_equal(values(found), expected)
    exact = {2: "Q4_0", 3: "Q4_0", 4: "Q4_0" if symmetric else "Q5_0", 8: "Q8_0" if symmetric else "F32"}
    assert found["X.weight"].format == exact[bits]
    del tensors["X.g_idx"]  # which older files lack
    assert np.array_equal(values(unpack_gptq(config, tensors, "")), expected)


@GPTQ
def test_gptq_with_columns_in_another_order(bits: int, tmp_path: Path) -> None:
    arrays, expected = gptq_case(bits, 4, False, 1)
    order = np.random.default_rng(1).permutation(128)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (128, 64))  # those of the case
    arrays |= {"qweight": pack_gptq(codes[order], bits), "g_idx": arrays["g_idx"][order]}
    found = unpack_gptq({}, stored(tmp_path, **arrays), "")
    assert found["X.weight"].format == "F32"
    assert np.array_equal(values(found), expected[:, order])


def test_gptq_has_zero_points_of_up_to_sixteen(tmp_path: Path) -> None:
    arrays, _ = gptq_case(4, 4, False, 1)
    arrays["qzeros"] = np.full_like(arrays["qzeros"], -1)  # 15 in each field
    codes = np.random.default_rng(4).integers(0, 16, (128, 64))
    expected = (arrays["scales"][arrays["g_idx"]].astype(np.float32) * (codes - 16).astype(np.float32)).T
    assert np.array_equal(values(unpack_gptq({}, stored(tmp_path, **arrays), "")), expected)


def pack_awq(numbers: np.ndarray) -> np.ndarray:
    """[n, m] -> [n, m / 8]: the nibbles of a word are outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= numbers[:, output::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


@pytest.mark.parametrize("zero_point", [True, False])
def test_awq(zero_point: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (128, 64))
    zeros = random.integers(0, 16, (4, 64)) if zero_point else np.full((4, 64), 8)
    scales = random.uniform(0.001, 0.02, (4, 64)).astype(np.float16)
    index = np.arange(128) // 32
    expected = (scales[index].astype(np.float32) * (codes - zeros[index]).astype(np.float32)).T
    tensors = stored(tmp_path, qweight=pack_awq(codes), qzeros=pack_awq(zeros), scales=scales)
    found = unpack_awq({"version": "GEMM"}, tensors, "")
    assert found["X.weight"].format == ("Q5_0" if zero_point else "Q4_0")
    assert np.array_equal(values(found), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlx(bits: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 1 << bits, (16, 128))
    scales, biases = (random.uniform(-0.02, 0.02, (16, 2)).astype(np.float16) for _ in range(2))
    words = pack_gptq(codes.T, bits).T.view(np.uint32)
    found = unpack_mlx({"group_size": 64}, stored(tmp_path, weight=words, scales=scales, biases=biases), "")
    assert found["X.weight"].format == ("Q4_1" if bits <= 4 else "F32")
    wide = [np.repeat(numbers.astype(np.float32), 64, axis=1) for numbers in (scales, biases)]
    assert np.array_equal(values(found), codes.astype(np.float32) * wide[0] + wide[1])


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(-127, 128, (16, 32)).astype(np.int8)
    scale = random.uniform(0.1, 1, 16).astype(np.float32)
    tensors = stored(tmp_path, weight=codes, SCB=scale, weight_format=np.zeros((), np.uint8))
    expected = codes.astype(np.float32) * (scale[:, None] / np.float32(127))
    assert np.array_equal(values(unpack_bitsandbytes({}, tensors, "")), expected)


@pytest.mark.parametrize("shape", [(), (1,), (200,), (200, 1), (2, 3)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_scales_of_fp8(shape: tuple[int, ...], name: str, tmp_path: Path) -> None:
    """For all, for a row, or for blocks of 128 by 128 of which the last are not whole."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.asarray(random.uniform(0.5, 2, shape), np.float32)
    if shape == (2, 3):
        spread = np.array([[scale[r // 128, c // 128] for c in range(300)] for r in range(200)])
    else:
        spread = scale.reshape(-1, 1)
    (tmp_path / "a").mkdir()
    tensors = stored(tmp_path / "a", weight=weight.view(np.uint8), **{name: scale})
    tensors["X.weight"] = RawTensor("X.weight", "F8_E4M3", (200, 300), tensors["X.weight"].data, "file: X.weight")
    assert np.array_equal(values(unpack_fp8({}, tensors, "")), weight.astype(np.float32) * spread)


Change = Callable[[dict[str, np.ndarray]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("scales"), "X.scales is missing"),
        (lambda arrays: arrays.update(qweight=arrays["qweight"][:3]), "groups of its columns are damaged"),
        (lambda arrays: arrays.update(scales=arrays["scales"][:3]), "do not fit"),
        (lambda arrays: arrays.update(scales=arrays["scales"][:, :40]), "do not fit"),
        (lambda arrays: arrays.update(g_idx=arrays["g_idx"] + 1), "a group that has no scale"),
        (lambda arrays: arrays.update(g_idx=arrays["g_idx"][:5]), "the groups of its columns are damaged"),
        (lambda arrays: arrays.update(qzeros=arrays["qzeros"].reshape(-1)), "where a matrix is needed"),
    ],
)
def test_damaged_tensors_are_named(change: Change, message: str, tmp_path: Path) -> None:
    arrays, _ = gptq_case(4, 4, False, 1)
    change(arrays)
    with pytest.raises(CheckpointError, match=message) as raised:
        unpack_gptq({}, stored(tmp_path, **arrays), "")
    assert "X." in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_damaged_scale_is_found_when_it_is_read(tmp_path: Path) -> None:
    arrays, _ = gptq_case(4, 4, True, 1)
    arrays["scales"][2, 3] = np.nan
    found = unpack_gptq({}, stored(tmp_path, **arrays), "")["X.weight"]
    assert isinstance(found, PackedTensor)
    assert np.isnan(found.unpack().dequantize()).any()  # the reference shows it, and an encoder refuses it


@pytest.mark.parametrize(
    ("unpack", "config", "message"),
    [
        (unpack_gptq, {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        (unpack_awq, {"version": "gemv"}, "AWQ in the version 'gemv'"),
        (lambda config, _, where: check_compressed(config, where), {"format": "marlin-24"}, "format 'marlin-24'"),
        (lambda config, _, where: check_compressed(config, where), {"transform_config": {"a": 1}}, "transform_config"),
    ],
)
def test_what_is_not_read_is_named(unpack: Callable[..., Any], config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        unpack(config, {}, "config.json")
