"""compressed-tensors: integers in words or bytes with scales, and the config's groups that say how many bits."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.quantized.integer_matrix import (
    IntegerMatrix,
    array,
    floats,
    module_weight,
    unpack_stream,
    unpack_words,
)
from twostroke.models.formats.tensor import RawTensor

Tensors = dict[str, RawTensor]
FORMATS = (
    "dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip


def check_compressed(config: Mapping[str, Any], where: str) -> None:
    """Raises UnsupportedArchitecture naming a format or a transform that is not read."""
    groups = config.get("config_groups")
    kinds = [config.get("format"), *(group.get("format") for group in _groups(groups))]
    for kind in kinds:
        if kind is not None and kind not in FORMATS:
            raise UnsupportedArchitecture(f"{where}: compressed-tensors in the format {kind!r:.40} is not supported")
    for key in ("transform_config", "sparsity_config"):
        settings = config.get(key)
        if settings and not (isinstance(settings, dict) and settings.get("format") == "dense"):
            raise UnsupportedArchitecture(f"{where}: compressed-tensors with a {key} is not supported")


def unpack_compressed(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """Matrices of integers: `X.weight_packed` words, or `X.weight` in int8, with `X.weight_scale` [rows, groups].

    Words hold codes plus half of their range, and their matrix has the shape `X.weight_shape`. `X.weight_zero_point`
    is packed along rows, or in int8. `X.weight_g_idx` is the group of each column.
    """
    found = dict(tensors)
    for name in tensors:
        module, _, part = name.rpartition(".")
        packed = part == "weight_packed" and tensors[name].format == "I32"
        if not packed and (part != "weight" or tensors[name].format != "I8" or f"{module}.weight_scale" not in tensors):
            continue
        source = module_weight(tensors[name], name)
        scale, index = found.pop(f"{module}.weight_scale", None), found.pop(f"{module}.weight_g_idx", None)
        shape, zero = found.pop(f"{module}.weight_shape", None), found.pop(f"{module}.weight_zero_point", None)
        codes = found.pop(name)
        if scale is None or (packed and shape is None):
            raise CheckpointError(f"{source}: its scale or its shape is missing")
        bits = _bits(config, module, source) if packed else 8
        size = tuple(int(number) for number in array(shape)) if shape is not None and packed else codes.shape
        if len(size) != 2 or len(codes.shape) != 2 or not all(size):
            raise CheckpointError(f"{source}: shape {size} where a matrix is needed")
        scales = floats(scale)
        scales = scales if scales.ndim == 2 else np.repeat(scales.reshape(-1, 1), size[0] // scales.size, axis=0)
        zeros = np.zeros(scales.shape, np.int16) if zero is None else _zeros(zero, bits, scales.shape)
        known = IntegerMatrix(
            (size[0], size[1]),
            lambda codes=codes, bits=bits, size=size, packed=packed: _codes(codes, bits, size, packed),
            (-(1 << bits - 1), (1 << bits - 1) - 1),
            scales,
            zeros,
            _columns(index),
        )
        parts = tuple(part for part in (codes, scale, zero, index) if part is not None)
        found[f"{module}.weight"] = known.tensor(source, f"compressed-tensors int{bits}", parts)
    return found


def _columns(index: RawTensor | None) -> np.ndarray | None:
    """The group of each column; None if they are in order (a table of -1 says so too)."""
    if index is None:
        return None
    groups = array(index)
    return None if (groups < 0).any() else groups


def _codes(tensor: RawTensor, bits: int, size: tuple[int, ...], packed: bool) -> np.ndarray:
    words = array(tensor)
    return _signed_fields(words, bits, size[1]) if packed else words


def _zeros(tensor: RawTensor, bits: int, shape: tuple[int, ...]) -> np.ndarray:
    zeros = array(tensor)
    if tensor.format == "I32":
        zeros = _signed_fields(zeros.T, bits, shape[0]).T
    return np.broadcast_to(zeros.reshape(-1, zeros.shape[-1] if zeros.ndim > 1 else 1), shape).astype(np.int16)


def _signed_fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[..., k] words -> [..., count] int8. Older files leave the rest of a word free that holds no whole field."""
    unpack = unpack_stream if words.shape[-1] == -(-count * bits // 32) else unpack_words
    fields = unpack(words, bits)[..., :count]
    return (fields.astype(np.int16) - (1 << bits - 1)).astype(np.int8)


def _groups(groups: Any) -> list[dict[str, Any]]:
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _bits(config: Mapping[str, Any], module: str, source: str) -> int:
    """The bits of a module's weights, by the first group whose targets name it or the class Linear."""
    for group in _groups(config.get("config_groups")):
        weights = group.get("weights")
        if not isinstance(weights, dict) or not any(
            _is_target(target, module) for target in group.get("targets") or ()
        ):
            continue
        bits = weights.get("num_bits")
        if type(bits) is int and 1 < bits <= 8:
            return bits
        raise CheckpointError(f"{source}: num_bits must be an integer from 2 to 8, not {bits!r:.20}")
    raise CheckpointError(f"{source}: no group of the quantization_config is for this module")


def _is_target(target: Any, module: str) -> bool:
    if str(target).startswith("re:"):
        return re.match(str(target)[3:], module) is not None
    return target == "Linear" or module == target or module.endswith(f".{target}")
