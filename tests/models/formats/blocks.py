"""Random blocks of every format, with scales as those of trained weights."""

import numpy as np

from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor

# Where the float16 scales of a block are. Formats not listed have numbers instead, or scales of another kind.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q1_0": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def random_blocks(name: str, count: int, seed: int = 0, size: float = 0.01) -> np.ndarray:
    """uint8 (count, block_bytes), any bits but for scales, which are around `size`."""
    generator, kind = np.random.default_rng(seed), FORMATS[name]
    blocks = generator.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    scales = (size * generator.uniform(0.5, 2, count)).astype("<f2")
    if name in FLOATS:
        return (generator.standard_normal((count, 1)) * size).astype(FLOATS[name]).view(np.uint8)
    if name == "BF16":
        return (
            ((generator.standard_normal((count, 1)) * size).astype("<f4").view("<u4") >> 16)
            .astype("<u2")
            .view(np.uint8)
        )
    for at in HALVES.get(name, ()):
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "Q8_K":
        blocks[:, :4] = generator.uniform(0.5 * size, 2 * size, (count, 1)).astype("<f4").view(np.uint8)
    elif name == "MXFP4":
        blocks[:, 0] = generator.integers(110, 125, count)
    elif name == "NVFP4":
        blocks[:, :4] = generator.integers(8, 80, (count, 4))
    elif name == "IQ1_M":  # four bits of the scale in each of four words
        words = blocks[:, 48:56].copy().view("<u2")
        words &= 0x0FFF
        words |= (scales.view("<u2")[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        blocks[:, 48:56] = words.view(np.uint8)
    return blocks


def random_matrix(name: str, rows: int, columns: int, seed: int = 0, size: float = 0.01) -> RawTensor:
    blocks = random_blocks(name, rows * columns // FORMATS[name].block_size, seed, size)
    return RawTensor.from_bytes("w", name, (rows, columns), blocks.reshape(-1), "file: w")
