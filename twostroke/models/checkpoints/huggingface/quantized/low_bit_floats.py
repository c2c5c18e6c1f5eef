"""Matrices of floating-point numbers of 8 or 4 bits with scales: FP8, MXFP8, NVFP4, MXFP4, and bitsandbytes."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.quantized.integer_matrix import array, floats, module_weight
from twostroke.models.formats.low_bit_blocks import E2M1
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor

Tensors = dict[str, RawTensor]
FP8 = ("F8_E4M3", "F8_E5M2")
BLOCK = 128  # of a scale, in rows and columns, if the config does not say
STATE = ".quant_state.bitsandbytes__"


def unpack_fp8(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """`X.weight` in 8 bits times `X.weight_scale` or `X.weight_scale_inv`: for all, a row, 32 columns, or a block."""
    sizes = config.get("weight_block_size")
    block = (sizes[0], sizes[1]) if isinstance(sizes, list) and len(sizes) == 2 else (BLOCK, BLOCK)
    found = dict(tensors)
    for name, weight in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "weight" or weight.format not in FP8:
            continue
        _matrix(weight)
        scale = found.pop(f"{module}.weight_scale", None) or found.pop(f"{module}.weight_scale_inv", None)

        def values(weight: RawTensor = weight, scale: RawTensor | None = scale) -> np.ndarray:
            made = floats(weight)
            if scale is not None:
                made *= _spread(_scales(scale), weight.shape, block, weight.source)
            return made

        if scale is not None:  # wrong sizes are found now
            _spread(np.zeros(scale.shape, np.float32), weight.shape, block, weight.source)
        found[name] = _packed(weight.shape, weight.source, "FP8", (weight, scale), values)
    return found


def unpack_fp4(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """Two numbers of 4 bits in a byte, the low one first, times a scale for 16 or 32 columns and perhaps one for all.

    compressed-tensors has `X.weight_packed` and divides by `X.weight_global_scale`; ModelOpt has `X.weight` and
    multiplies by `X.weight_scale_2`.
    """
    found = dict(tensors)
    for name, codes in tensors.items():
        module, _, part = name.rpartition(".")
        scale = tensors.get(f"{module}.weight_scale")
        if part not in ("weight", "weight_packed") or codes.format != "U8" or scale is None:
            continue
        _matrix(codes)
        source = module_weight(codes, name)
        divisor, factor = (tensors.get(f"{module}.{one}") for one in ("weight_global_scale", "weight_scale_2"))
        shape = (codes.shape[0], codes.shape[1] * 2)
        if len(scale.shape) != 2 or scale.shape[0] != shape[0] or shape[1] % scale.shape[1]:
            raise CheckpointError(f"{source}: scales {scale.shape} do not fit a matrix of {shape}")

        def values(
            codes: RawTensor = codes,
            scale: RawTensor = scale,
            divisor: RawTensor | None = divisor,
            factor: RawTensor | None = factor,
        ) -> np.ndarray:
            packed, scales = array(codes), _scales(scale)
            if divisor is not None:
                scales = scales / floats(divisor).reshape(-1)[0]
            if factor is not None:
                scales = scales * floats(factor).reshape(-1)[0]
            numbers = E2M1[np.stack((packed & 15, packed >> 4), axis=-1)].astype(np.float32) / 2
            return numbers.reshape(*scales.shape, -1) * scales[..., None]

        for one in ("weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_scale_2"):
            found.pop(f"{module}.{one}", None)
        parts = (codes, scale, divisor, factor)
        found[f"{module}.weight"] = _packed(shape, source, f"FP4 of {shape[1] // scale.shape[1]}", parts, values)
    return found


def unpack_bitsandbytes(config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
    """NF4 and FP4 with their state beside them, and int8 with `X.SCB`: 127 times the scale of a row.

    Of 4 bits there are, for `X.weight`: bytes of two codes, the high one first; a table of 16 numbers; the greatest
    magnitude of each block, which may be a code of 8 bits with a table, blocks and an offset of its own.
    """
    found = dict(tensors)
    for name, codes in tensors.items():
        if STATE in name:
            weight, _, kind = name.partition(STATE)
            parts = [found.pop(name), found.pop(weight, None)]
            for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
                parts.append(found.pop(f"{weight}.{part}", None))
            _, packed, absmax, levels, *nested = parts
            if packed is None or absmax is None or levels is None:
                raise CheckpointError(f"{codes.source}: the tensors of this state are missing")
            source = f"{codes.source.rpartition(': ')[0]}: {weight}"
            found[weight] = _four_bits(_state(codes), source, kind.upper(), packed, absmax, levels, nested)
        elif name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            weight = tensors.get(f"{module}.weight")
            if weight is None or weight.format != "I8" or codes.num_elements != weight.shape[0]:
                raise CheckpointError(f"{codes.source}: there is no int8 weight that fits it")

            def rows(weight: RawTensor = weight, scale: RawTensor = codes) -> np.ndarray:
                return floats(weight) * (floats(scale).reshape(-1, 1) / np.float32(127))

            del found[name]
            found.pop(f"{module}.weight_format", None)
            found[f"{module}.weight"] = _packed(weight.shape, weight.source, "int8 rows", (weight, codes), rows)
    return found


def _state(tensor: RawTensor) -> dict[str, Any]:
    try:
        state = json.loads(array(tensor).tobytes())
        shape = state["shape"]
        ok = len(shape) == 2 and all(type(n) is int and n > 0 for n in (*shape, state["blocksize"]))
    except (ValueError, KeyError, TypeError):
        ok, state = False, {}
    if not ok:
        raise CheckpointError(f"{tensor.source}: not the state of a quantized matrix")
    return state


def _four_bits(
    state: dict[str, Any],
    source: str,
    kind: str,
    packed: RawTensor,
    absmax: RawTensor,
    levels: RawTensor,
    nested: list[RawTensor | None],
) -> PackedTensor:
    rows, columns = state["shape"]
    size = state["blocksize"]
    if (
        packed.num_elements * 2 != rows * columns
        or rows * columns % size
        or absmax.num_elements * size != rows * columns
    ):
        raise CheckpointError(f"{source}: {packed.num_elements} bytes of codes do not fit {(rows, columns)}")

    def values() -> np.ndarray:
        scales = array(absmax).reshape(-1)
        if nested[0] is not None and nested[1] is not None:
            outer = np.repeat(floats(nested[0]), state.get("nested_blocksize", 256))[: scales.size]
            scales = floats(nested[1])[scales] * outer + np.float32(state.get("nested_offset", 0))
        codes = array(packed).reshape(-1)
        numbers = floats(levels)[np.stack((codes >> 4, codes & 15), axis=-1)]
        return numbers.reshape(-1, size) * scales.astype(np.float32)[:, None]

    return _packed((rows, columns), source, f"bitsandbytes {kind}", (packed, absmax, levels, *nested), values)


def _packed(
    shape: tuple[int, ...],
    source: str,
    method: str,
    parts: tuple[RawTensor | None, ...],
    values: Callable[[], np.ndarray],
) -> PackedTensor:
    stored = tuple(part for part in parts if part is not None)
    return PackedTensor.of(shape, "F32", source, method, stored, lambda: values().astype(np.float32).view(np.uint8))


def _matrix(tensor: RawTensor) -> None:
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise CheckpointError(f"{tensor.source}: shape {tensor.shape} where a matrix is needed")


def _scales(tensor: RawTensor) -> np.ndarray:
    """Scales in float32; bytes are powers of two (E8M0)."""
    if tensor.format == "U8":
        return np.ldexp(np.float32(1), array(tensor).astype(np.int32) - 127)
    return floats(tensor)


def _spread(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, int], source: str) -> np.ndarray:
    """Scales for all, by row or by block, as an array that the matrix can be multiplied by."""
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        scales = scales[:, None]
    for axis in (0, 1):
        count, size = scales.shape[axis], shape[axis]
        if count in (1, size):
            continue
        each = block[axis] if count == -(-size // block[axis]) else -(-size // count)
        if scales.ndim != 2 or count != -(-size // each):
            raise CheckpointError(f"{source}: scales {scales.shape} do not fit a matrix of {shape}")
        scales = np.repeat(scales, each, axis=axis)[tuple(slice(size) if a == axis else slice(None) for a in (0, 1))]
    return scales
