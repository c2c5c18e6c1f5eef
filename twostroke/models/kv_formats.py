"""How keys and values are stored: as they are, or in fewer bits with a scale for each entry and head.

A scale belongs to one entry and head, never to a page or a batch: so what is stored of an entry depends on it alone.
Heads are rotated by a Hadamard matrix first (QuaRot, section 4): keys of some models have a few columns far larger than
the others, and a rotation spreads them over all. Attention over codes rotates queries too, and its result back.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.models.formats.blocks import numpy_dtype

ENCODING = "rotated"  # to be changed when the same numbers are stored with other bits
MAX_CODE = 127  # of 8 bits: as many below 0 as above


@dataclass(frozen=True)
class KVFormat:
    """How the numbers of K, or of V, of one entry and head are stored.

    Attributes:
        name: "float32", "bfloat16", "float16" or "int8".
        dtype: numpy dtype of what is stored: numbers, or bytes of codes and scales.
        other: numpy dtype of entries that are neither K nor V.
        scale_bytes: bytes of a scale, float32, behind the codes; 0 without scales.
    """

    name: str
    dtype: np.dtype
    other: np.dtype
    scale_bytes: int = 0

    @property
    def identity(self) -> str:
        """Of the bits that are stored: by it pages of another session are known."""
        return f"{self.name} {ENCODING}" if self.scale_bytes else self.name

    def width(self, head_dim: int) -> int:
        """Stored elements, of `dtype`, of K of one entry and head."""
        return head_dim + self.scale_bytes

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """[..., head_dim] numbers -> [..., width] as stored."""
        if not self.scale_bytes:
            return numbers.astype(self.dtype, copy=False)
        numbers = rotated(np.asarray(numbers, np.float32))
        top = np.abs(numbers).max(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(top == 0, np.float32(0), np.float32(MAX_CODE) / top)
            codes = np.rint(numbers * gain).astype(np.int8)
        scales = np.ascontiguousarray(top / np.float32(MAX_CODE))
        return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], -1)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """[..., width] as stored -> [..., head_dim] numbers: of `dtype` if that is a float, else float32."""
        if not self.scale_bytes:
            return stored
        codes, scales = np.split(stored, [stored.shape[-1] - self.scale_bytes], -1)
        numbers = codes.view(np.int8).astype(np.float32) * np.ascontiguousarray(scales).view(np.float32)
        return rotated(numbers) / np.float32(rotated_together(numbers.shape[-1]))


def rotated_together(head_dim: int) -> int:
    """The columns of a head that are rotated together: the largest power of 2 that divides it."""
    return head_dim & -head_dim


def rotated(numbers: np.ndarray) -> np.ndarray:
    """[..., head_dim] float32 times a Hadamard matrix, not normalized: twice is the numbers times its width.

    Each number is the result of additions in one order, which kernels have too.
    """
    block, half = rotated_together(numbers.shape[-1]), 1
    with np.errstate(invalid="ignore", over="ignore"):
        while half < block:
            pairs = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // (2 * half), 2, half)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            numbers = np.stack([first + second, first - second], -2).reshape(numbers.shape)
            half *= 2
    return numbers


def _plain(name: str) -> KVFormat:
    return KVFormat(name, numpy_dtype(name), numpy_dtype(name))


KV_FORMATS = {
    "float32": _plain("float32"),
    "bfloat16": _plain("bfloat16"),
    "float16": _plain("float16"),
    "int8": KVFormat("int8", np.dtype(np.uint8), numpy_dtype("bfloat16"), 4),
}


def kv_format(name: str) -> KVFormat:
    """The format of that name. Raises InvalidRequest if there is none."""
    if name not in KV_FORMATS:
        raise InvalidRequest(f"kv_dtype is one of {', '.join(KV_FORMATS)}, not {name!r}")
    return KV_FORMATS[name]
