"""Tensors of a safetensors file as arrays, and fields of bits in words of 32."""

import ml_dtypes
import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.formats.tensor import RawTensor

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "U32": np.uint32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def array(tensor: RawTensor) -> np.ndarray:
    """The numbers of a tensor, in the dtype and shape that its file states. Raises CheckpointError."""
    dtype = DTYPES.get(tensor.format)
    if dtype is None:
        raise CheckpointError(f"{tensor.source}: the dtype {tensor.format} is not supported")
    data = np.ascontiguousarray(tensor.data).reshape(-1)
    if data.size != tensor.num_elements * np.dtype(dtype).itemsize:
        raise CheckpointError(f"{tensor.source}: {data.size} bytes where {tensor.format} {tensor.shape} takes others")
    return data.view(dtype).reshape(tensor.shape)


def floats(tensor: RawTensor) -> np.ndarray:
    return array(tensor).astype(np.float32)


def unpack_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """(..., k) words of 32 bits -> (..., 32 k // bits) uint8: one field after another, the lowest bits first.

    Fields of a number of bits that does not divide 32 continue in the next word.
    """
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return fields.reshape(*packed.shape[:-1], -1)
    each = np.unpackbits(packed, axis=-1, bitorder="little")
    each = each[..., : each.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
    return np.packbits(each, axis=-1, bitorder="little")[..., 0]


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """(..., k) words of 32 bits -> (..., k * (32 // bits)) uint8: no field is in two words."""
    if 32 % bits == 0:
        return unpack_stream(words, bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(*words.shape[:-1], -1)


def module_weight(tensor: RawTensor, name: str) -> str:
    """The source of a module's matrix, for messages: the file of one of its tensors, and its name."""
    return f"{tensor.source.rpartition(': ')[0]}: {name.rpartition('.')[0]}.weight"
