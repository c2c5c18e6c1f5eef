"""Formats of few bits: K quants of 2 and 3, one to three levels, and codes that are places in a table or in a grid.

A table has 16 levels: of IQ4, and of floating-point numbers of 4 bits. An entry of a grid (IQ1, IQ2, IQ3) is the
magnitudes of 8 elements, or 4 (ggml-common.h of llama.cpp). Signs are stored beside it, all 8 of them, or 7 of which an
even number is set with the eighth.
"""

from functools import cache
from importlib.resources import files

import numpy as np

from twostroke.models.formats.block_parts import Blocks, ScaledCodes, f16, f32, fields, nibbles


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


IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the number
E8M0_HALF = np.ldexp(np.float32(1), np.arange(256) - 128)  # half the number: a power of two


def _ue4m3_half() -> np.ndarray:
    """Half of an unsigned number of 4 and 3 bits, as ggml reads all 256 bytes."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, (byte & 7).astype(np.float32)
    number = np.where(exponent == 0, fraction / 512, np.ldexp(1 + fraction / 8, exponent - 7))
    number[0x7F] = 0
    return (number / 2).astype(np.float32)


UE4M3_HALF = _ue4m3_half()


def iq4_nl(blocks: Blocks) -> ScaledCodes:
    return ScaledCodes(f16(blocks[:, :2]), np.ones((len(blocks), 1), np.int8), IQ4[nibbles(blocks[:, 2:])])


def iq4_xs(blocks: Blocks) -> ScaledCodes:
    """A 6-bit scale for 32 elements: the higher two bits of all are bytes 2 and 3, the lower four bytes 4 to 7."""
    high = fields(blocks[:, 2:4].view("<u2").astype(np.uint16), 2).reshape(-1, 8).astype(np.uint8)
    low = np.stack((blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4), axis=-1).reshape(-1, 8)
    codes = IQ4[nibbles(blocks[:, 8:].reshape(-1, 8, 16))].reshape(-1, 256)
    return ScaledCodes(f16(blocks[:, :2]), (low | high << 4).view(np.int8) - np.int8(32), codes)


def mxfp4(blocks: Blocks) -> ScaledCodes:
    return ScaledCodes(E8M0_HALF[blocks[:, :1]], np.ones((len(blocks), 1), np.int8), E2M1[nibbles(blocks[:, 1:])])


def nvfp4(blocks: Blocks) -> np.ndarray:
    """A scale of 8 bits for 16 elements."""
    scales, codes = UE4M3_HALF[blocks[:, :4]], E2M1[nibbles(blocks[:, 4:].reshape(-1, 4, 8))]
    return (scales[..., None] * codes).reshape(-1, 64)


@cache
def grid(name: str) -> np.ndarray:
    """The grid of a format: [entries, elements] int8."""
    with (files("twostroke.models.formats") / "grids.npz").open("rb") as stream, np.load(stream) as grids:
        return grids[name]


SIGNS = np.array([[-1 if byte >> i & 1 else 1 for i in range(8)] for byte in range(256)], np.int8)
SEVEN_SIGNS = SIGNS[[i | (i.bit_count() & 1) << 7 for i in range(128)]]


def iq2_xxs(blocks: Blocks) -> ScaledCodes:
    """Decode 32 elements from four entries, then four times seven signs and a 4-bit scale in 32 bits."""
    words = blocks[:, 2:].view("<u4").astype(np.uint32).reshape(-1, 8, 2)
    entries = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return _signed_entries("IQ2_XXS", f16(blocks[:, :2]) / 8, words[..., 1] >> 28, entries, _seven(words[..., 1]))


def iq2_xs(blocks: Blocks) -> ScaledCodes:
    """Decode 8 elements from an entry in 9 bits and seven signs. A 4-bit scale for 16 elements."""
    words = blocks[:, 2:66].view("<u2")
    return _signed_entries(
        "IQ2_XS", f16(blocks[:, :2]) / 8, _pairs(blocks[:, 66:]), words & 511, SEVEN_SIGNS[words >> 9]
    )


def iq2_s(blocks: Blocks) -> ScaledCodes:
    """Decode 8 elements from an entry in 10 bits, two of them elsewhere, and eight signs. A scale for 16 elements."""
    entries = blocks[:, 2:34] | _spread(blocks[:, 66:74], (0, 2, 4, 6), 3)
    return _signed_entries("IQ2_S", f16(blocks[:, :2]) / 8, _pairs(blocks[:, 74:]), entries, SIGNS[blocks[:, 34:66]])


def iq3_xxs(blocks: Blocks) -> ScaledCodes:
    words = blocks[:, 66:].view("<u4").astype(np.uint32)
    return _signed_entries("IQ3_XXS", f16(blocks[:, :2]) / 4, words >> 28, blocks[:, 2:66], _seven(words))


def iq3_s(blocks: Blocks) -> ScaledCodes:
    entries = blocks[:, 2:66] | _spread(blocks[:, 66:74], range(8), 1)
    return _signed_entries("IQ3_S", f16(blocks[:, :2]), _pairs(blocks[:, 106:]), entries, SIGNS[blocks[:, 74:106]])


def iq1_s(blocks: Blocks) -> ScaledCodes:
    """Decode 32 elements from four entries, 3 bits of each elsewhere, a 3-bit scale, and a sign of the shift."""
    words = blocks[:, 34:].view("<u2").astype(np.uint16)
    codes = _shifted(blocks[:, 2:34] | _spread(words, (0, 3, 6, 9), 7), np.repeat(words >> 15, 4, axis=-1))
    return ScaledCodes(f16(blocks[:, :2]) / 8, _odd(words >> 12 & 7), codes)


def iq1_m(blocks: Blocks) -> ScaledCodes:
    """Decode a variant of IQ1_S with a scale for 16 elements and a sign for 8. The main scale is in four pieces."""
    words = blocks[:, 48:].view("<u2").astype(np.uint16)
    d = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=-1, keepdims=True)
    high = _pairs(blocks[:, 32:48])
    entries = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    scales = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    return ScaledCodes(d.view(np.float16).astype(np.float32) / 8, _odd(scales), _shifted(entries, high >> 3))


def _signed_entries(
    name: str, d: np.ndarray, scales: np.ndarray, entries: np.ndarray, signs: np.ndarray
) -> ScaledCodes:
    return ScaledCodes(d, _odd(scales), (grid(name)[entries].reshape(signs.shape) * signs).reshape(-1, 256))


def _shifted(entries: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Levels -1, 0 and 1, shifted by an eighth up or down; in eighths."""
    shift = np.int8(1) - np.int8(2) * negative.astype(np.int8)
    return (grid("IQ1")[entries] * np.int8(8) + shift[..., None]).reshape(-1, 256)


def _odd(scales: np.ndarray) -> np.ndarray:
    return (2 * scales + 1).astype(np.int8)


def _seven(words: np.ndarray) -> np.ndarray:
    """Four times seven signs, from the lowest bit on."""
    return SEVEN_SIGNS[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]


def _pairs(packed: np.ndarray) -> np.ndarray:
    """(n, k) bytes -> (n, 2k): the low nibble of each, then its high one."""
    return np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(len(packed), -1)


def _spread(packed: np.ndarray, shifts: "range | tuple[int, ...]", mask: int) -> np.ndarray:
    """Fields of each number in `packed`, as bits 8 and up of an entry's number."""
    found = packed.astype(np.uint16)[..., None] >> np.array(shifts, np.uint16) & mask
    return found.reshape(len(packed), -1) << 8
