"""How keys and values are stored: as they are, or in fewer bits with a scale for each entry and head.

A scale belongs to one entry and head, never to a page or a batch: so what is stored of an entry depends on it alone.
Integers of 8 bits are exact in bfloat16, so attention multiplies them as it multiplies bfloat16, and applies scales of
keys to scores, and those of values to the softmax's weights.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.models.formats.blocks import numpy_dtype

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

    def width(self, head_dim: int) -> int:
        """Stored elements, of `dtype`, of K of one entry and head."""
        return head_dim + self.scale_bytes

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """[..., head_dim] numbers -> [..., width] as stored."""
        if not self.scale_bytes:
            return numbers.astype(self.dtype, copy=False)
        numbers = np.ascontiguousarray(numbers, np.float32)
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
        return codes.view(np.int8).astype(np.float32) * np.ascontiguousarray(scales).view(np.float32)


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
