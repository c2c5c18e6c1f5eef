"""Number formats of stored weights.

Each format packs a fixed number of elements into a block of a fixed number of bytes; the layouts are ggml's
(ggml-common.h and ggml-quants.c of llama.cpp). Integers and f16 scales are little-endian.
"""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from twostroke.models.formats import low_bit_blocks
from twostroke.models.formats.block_parts import Blocks, ScaledCodes, bf16, f16, f32, fifth_bits, nibbles, signed


@dataclass(frozen=True)
class BlockFormat:
    """`block_size` elements in `block_bytes` bytes; `decode`: uint8 (n, block_bytes) -> float32 (n, block_size)."""

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[Blocks], np.ndarray]

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of `elements` elements. Raises ValueError unless they are whole blocks."""
        if elements % self.block_size:
            raise ValueError(f"{elements} elements are not whole {self.name} blocks of {self.block_size}")
        return elements // self.block_size * self.block_bytes


def _q4_0(blocks: Blocks) -> np.ndarray:
    return f16(blocks[:, :2]) * signed(nibbles(blocks[:, 2:]), 8)


def _q4_1(blocks: Blocks) -> np.ndarray:
    return f16(blocks[:, :2]) * nibbles(blocks[:, 4:]).astype(np.float32) + f16(blocks[:, 2:4])


def _q5_0(blocks: Blocks) -> np.ndarray:
    return f16(blocks[:, :2]) * signed(nibbles(blocks[:, 6:]) | fifth_bits(blocks[:, 2:6]), 16)


def _q5_1(blocks: Blocks) -> np.ndarray:
    codes = nibbles(blocks[:, 8:]) | fifth_bits(blocks[:, 4:8])
    return f16(blocks[:, :2]) * codes.astype(np.float32) + f16(blocks[:, 2:4])


def _q8_0(blocks: Blocks) -> np.ndarray:
    return f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


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
    d = (f16(blocks[:, 0:2]) * scales.astype(np.float32))[..., None]
    dmin = (f16(blocks[:, 2:4]) * minima.astype(np.float32))[..., None]
    return (d * codes.astype(np.float32) - dmin).reshape(-1, 256)


def _q4_k(blocks: Blocks) -> np.ndarray:
    return _k_affine(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> np.ndarray:
    # Bit j of the 32 bytes before the nibbles is the fifth bit of sub-block j.
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return _k_affine(blocks, nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (high << 4))


def _q6_k(blocks: Blocks) -> np.ndarray:
    # Two halves of 128 elements, each with 64 bytes of low nibbles and 32 bytes of high bits, two for each quarter.
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], dtype=np.uint8)) & 3
    scales = f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[..., None] * signed(low | (high << 4), 32).reshape(-1, 16, 16)).reshape(-1, 256)


def _number(layout: str) -> Callable[[Blocks], np.ndarray]:
    return lambda blocks: blocks.view(layout).astype(np.float32)


def _decoder(scaled: Callable[[Blocks], ScaledCodes]) -> Callable[[Blocks], np.ndarray]:
    return lambda blocks: scaled(blocks).values()


# Formats whose blocks are codes times scales: values and bytes of a block, and what reads it.
_SCALED: tuple[tuple[str, int, int, Callable[[Blocks], ScaledCodes]], ...] = (
    ("Q3_K", 256, 110, low_bit_blocks.q3_k),
    ("Q8_K", 256, 292, low_bit_blocks.q8_k),
    ("Q1_0", 128, 18, low_bit_blocks.q1_0),
    ("TQ1_0", 256, 54, low_bit_blocks.tq1_0),
    ("TQ2_0", 256, 66, low_bit_blocks.tq2_0),
    ("IQ1_S", 256, 50, low_bit_blocks.iq1_s),
    ("IQ1_M", 256, 56, low_bit_blocks.iq1_m),
    ("IQ2_XXS", 256, 66, low_bit_blocks.iq2_xxs),
    ("IQ2_XS", 256, 74, low_bit_blocks.iq2_xs),
    ("IQ2_S", 256, 82, low_bit_blocks.iq2_s),
    ("IQ3_XXS", 256, 98, low_bit_blocks.iq3_xxs),
    ("IQ3_S", 256, 110, low_bit_blocks.iq3_s),
    ("IQ4_NL", 32, 18, low_bit_blocks.iq4_nl),
    ("IQ4_XS", 256, 136, low_bit_blocks.iq4_xs),
    ("MXFP4", 32, 17, low_bit_blocks.mxfp4),
)
SCALED = {name: scaled for name, _, _, scaled in _SCALED}

FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name, block_size, block_bytes, decode)
    for name, block_size, block_bytes, decode in (
        ("F32", 1, 4, f32),
        ("F16", 1, 2, f16),
        ("BF16", 1, 2, bf16),
        ("Q4_0", 32, 18, _q4_0),
        ("Q4_1", 32, 20, _q4_1),
        ("Q5_0", 32, 22, _q5_0),
        ("Q5_1", 32, 24, _q5_1),
        ("Q8_0", 32, 34, _q8_0),
        ("Q4_K", 256, 144, _q4_k),
        ("Q5_K", 256, 176, _q5_k),
        ("Q6_K", 256, 210, _q6_k),
        ("Q2_K", 256, 84, low_bit_blocks.q2_k),
        *((name, block_size, block_bytes, _decoder(scaled)) for name, block_size, block_bytes, scaled in _SCALED),
        ("NVFP4", 64, 36, low_bit_blocks.nvfp4),
        ("F64", 1, 8, _number("<f8")),
        ("I8", 1, 1, _number("i1")),
        ("I16", 1, 2, _number("<i2")),
        ("I32", 1, 4, _number("<i4")),
        ("I64", 1, 8, _number("<i8")),
    )
}


def numpy_dtype(name: str) -> np.dtype:
    """The dtype of that name, "float32" or "bfloat16". The latter is from `ml_dtypes`, as numpy lacks it."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
