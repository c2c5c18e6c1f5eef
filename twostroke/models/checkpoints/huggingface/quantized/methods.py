"""The methods of quantization that directories are read with, by their names in `quantization_config`."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.json_files import read_json
from twostroke.models.checkpoints.huggingface.quantized.compressed import check_compressed, unpack_compressed
from twostroke.models.checkpoints.huggingface.quantized.gptq import unpack_awq, unpack_gptq
from twostroke.models.checkpoints.huggingface.quantized.low_bit_floats import (
    unpack_bitsandbytes,
    unpack_fp4,
    unpack_fp8,
)
from twostroke.models.checkpoints.huggingface.quantized.mlx import unpack_mlx
from twostroke.models.formats.tensor import RawTensor

Tensors = dict[str, RawTensor]
Unpack = Callable[[Mapping[str, Any], Tensors, str], Tensors]

METHODS: dict[str, tuple[Unpack, ...]] = {
    "fp8": (unpack_fp8,),
    "fbgemm_fp8": (unpack_fp8,),
    "modelopt": (unpack_fp8, unpack_fp4),
    "modelopt_fp4": (unpack_fp8, unpack_fp4),
    "gptq": (unpack_gptq,),
    "awq": (unpack_awq,),
    "compressed-tensors": (unpack_compressed, unpack_fp8, unpack_fp4),
    "bitsandbytes": (unpack_bitsandbytes,),
    "mlx": (unpack_mlx,),
    "mxfp4": (),  # of gpt-oss: `split_tensors` reads it
}
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Scales of activations and of a KV cache, which are not quantized as these say.
IGNORED = re.compile(
    r".*\.(([kvq]|kv|prob|input|output|activation)_scale(_ub)?|(input|output)_global_scale|.*_bmm\d?_quantizer\..*)"
)


def quantization(directory: Path) -> tuple[str, Mapping[str, Any]] | None:
    """The method and the settings of a directory, from its config.json or the file beside it; None if there are none.

    Raises UnsupportedArchitecture naming a method that is not read.
    """
    path = directory / "config.json"
    config = read_json(path)
    inner = config.get("text_config")
    settings = config.get("quantization_config") or (
        inner.get("quantization_config") if isinstance(inner, dict) else None
    )
    settings = settings or config.get("compression_config")
    method = None
    if not settings and (settings := config.get("quantization")):
        method = "mlx"
    for file, kind in BESIDE.items():
        if not settings and (directory / file).is_file():
            path, settings, method = directory / file, read_json(directory / file), kind
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: quantization_config must be an object")
    stated = settings.get("quant_method")
    if stated in ("auto-round", "intel/auto-round"):
        stated = next((kind for kind in ("gptq", "awq") if kind in str(settings.get("packing_format"))), stated)
    elif stated is None and method is None and {"bits", "group_size"} <= settings.keys():
        stated = "mlx"
    method = str(stated or method or "a method without a name")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise UnsupportedArchitecture(f"{path}: weights quantized by {method!r:.40} are not supported, only {known}")
    if method == "compressed-tensors":
        check_compressed(settings, str(path))
    return method, settings


def unpacked(directory: Path, tensors: Tensors) -> Tensors:
    """The tensors of a directory, with one `X.weight` in place of the tensors that a quantized matrix is stored in.

    Raises UnsupportedArchitecture naming a method or a format that is not read, CheckpointError for damaged tensors.
    """
    found = quantization(directory)
    if found is None:
        return unpack_fp8({}, tensors, str(directory))  # numbers of 8 bits without scales too
    method, settings = found
    for unpack in METHODS[method]:
        tensors = unpack(settings, tensors, str(directory / "config.json"))
    return {name: tensor for name, tensor in tensors.items() if not IGNORED.fullmatch(name)}
