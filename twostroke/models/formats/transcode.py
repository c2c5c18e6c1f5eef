"""Blocks of one format as blocks of another, without a search: formats that have no kernel in those that have one.

Most are exact: the other format holds the same codes and scales. A scale that is a product is rounded to float16.
`SUBSTITUTES` says which format is used. docs/kernels.md has the errors and the sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.models.formats import low_bit_blocks
from twostroke.models.formats.block_parts import Blocks, ScaledCodes


@dataclass(frozen=True)
class SubstituteFormat:
    """The format with a kernel that stands for another.

    `error` is the root mean square of the change by that of the weights, for random blocks; 0 means that no value
    changes.
    """

    format: str
    error: float = 0


SUBSTITUTES = {
    "F32": SubstituteFormat("BF16", 0.0017),
    "F16": SubstituteFormat("BF16", 0.0017),
    "F64": SubstituteFormat("BF16", 0.0017),
    "I8": SubstituteFormat("BF16"),
    "I16": SubstituteFormat("BF16", 0.0017),
    "I32": SubstituteFormat("BF16", 0.0017),
    "I64": SubstituteFormat("BF16", 0.0017),
    "Q1_0": SubstituteFormat("Q4_0"),
    "TQ1_0": SubstituteFormat("Q4_0"),
    "TQ2_0": SubstituteFormat("Q4_0"),
    "IQ1_S": SubstituteFormat("Q5_0", 0.0003),
    "IQ1_M": SubstituteFormat("Q6_K"),
    "IQ2_XXS": SubstituteFormat("Q4_K", 0.023),
    "IQ2_XS": SubstituteFormat("Q6_K", 0.01),
    "IQ2_S": SubstituteFormat("Q6_K", 0.01),
    "IQ3_XXS": SubstituteFormat("Q4_K", 0.016),
    "IQ3_S": SubstituteFormat("Q4_K", 0.0005),
    "IQ4_NL": SubstituteFormat("Q8_0"),
    "IQ4_XS": SubstituteFormat("Q8_0", 0.0003),
    "Q2_K": SubstituteFormat("Q6_K", 0.014),
    "Q3_K": SubstituteFormat("Q6_K"),
    "Q8_K": SubstituteFormat("Q8_0", 0.0003),
    "NVFP4": SubstituteFormat("Q8_0", 0.006),
}

UNPACKED = SubstituteFormat("Q8_0", 0.006)  # of values that a directory quantized in a form that no block holds


def transcoder(source: str, target: str) -> Callable[[Blocks], Blocks] | None:
    """The conversion of blocks, whole blocks of both formats at a time; None if there is none but through values.

    It raises OverflowError if a scale is not finite in float16.
    """
    return TRANSCODERS.get((source, target))


def _half(scales: np.ndarray) -> np.ndarray:
    """The bytes of float16 scales, [n, 2 k] of [n, k]."""
    with np.errstate(over="ignore"):
        halves = scales.astype("<f2")
    if not np.isfinite(halves).all():
        raise OverflowError("damaged: a scale is NaN, or beyond float16")
    return halves.view(np.uint8)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    half = codes.shape[-1] // 2
    return codes[..., :half] & 15 | codes[..., half:] << 4


def _groups(scaled: ScaledCodes) -> tuple[np.ndarray, np.ndarray]:
    """[n, 1] float32 scales and [n, 32] codes of groups of 32, of scales that are for 32 elements or more."""
    codes = scaled.codes.reshape(-1, 32)
    scales = scaled.d * scaled.scales.astype(np.float32)
    return np.repeat(scales.reshape(-1), len(codes) // scales.size)[:, None], codes


def q4_0(scaled: ScaledCodes) -> Blocks:
    """Codes from -8 to 7."""
    scales, codes = _groups(scaled)
    return np.concatenate((_half(scales), _pack_nibbles((codes + np.int8(8)).view(np.uint8))), axis=-1)


def q5_0(scaled: ScaledCodes) -> Blocks:
    """Codes from -16 to 15."""
    scales, codes = _groups(scaled)
    unsigned = (codes + np.int8(16)).view(np.uint8)
    high = np.packbits(unsigned >> 4, axis=-1, bitorder="little")
    return np.concatenate((_half(scales), high, _pack_nibbles(unsigned)), axis=-1)


def q8_0(scaled: ScaledCodes) -> Blocks:
    scales, codes = _groups(scaled)
    return np.concatenate((_half(scales), codes.view(np.uint8)), axis=-1)


def q6_k(scaled: ScaledCodes) -> Blocks:
    """Codes from -32 to 31, and 8 or 16 scales from -128 to 127."""
    unsigned = (scaled.codes + np.int8(32)).view(np.uint8).reshape(-1, 2, 128)
    low = _pack_nibbles(unsigned).reshape(-1, 128)
    high = _pack_crumbs(unsigned.reshape(-1, 2, 4, 32) >> 4)
    scales = np.repeat(scaled.scales.astype(np.int8), 16 // scaled.scales.shape[1], axis=-1).view(np.uint8)
    return np.concatenate((low, high, scales, _half(scaled.d)), axis=-1)


def _pack_crumbs(codes: np.ndarray) -> np.ndarray:
    """(n, 2, 4, 32) of two bits -> (n, 64)."""
    parts = (codes[:, :, i] << (2 * i) for i in range(4))
    first = next(parts)
    for part in parts:
        first |= part
    return first.reshape(len(codes), 64)


def _q4_k(scaled: ScaledCodes, step: float) -> Blocks:
    """Codes as 16 steps around 0, the middle of which is 0: some kernels round what is far from it. 8 scales to 63."""
    table = np.rint(np.arange(-128, 128) / step + 7.5).clip(0, 15).astype(np.uint8)
    codes = table[scaled.codes.astype(np.int16) + 128].reshape(-1, 4, 2, 32)
    scales = scaled.scales.astype(np.uint8)
    first, last = scales[:, :4], scales[:, 4:]
    top = first | last >> 4 << 6
    packed = np.concatenate((top, top, last & 15 | last << 4), axis=-1)  # minima are the same numbers as scales
    quants = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)
    d = np.concatenate((scaled.d * np.float32(step), scaled.d * np.float32(7.5 * step)), axis=-1)
    return np.concatenate((_half(d), packed, quants), axis=-1)


def _iq2(decode: Callable[[Blocks], ScaledCodes]) -> Callable[[Blocks], Blocks]:
    """Magnitudes 8, 25 and 43 as 5, 16 and 27 times 1.58: the least error with whole numbers below 32."""
    smaller = np.zeros(256, np.int8)
    smaller[[8, 25, 43]] = 5, 16, 27
    smaller[[-8, -25, -43]] = -5, -16, -27

    def convert(blocks: Blocks) -> Blocks:
        d, scales, codes = decode(blocks)
        return q6_k(ScaledCodes(d * np.float32(1.58), scales, smaller[codes.view(np.uint8)]))

    return convert


def _q2_k(blocks: Blocks) -> Blocks:
    """Convert to Q6_K with the scale of 16 elements that makes the largest magnitude 31."""
    values = low_bit_blocks.q2_k(blocks).reshape(-1, 16, 16)
    largest = np.maximum(values.max(-1), -values.min(-1))
    if not np.isfinite(largest).all():
        raise OverflowError("damaged: a scale is NaN or infinite")
    d = largest.max(-1, keepdims=True) / np.float32(31 * 127)
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d > 0)
    scales = np.ceil(largest * inverse / 31).clip(0, 127)
    steps = (d * scales)[..., None]
    codes = np.rint(values * np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)).clip(-32, 31)
    return q6_k(ScaledCodes(d, scales, codes.astype(np.int8).reshape(-1, 256)))


TRANSCODERS: dict[tuple[str, str], Callable[[Blocks], Blocks]] = {
    ("Q1_0", "Q4_0"): lambda blocks: q4_0(low_bit_blocks.q1_0(blocks)),
    ("TQ1_0", "Q4_0"): lambda blocks: q4_0(low_bit_blocks.tq1_0(blocks)),
    ("TQ2_0", "Q4_0"): lambda blocks: q4_0(low_bit_blocks.tq2_0(blocks)),
    ("IQ1_S", "Q5_0"): lambda blocks: q5_0(low_bit_blocks.iq1_s(blocks)),
    ("IQ1_M", "Q6_K"): lambda blocks: q6_k(low_bit_blocks.iq1_m(blocks)),
    ("IQ2_XXS", "Q4_K"): lambda blocks: _q4_k(low_bit_blocks.iq2_xxs(blocks), 16.83),
    ("IQ2_XS", "Q6_K"): _iq2(low_bit_blocks.iq2_xs),
    ("IQ2_S", "Q6_K"): _iq2(low_bit_blocks.iq2_s),
    ("IQ3_XXS", "Q4_K"): lambda blocks: _q4_k(low_bit_blocks.iq3_xxs(blocks), 8.05),
    ("IQ3_S", "Q4_K"): lambda blocks: _q4_k(low_bit_blocks.iq3_s(blocks), 2),
    ("IQ4_NL", "Q8_0"): lambda blocks: q8_0(low_bit_blocks.iq4_nl(blocks)),
    ("IQ4_XS", "Q8_0"): lambda blocks: q8_0(low_bit_blocks.iq4_xs(blocks)),
    ("Q2_K", "Q6_K"): _q2_k,
    ("Q3_K", "Q6_K"): lambda blocks: q6_k(low_bit_blocks.q3_k(blocks)),
    ("Q8_K", "Q8_0"): lambda blocks: q8_0(low_bit_blocks.q8_k(blocks)),
}
