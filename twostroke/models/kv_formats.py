"""How keys and values are stored: as they are, or in fewer bits with a scale for each entry and head.

A scale belongs to one entry and head, never to a page or a batch: so what is stored of an entry depends on it alone.
Heads are rotated by a Hadamard matrix first (QuaRot, section 4): keys of some models have a few columns far larger than
the others, and a rotation spreads them over all. Attention over codes rotates queries too, and its result back.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.models.formats.blocks import numpy_dtype

SCALE_BYTES = 4
ENCODING = "rotated"  # to be changed when the same numbers are stored with other bits


@dataclass(frozen=True)
class Codes:
    """Integers of some bits with a scale, float32, for the numbers of one entry and head.

    Of 4 bits, a byte has the code of a column of the first half, and above it that of the second half.
    """

    bits: int  # 8 or 4. As many codes are below 0 as above.

    @property
    def max_code(self) -> int:
        """The code of the largest number."""
        return (1 << self.bits - 1) - 1

    def width(self, head_dim: int) -> int:
        """Bytes of the codes of a head, and of their scale."""
        return head_dim * self.bits // 8 + SCALE_BYTES

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """[..., head_dim] numbers -> [..., width] uint8."""
        numbers = rotated(np.asarray(numbers, np.float32))
        top = np.abs(numbers).max(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.where(top == 0, np.float32(0), np.float32(self.max_code) / top)
            codes = np.rint(numbers * gain).astype(np.int8).view(np.uint8)
        if self.bits == 4:
            codes = in_one_byte(*np.split(codes, 2, -1))
        scales = np.ascontiguousarray(top / np.float32(self.max_code))
        return np.concatenate([codes, scales.view(np.uint8)], -1)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """[..., width] uint8 -> [..., head_dim] float32."""
        codes, scales = np.split(stored, [stored.shape[-1] - SCALE_BYTES], -1)
        if self.bits == 4:
            codes = np.concatenate(two_of_byte(codes), -1)
        numbers = codes.view(np.int8).astype(np.float32) * np.ascontiguousarray(scales).view(np.float32)
        return rotated(numbers) / np.float32(rotated_together(numbers.shape[-1]))


@dataclass(frozen=True)
class KVFormat:
    """How K and V of one entry and head are stored.

    Numbers are two parts of an entry, K and V. Codes are one part, a record: codes and scale of K, then of V.
    """

    name: str  # "float32", "bfloat16", "float16", "int8", or "k8v4": K of 8 bits and V of 4
    dtype: np.dtype  # numpy dtype of what is stored: numbers, or bytes of records
    other: np.dtype  # numpy dtype of entries that are neither K nor V
    codes: tuple[Codes, Codes] | None = None  # of K and of V; None if they are numbers

    @property
    def identity(self) -> str:
        """Of the bits that are stored: by it pages of another session are known."""
        return f"{self.name} {ENCODING}" if self.codes else self.name

    @property
    def parts(self) -> int:
        """Parts of an entry: 2 for numbers, 1 for records."""
        return 1 if self.codes else 2

    def width(self, head_dim: int) -> int:
        """Stored elements, of `dtype`, of one part of an entry and head."""
        return sum(one.width(head_dim) for one in self.codes) if self.codes else head_dim

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of K and V of one entry and head."""
        return self.parts * self.width(head_dim) * self.dtype.itemsize

    def sides(self, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views of K and of V as stored, of [..., parts, n, KV heads, width]: [..., n, KV heads, own width].

        They are the same where one part is both.
        """
        if not self.codes:
            return entries[..., 0, :, :, :], entries[..., -1, :, :, :]
        records = entries[..., 0, :, :, :]
        cut = self.key_width(records.shape[-1])
        return records[..., :cut], records[..., cut:]

    def key_width(self, width: int) -> int:
        """The elements of K in the first part of an entry, which has `width`."""
        if not self.codes:
            return width
        bits = [one.bits for one in self.codes]
        return (width - 2 * SCALE_BYTES) * bits[0] // sum(bits) + SCALE_BYTES

    def encode(self, numbers: np.ndarray) -> np.ndarray:
        """[..., 2, n, KV heads, head_dim] numbers of K and V -> [..., parts, n, KV heads, width] as stored."""
        if not self.codes:
            return numbers.astype(self.dtype, copy=False)
        sides = numbers[..., 0, :, :, :], numbers[..., 1, :, :, :]
        coded = [codes.encode(side) for codes, side in zip(self.codes, sides, strict=True)]
        return np.concatenate(coded, -1)[..., None, :, :, :]

    def decode(self, stored: np.ndarray) -> np.ndarray:
        """The inverse of `encode`: numbers of `dtype` if that is a float, else float32."""
        if not self.codes:
            return stored
        sides = zip(self.codes, self.sides(stored), strict=True)
        return np.stack([codes.decode(side) for codes, side in sides], -4)

    def encode_keys(self, keys: np.ndarray) -> np.ndarray:
        """[..., head_dim] numbers -> [..., own width] as stored."""
        return self.codes[0].encode(keys) if self.codes else keys.astype(self.dtype, copy=False)

    def decode_keys(self, stored: np.ndarray) -> np.ndarray:
        """The inverse of `encode_keys`."""
        return self.codes[0].decode(stored) if self.codes else stored


def in_one_byte(low: Any, high: Any) -> Any:
    """Bytes of the low four bits of two arrays, or tensors, of uint8."""
    return (low & 15) | (high << 4)


def two_of_byte(both: Any) -> tuple[Any, Any]:
    """The integers of four bits, of both signs, in the low and the high half of each byte: uint8 as int8 has them."""
    return ((both ^ 8) & 15) - 8, ((both >> 4) ^ 8) - 8


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


def _coded(name: str, k_bits: int, v_bits: int) -> KVFormat:
    return KVFormat(name, np.dtype(np.uint8), numpy_dtype("bfloat16"), (Codes(k_bits), Codes(v_bits)))


KV_FORMATS = {
    "float32": _plain("float32"),
    "bfloat16": _plain("bfloat16"),
    "float16": _plain("float16"),
    "int8": _coded("int8", 8, 8),
    "k8v4": _coded("k8v4", 8, 4),
}

CODED = tuple(name for name, one in KV_FORMATS.items() if one.codes)  # names of those of codes


def kv_format(name: str) -> KVFormat:
    """The format of that name. Raises InvalidRequest if there is none."""
    if name not in KV_FORMATS:
        raise InvalidRequest(f"kv_dtype is one of {', '.join(KV_FORMATS)}, not {name!r}")
    return KV_FORMATS[name]
