"""K quants of 2 and 3 bits, and formats of one, two or three levels."""

import numpy as np

from twostroke.models.formats.block_parts import Blocks, ScaledCodes, f16, f32, fields


def q2_k(blocks: Blocks) -> np.ndarray:
    """A 4-bit scale and a 4-bit minimum for 16 elements."""
    d, dmin = f16(blocks[:, 80:82]), f16(blocks[:, 82:84])
    scale = d * (blocks[:, :16] & 0x0F).astype(np.float32)
    minimum = dmin * (blocks[:, :16] >> 4).astype(np.float32)
    codes = _crumbs(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return (scale[..., None] * codes - minimum[..., None]).reshape(-1, 256)


def q3_k(blocks: Blocks) -> ScaledCodes:
    """A 6-bit scale for 16 elements. Bit j of the first 32 bytes is the third bit of part j of 32 elements."""
    high = fields(blocks[:, :32], 1).reshape(-1, 256)
    codes = (_crumbs(blocks[:, 32:96]) | high << 2).view(np.int8) - np.int8(4)
    low = fields(blocks[:, 96:104], 4).reshape(-1, 16)
    top = fields(blocks[:, 104:108], 2).reshape(-1, 16)
    return ScaledCodes(f16(blocks[:, 108:110]), (low | top << 4).view(np.int8) - np.int8(32), codes)


def q1_0(blocks: Blocks) -> ScaledCodes:
    """A bit is +1 or -1."""
    bits = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little").view(np.int8)
    return _one_scale(f16(blocks[:, :2]), bits * np.int8(2) - np.int8(1))


def tq1_0(blocks: Blocks) -> ScaledCodes:
    """Five levels of -1, 0 and 1 in a byte, as a fraction in base 3: times 3, the first digit is the carry."""
    parts = [
        (part[:, None, :] * np.array([1, 3, 9, 27, 81][:digits], np.uint8)[:, None]).reshape(len(blocks), -1)
        for part, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    ]
    digits = (np.concatenate(parts, axis=-1).astype(np.uint16) * 3 >> 8).astype(np.int8)
    return _one_scale(f16(blocks[:, 52:54]), digits - np.int8(1))


def tq2_0(blocks: Blocks) -> ScaledCodes:
    return _one_scale(f16(blocks[:, 64:66]), _crumbs(blocks[:, :64]).view(np.int8) - np.int8(1))


def q8_k(blocks: Blocks) -> ScaledCodes:
    return _one_scale(f32(blocks[:, :4]), blocks[:, 4:260].view(np.int8))


def _crumbs(packed: np.ndarray) -> np.ndarray:
    """64 bytes -> 256 fields of two bits: four parts of 32 from the first 32 bytes, then four from the others."""
    return fields(packed.reshape(-1, 2, 32), 2).reshape(-1, 256)


def _one_scale(d: np.ndarray, codes: np.ndarray) -> ScaledCodes:
    return ScaledCodes(d, np.ones((len(d), 1), np.int8), codes)
