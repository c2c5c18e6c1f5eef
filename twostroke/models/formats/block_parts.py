"""Parts of packed blocks as arrays: scales, fields of bits, small integers."""

from typing import NamedTuple

import numpy as np

Blocks = np.ndarray  # uint8, (n_blocks, block_bytes)


def f32(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f4").astype(np.float32)


def f16(blocks: Blocks) -> np.ndarray:
    return blocks.view("<f2").astype(np.float32)


def bf16(blocks: Blocks) -> np.ndarray:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., k) bytes -> (..., 2k): all low nibbles, then all high nibbles."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1)


def fifth_bits(packed: np.ndarray) -> np.ndarray:
    """(n, 4) bytes -> (n, 32) of 0 or 16: bit i of the little-endian word is the high bit of element i."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def signed(values: np.ndarray, zero: int) -> np.ndarray:
    """Unsigned codes minus their zero point, as float32."""
    return (values.view(np.int8) - np.int8(zero)).astype(np.float32)


def fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """(..., k) unsigned -> (..., fields, k): the fields of `bits` bits of each number, the lowest first."""
    shifts = np.arange(0, 8 * packed.dtype.itemsize, bits, dtype=packed.dtype)
    return (packed[..., None, :] >> shifts[:, None]) & packed.dtype.type((1 << bits) - 1)


class ScaledCodes(NamedTuple):
    """Blocks whose values are codes times scales.

    Element i of a block is `d * scales[i // (size / scales per block)] * codes[i]`.
    """

    d: np.ndarray  # [n, 1] float32
    scales: np.ndarray  # [n, scales per block] integers
    codes: np.ndarray  # [n, block_size] int8

    def values(self) -> np.ndarray:
        """The values, [n, block_size] float32."""
        scales = self.d * self.scales.astype(np.float32)
        codes = self.codes.reshape(*scales.shape, -1)
        return (scales[..., None] * codes).reshape(self.codes.shape)
