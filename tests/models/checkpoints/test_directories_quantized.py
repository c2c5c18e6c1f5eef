"""Whole quantized directories: the reference computes with the very values, the native backend nearly."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.linalg import norm
from safetensors.numpy import load_file, save_file

from tests.models.checkpoints.test_quantized import pack_awq, pack_gptq
from tests.models.test_against_transformers import all_logits
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import CheckpointError, TwostrokeError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.checkpoints.quantize import quantize

IDS = [5, 9, 200, 17, 33, 5, 80, 81, 3, 44] * 2
GROUP = 32
Arrays = dict[str, np.ndarray]
native = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all of whose matrices the native backend has kernels for."""
    return write_model("qwen3", tmp_path_factory.mktemp("plain"), hidden_size=128, intermediate_size=192)


def rounded(matrix: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [rows, columns], scales and zero points [rows, groups] that are near a matrix."""
    grouped = matrix.reshape(len(matrix), -1, GROUP)
    low, high = grouped.min(-1), grouped.max(-1)
    scales = ((high - low) / ((1 << bits) - 1)).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 1, (1 << bits) - 1)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, (1 << bits) - 1)
    return codes.reshape(matrix.shape).astype(np.int64), scales, zeros.astype(np.int64)


def values(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    grouped = codes.reshape(*scales.shape, GROUP) - zeros[..., None]
    return (grouped.astype(np.float32) * scales[..., None]).reshape(codes.shape)


def gptq(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
    codes, scales, zeros = rounded(matrix, 4)
    index = np.arange(matrix.shape[1], dtype=np.int32) // GROUP
    packed = {
        "qweight": pack_gptq(codes.T, 4),
        "qzeros": pack_gptq(zeros - 1, 4).T,
        "scales": scales.T.astype(np.float16),
    }
    return packed | {"g_idx": index}, values(codes, scales, zeros)


def awq(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
    codes, scales, zeros = rounded(matrix, 4)
    return (
        {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T), "scales": scales.T.astype(np.float16)},
        values(codes, scales, zeros),
    )


def compressed(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
    codes, scales, zeros = rounded(matrix, 4)
    packed = {
        "weight_packed": pack_gptq(codes.T, 4).T,
        "weight_zero_point": pack_gptq(zeros, 4),
        "weight_scale": scales,
        "weight_shape": np.array(matrix.shape, np.int64),
    }
    return packed, values(codes, scales, zeros)


def fp8(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
    rows, columns = (-(-size // 128) for size in matrix.shape)
    scale = np.full((rows, columns), np.abs(matrix).max() / 448, np.float32)
    weight = (matrix / scale[0, 0]).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": weight, "weight_scale_inv": scale}, weight.astype(np.float32) * scale[0, 0]


def mlx(matrix: np.ndarray) -> tuple[Arrays, np.ndarray]:
    codes, scales, zeros = rounded(matrix, 4)
    biases = (-scales * zeros).astype(np.float16).astype(np.float32)
    wide = [np.repeat(numbers, GROUP, axis=1) for numbers in (scales, biases)]
    packed = {"weight": pack_gptq(codes.T, 4).T.view(np.uint32), "scales": scales.astype(np.float16)}
    return packed | {"biases": biases.astype(np.float16)}, codes.astype(np.float32) * wide[0] + wide[1]


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["layers.1.mlp.up_proj"]},
    "compressed": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                   "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "mlx": {"group_size": GROUP, "bits": 4},
}  # fmt: skip
PACKERS: dict[str, Callable[[np.ndarray], tuple[Arrays, np.ndarray]]] = {
    "gptq": gptq, "awq": awq, "compressed": compressed, "fp8": fp8, "mlx": mlx,
}  # fmt: skip
SKIPPED = ("embed_tokens", "norm", "layers.1.mlp.up_proj")  # stay in float32


def write(plain: Path, directory: Path, method: str, config: dict[str, Any] | None = None, **more: np.ndarray) -> Path:
    """The directory quantized; beside it, in `same`, one in float32 with the values of its matrices."""
    tensors, packed, same = load_file(plain / "model.safetensors"), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or any(part in name for part in SKIPPED):
            packed[name] = same[name] = tensor
            continue
        parts, same[name] = PACKERS[method](tensor)
        packed |= {f"{module}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    stated = json.loads((plain / "config.json").read_text())
    key = "quantization" if method == "mlx" else "quantization_config"
    for place, kept, facts in (
        (directory, packed | more, {key: config or CONFIGS[method]}),
        (directory / "same", same, {}),
    ):
        place.mkdir(exist_ok=True)
        for file in plain.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                (place / file.name).write_bytes(file.read_bytes())
        (place / "config.json").write_text(json.dumps(stated | facts))
        save_file(kept, place / "model.safetensors")
    return directory


METHODS = pytest.mark.parametrize("method", PACKERS)


def logits(directory: Path, **options: Any) -> np.ndarray:
    return all_logits(LLM(str(directory), kv_bytes=8 << 20, threads=1, **options), IDS)


@METHODS
def test_every_matrix_has_the_values_of_its_codes(method: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = open_huggingface(write(plain, tmp_path, method))
    same = open_huggingface(tmp_path / "same")
    for name in same.names():
        assert np.array_equal(checkpoint.tensor(name).dequantize(), same.tensor(name).dequantize()), name
    assert checkpoint.weights_id != same.weights_id


@METHODS
def test_the_reference_computes_with_them_exactly(method: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, method)
    assert np.array_equal(logits(tmp_path, backend="reference"), logits(tmp_path / "same", backend="reference"))


@native
@METHODS
def test_the_native_backend_opens_them_and_says_how(
    method: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = logits(write(plain, tmp_path, method) / "same", backend="reference")
    llm = LLM(str(tmp_path), kv_bytes=8 << 20, threads=1)
    assert llm.backend.name == "native"
    assert norm(all_logits(llm, IDS) - exact) < 0.05 * norm(exact)
    (line,) = caplog.messages
    assert "F32 as BF16 (changed by 0.17%)" in line
    assert ("FP8 as Q8_0 (changed by 0.6%)" in line) == (method == "fp8")
    assert "backend=reference computes with the stored values" in line


@METHODS
def test_they_may_be_encoded_otherwise(method: str, plain: Path, tmp_path: Path) -> None:
    checkpoint = open_huggingface(write(plain, tmp_path, method))
    other = quantize(checkpoint, "int8")
    for name, matrix in other.matrices().items():
        assert matrix.format == other.tensor(name).format == "Q8_0"
    changed = quantize(checkpoint, "int4").matrices()
    assert changed["layers.0.q"].format == "Q4_1"


def test_a_byte_of_any_part_is_part_of_the_identity(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "gptq")
    before = open_huggingface(tmp_path).weights_id
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_huggingface(tmp_path).weights_id != before


def test_scales_of_a_kv_cache_and_empty_biases_are_left_out(plain: Path, tmp_path: Path) -> None:
    attention = "model.layers.0.self_attn"
    more = {
        f"{attention}.{name}": np.ones(1, np.float32)
        for name in ("k_scale", "v_scale", "k_proj.input_scale", "k_proj.k_scale", "v_proj.output_scale")
    }
    write(plain, tmp_path, "gptq", None, **more, **{"model.layers.0.mlp.down_proj.bias": np.zeros(128, np.float16)})
    open_huggingface(tmp_path)
    write(plain, tmp_path, "gptq", None, **{"model.layers.0.mlp.down_proj.bias": np.ones(128, np.float16)})
    with pytest.raises(UnsupportedArchitecture, match=r"down_proj.bias: qwen3 has no such tensor"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize(("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")])
def test_a_config_beside_the_model_s_is_read(file: str, method: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, method)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / file).write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    matrix = open_huggingface(tmp_path).tensor("layers.0.gate").dequantize()
    assert np.array_equal(matrix, open_huggingface(tmp_path / "same").tensor("layers.0.gate").dequantize())


def test_auto_round_is_one_of_both(plain: Path, tmp_path: Path) -> None:
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": GROUP}
    write(plain, tmp_path, "gptq", config)
    matrix = open_huggingface(tmp_path).tensor("layers.0.gate").dequantize()
    assert np.array_equal(matrix, open_huggingface(tmp_path / "same").tensor("layers.0.gate").dequantize())


@pytest.mark.parametrize(
    "method", ["aqlm", "quip", "hqq", "torchao", "quanto", "eetq", "vptq", "higgs", "spqr", "bitnet", "marlin"]
)
def test_what_is_not_read_is_one_line_that_names_the_method(method: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "gptq", {"quant_method": method})
    with pytest.raises(
        UnsupportedArchitecture, match=f"weights quantized by '{method}' are not supported, only"
    ) as raised:
        open_huggingface(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("config", ["fp8", 4, ["a"], {"quant_method": ["gptq"]}, {"quant_method": 8}])
def test_a_damaged_config_is_refused(config: Any, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "gptq", config)
    with pytest.raises(TwostrokeError, match=r"quantization_config must be an object|weights quantized by"):
        open_huggingface(tmp_path)


def test_codes_without_a_config_are_refused(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path, "gptq")
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises((CheckpointError, UnsupportedArchitecture), match="has no such tensor"):
        open_huggingface(tmp_path)
