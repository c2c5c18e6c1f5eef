"""GPTQ and AWQ: words of codes along one axis of the transposed matrix, and words of zero points."""

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
)
from twostroke.models.formats.tensor import RawTensor

Tensors = dict[str, RawTensor]
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of the output that comes first, second, ...


def unpack_gptq(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """Unpack `X.qweight` [columns * bits / 32, rows], `X.qzeros` [groups, rows * bits / 32], `X.scales` [groups, rows].

    `X.g_idx` is the group of each column, if columns were quantized in another order (desc_act). In version 1 of the
    format a zero point is stored minus one.
    """
    kind = str(config.get("checkpoint_format") or "gptq")
    if kind not in GPTQ_FORMATS:
        raise UnsupportedArchitecture(
            f"{where}: GPTQ in the format {kind!r:.40} is not supported, only gptq and gptq_v2"
        )
    found = dict(tensors)
    for module in _modules(tensors):
        source = module_weight(tensors[f"{module}.qweight"], f"{module}.qweight")
        parts = _take(found, module, ("qweight", "qzeros", "scales"), source)
        index = found.pop(f"{module}.g_idx", None)
        qweight, scales = parts["qweight"], floats(parts["scales"]).T
        rows, packed = scales.shape[0], array(parts["qzeros"])
        bits = packed.shape[-1] * 32 / rows
        if bits not in (2, 3, 4, 8) or qweight.shape[1:] != (rows,) or qweight.shape[0] * 32 % bits:
            raise CheckpointError(f"{source}: codes {qweight.shape} and scales {scales.shape} do not fit together")
        bits = int(bits)
        columns = qweight.shape[0] * 32 // bits
        zeros = unpack_stream(packed, bits).astype(np.int16).T + np.int16(GPTQ_FORMATS[kind])
        groups = None if index is None else array(index)
        if groups is not None and _in_order(groups, columns, scales.shape[1]):
            groups = None

        def codes(qweight: RawTensor = qweight, bits: int = bits) -> np.ndarray:
            return unpack_stream(array(qweight).T, bits)

        known = IntegerMatrix((rows, columns), codes, (0, (1 << bits) - 1), scales, zeros, groups)
        stored = (*parts.values(), *([index] if index is not None else ()))
        found[f"{module}.weight"] = known.tensor(source, f"GPTQ {bits}-bit", stored)
    return found


def unpack_awq(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """Unpack `X.qweight` [columns, rows / 8], `X.qzeros` [groups, rows / 8], `X.scales` [groups, rows]; 4 bits."""
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedArchitecture(f"{where}: AWQ in the version {version!r:.40} is not supported, only gemm")
    found = dict(tensors)
    for module in _modules(tensors):
        source = module_weight(tensors[f"{module}.qweight"], f"{module}.qweight")
        parts = _take(found, module, ("qweight", "qzeros", "scales"), source)
        qweight, scales = parts["qweight"], floats(parts["scales"]).T
        rows, columns = scales.shape[0], qweight.shape[0]
        if qweight.shape[1:] != (rows // 8,) or rows % 8:
            raise CheckpointError(f"{source}: codes {qweight.shape} and scales {scales.shape} are not those of 4 bits")
        zeros = _awq_codes(parts["qzeros"]).astype(np.int16)

        def codes(qweight: RawTensor = qweight) -> np.ndarray:
            return _awq_codes(qweight)

        known = IntegerMatrix((rows, columns), codes, (0, 15), scales, zeros)
        found[f"{module}.weight"] = known.tensor(source, "AWQ 4-bit", tuple(parts.values()))
    return found


def _modules(tensors: Tensors) -> list[str]:
    return [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]


def _take(found: Tensors, module: str, names: tuple[str, ...], source: str) -> Tensors:
    """Removes a module's tensors from `found`. Raises CheckpointError if one is missing or is no matrix."""
    missing = [name for name in names if f"{module}.{name}" not in found]
    if missing:
        raise CheckpointError(f"{source}: the tensor {module}.{missing[0]} is missing")
    parts = {name: found.pop(f"{module}.{name}") for name in names}
    for part in parts.values():
        if len(part.shape) != 2 or 0 in part.shape:
            raise CheckpointError(f"{part.source}: shape {part.shape} where a matrix is needed")
    return parts


def _in_order(groups: np.ndarray, columns: int, count: int) -> bool:
    return columns % count == 0 and np.array_equal(groups, np.arange(columns) // (columns // count))


def _awq_codes(tensor: RawTensor) -> np.ndarray:
    """[columns, rows / 8] words -> [rows, columns] uint8."""
    fields = unpack_stream(array(tensor), 4).reshape(tensor.shape[0], -1, 8)
    return fields[..., AWQ_ORDER].reshape(tensor.shape[0], -1).T
