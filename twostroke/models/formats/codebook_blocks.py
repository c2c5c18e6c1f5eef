"""Formats whose codes are places in a table of 16 levels: IQ4, and floating-point numbers of 4 bits."""

import numpy as np

from twostroke.models.formats.block_parts import Blocks, ScaledCodes, f16, fields, nibbles

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
