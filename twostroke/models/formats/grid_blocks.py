"""The formats of about 1, 2 and 3 bits whose codes are entries of a grid: IQ1, IQ2, IQ3.

An entry is the magnitudes of 8 elements, or 4 (ggml-common.h of llama.cpp). Signs are stored beside it, all 8 of them,
or 7 of which an even number is set with the eighth.
"""

from functools import cache
from importlib.resources import files

import numpy as np

from twostroke.models.formats.block_parts import Blocks, ScaledCodes, f16


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
