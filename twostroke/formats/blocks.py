"""Number formats of stored weights.

Each format packs a fixed number of elements into a block of a fixed number of bytes; the layouts are ggml's
(ggml-common.h and ggml-quants.c of llama.cpp). Integers and f16 scales are little-endian.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

Blocks = np.ndarray  # uint8, (n_blocks, block_bytes)


@dataclass(frozen=True)
class Format:
    """`block_size` elements in `block_bytes` bytes; `decode` is uint8 (n, block_bytes) -> float32 (n, block_size)."""

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[Blocks], np.ndarray]

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements` elements. Raises ValueError unless they are whole blocks."""
        if elements % self.block_size:
            raise ValueError(f"{elements} elements are not whole {self.name} blocks of {self.block_size}")
        return elements // self.block_size * self.block_bytes


def _f32(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Blocks) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., k) bytes -> (..., 2k): all low nibbles, then all high nibbles."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """(n, 4) bytes -> (n, 32) of 0 or 16: bit i of the little-endian word is the high bit of element i."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _signed(values: np.ndarray, zero: int) -> np.ndarray:
    """Unsigned codes minus their zero point, as float32."""
    return (values.view(np.int8) - np.int8(zero)).astype(np.float32)


def _q4_0(blocks: Blocks) -> np.ndarray:
    return _f16(blocks[:, :2]) * _signed(_nibbles(blocks[:, 2:]), 8)


def _q4_1(blocks: Blocks) -> np.ndarray:
    return _f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Blocks) -> np.ndarray:
    return _f16(blocks[:, :2]) * _signed(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), 16)


def _q5_1(blocks: Blocks) -> np.ndarray:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _f16(blocks[:, :2]) * codes.astype(np.float32) + _f16(blocks[:, 2:4])


def _q8_0(blocks: Blocks) -> np.ndarray:
    return _f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> the 6-bit scales and minima of 8 sub-blocks, each (n, 8) uint8.

    Bytes 0-3 hold the first four scales in their low six bits, bytes 4-7 the first four minima. Their top two bits are
    those of the last four scales and minima. The low four bits of these are in bytes 8-11: scales in the low nibble,
    minima in the high one.
    """
    scales, minima, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    return (
        np.concatenate((scales & 0x3F, (low & 0x0F) | ((scales >> 2) & 0x30)), axis=-1),
        np.concatenate((minima & 0x3F, (low >> 4) | ((minima >> 2) & 0x30)), axis=-1),
    )


def _k_affine(blocks: Blocks, codes: np.ndarray) -> np.ndarray:
    """Q4_K and Q5_K: codes (n, 8, 32) times d * scale, minus dmin * minimum, by sub-block."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d = (_f16(blocks[:, 0:2]) * scales.astype(np.float32))[..., None]
    dmin = (_f16(blocks[:, 2:4]) * minima.astype(np.float32))[..., None]
    return (d * codes.astype(np.float32) - dmin).reshape(-1, 256)


def _q4_k(blocks: Blocks) -> np.ndarray:
    return _k_affine(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> np.ndarray:
    # Bit j of the 32 bytes before the nibbles is the fifth bit of sub-block j.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_affine(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (high << 4))


def _q6_k(blocks: Blocks) -> np.ndarray:
    # Two halves of 128 elements, each with 64 bytes of low nibbles and 32 bytes of high bits, two for each quarter.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], dtype=np.uint8)) & 3
    scales = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * _signed(low | (high << 4), 32).reshape(-1, 16, 16)).reshape(-1, 256)


FORMATS: dict[str, Format] = {
    name: Format(name, block_size, block_bytes, decode)
    for name, block_size, block_bytes, decode in (
        ("F32", 1, 4, _f32),
        ("F16", 1, 2, _f16),
        ("BF16", 1, 2, _bf16),
        ("Q4_0", 32, 18, _q4_0),
        ("Q4_1", 32, 20, _q4_1),
        ("Q5_0", 32, 22, _q5_0),
        ("Q5_1", 32, 24, _q5_1),
        ("Q8_0", 32, 34, _q8_0),
        ("Q4_K", 256, 144, _q4_k),
        ("Q5_K", 256, 176, _q5_k),
        ("Q6_K", 256, 210, _q6_k),
    )
}


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of that name, "float32" or "bfloat16". The latter is from `ml_dtypes`, as numpy lacks it."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
