"""MLX: words of codes, with a scale and a bias for a group of columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.quantized.integer_matrix import (
    array,
    floats,
    module_weight,
    unpack_stream,
)
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor

Tensors = dict[str, RawTensor]


def unpack_mlx(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """Unpack `X.weight` [rows, columns * bits / 32] in uint32, `X.scales` and `X.biases` [rows, groups].

    The config, or its entry for a module, says how many columns are a group; sizes then say how many bits there are.
    """
    found = dict(tensors)
    for name, words in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or words.format != "U32":
            continue
        source = module_weight(words, name)
        scale, bias = found.pop(f"{module}.scales", None), found.pop(f"{module}.biases", None)
        own = config.get(module)
        group = (own if isinstance(own, dict) else config).get("group_size")
        if scale is None or bias is None or len(words.shape) != 2 or scale.shape != bias.shape:
            raise CheckpointError(f"{source}: its scales and biases are missing, or their sizes differ")
        if type(group) is not int or group <= 0 or len(scale.shape) != 2 or scale.shape[0] != words.shape[0]:
            raise CheckpointError(f"{source}: scales {scale.shape} do not fit groups of {group!r:.20}")
        shape = (words.shape[0], scale.shape[1] * group)
        bits = words.shape[1] * 32 / shape[1]
        if bits not in (2, 3, 4, 5, 6, 8):
            raise CheckpointError(f"{source}: words {words.shape} do not hold a matrix of {shape}")
        found[name] = _packed(source, shape, int(bits), (words, scale, bias))
    return found


def _packed(
    source: str, shape: tuple[int, int], bits: int, parts: tuple[RawTensor, RawTensor, RawTensor]
) -> PackedTensor:
    """The matrix as Q4_1 if that holds it exactly, otherwise in float32."""
    words = parts[0]
    scales, biases = floats(parts[1]).reshape(-1, 1), floats(parts[2]).reshape(-1, 1)
    group = shape[0] * shape[1] // len(scales)
    with np.errstate(over="ignore"):
        halves = [numbers.astype("<f2") for numbers in (scales, biases)]
    exact = all((half.astype(np.float32) == full).all() for half, full in zip(halves, (scales, biases), strict=True))
    if bits > 4 or group % 32 or not exact:

        def values() -> np.ndarray:
            return (unpack_stream(array(words), bits).reshape(len(scales), -1) * scales + biases).view(np.uint8)

        return PackedTensor.of(shape, "F32", source, f"MLX {bits}-bit", parts, values)

    def blocks() -> np.ndarray:
        codes = unpack_stream(array(words), bits).reshape(-1, 32)
        heads = np.repeat(np.concatenate(halves, axis=-1), group // 32, axis=0).view(np.uint8)
        return np.concatenate((heads, codes[:, :16] | codes[:, 16:] << 4), axis=-1)

    return PackedTensor.of(shape, "Q4_1", source, f"MLX {bits}-bit", parts, blocks)
