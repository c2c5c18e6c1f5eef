"""Random weights of any size and format in little time: every matrix is a view into a few blocks of bytes."""

from __future__ import annotations

from math import prod
from zlib import crc32

import ml_dtypes
import numpy as np

from twostroke.models.config import ModelConfig
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import is_weight_matrix, tensor_shapes

# Where a block has its float16 scale, and its float16 minimum if it has one (bytes from the block's start).
SCALES: dict[str, tuple[int, int | None]] = {
    "Q4_0": (0, None),
    "Q4_1": (0, 2),
    "Q5_0": (0, None),
    "Q5_1": (0, 2),
    "Q8_0": (0, None),
    "Q2_K": (80, 82),
    "Q3_K": (108, None),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208, None),
}
WEIGHTS = ("BF16", *SCALES)
# Blocks drawn, by elements in a block: primes, so that no row repeats one before it; about 16 million elements each.
DRAWN = {1: 16777213, 32: 524287, 256: 65521}
OFFSETS = 4096  # different places at which a matrix may begin


class RandomWeights:
    """A model's weights by Twostroke name: an instance is what `Backend.compile` takes.

    The values of a matrix with K columns are about normal with a deviation of K**-0.5 (for GGUF's formats, those that
    uniformly random codes give, with a mean near 0). Norms are 1. Matrices overlap each other in memory.
    """

    def __init__(self, config: ModelConfig, format: str = "BF16", seed: int = 0) -> None:
        """`format`: one of `WEIGHTS`. A matrix whose rows are no whole blocks of it is Q8_0, or else BF16."""
        if format not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, not {format!r}")
        self.config, self.format, self.seed = config, format, seed
        self.shapes = tensor_shapes(config)
        self._largest: dict[tuple[str, int], int] = {}  # elements, by format and columns
        self._blocks: dict[tuple[str, int], np.ndarray] = {}
        for name, shape in self.shapes.items():
            if is_weight_matrix(name, shape):
                key = self._format(shape[1]), shape[1]
                self._largest[key] = max(self._largest.get(key, 0), prod(shape))

    def __call__(self, name: str) -> RawTensor:
        shape, source = self.shapes[name], f"random {name}"
        if not is_weight_matrix(name, shape):
            return RawTensor.from_bytes(name, "F32", shape, self._small(name, shape).reshape(-1).view(np.uint8), source)
        format = self._format(shape[1])
        data = self._block(format, shape[1])
        unit = FORMATS[format].block_bytes * (32 if format == "BF16" else 1)  # BF16 begins at whole 64 bytes
        start = crc32(name.encode()) % OFFSETS * unit
        size = shape[0] * FORMATS[format].row_bytes(shape[1])
        return RawTensor.from_bytes(name, format, shape, data[start : start + size], source)

    def matrices(self) -> dict[str, RawTensor]:
        """The matrices that are multiplied in their stored format."""
        return {name: self(name) for name, shape in self.shapes.items() if is_weight_matrix(name, shape)}

    def _format(self, columns: int) -> str:
        return next(f for f in (self.format, "Q8_0", "BF16") if columns % FORMATS[f].block_size == 0)

    def _small(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("norm"):
            return np.ones(shape, np.float32)
        rng = np.random.default_rng([self.seed, crc32(name.encode())])
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)

    def _block(self, format: str, columns: int) -> np.ndarray:
        """Bytes for the largest matrix of this format and number of columns, from any offset."""
        key = format, columns
        if key not in self._blocks:
            kind, rng = FORMATS[format], np.random.default_rng([self.seed, columns])
            slack = OFFSETS * (32 if format == "BF16" else 1)
            count = self._largest[key] // kind.block_size + slack
            drawn = min(DRAWN[kind.block_size], count)
            made = _normal(rng, drawn, columns) if format == "BF16" else _codes(rng, format, drawn, columns)
            self._blocks[key] = np.resize(made, count * kind.block_bytes)
        return self._blocks[key]


def _normal(rng: np.random.Generator, count: int, columns: int) -> np.ndarray:
    """`count` bfloat16 values as bytes."""
    values = rng.standard_normal(count, np.float32) * np.float32(columns**-0.5)
    return values.astype(ml_dtypes.bfloat16).view(np.uint8)


def _codes(rng: np.random.Generator, format: str, count: int, columns: int) -> np.ndarray:
    """`count` blocks of random codes as bytes, with scales that give a mean of 0 and the wanted deviation."""
    kind, (scale, minimum) = FORMATS[format], SCALES[format]
    blocks = rng.integers(0, 256, (count, kind.block_bytes), np.uint8)

    def put(at: int, value: float, rows: int) -> None:
        blocks[:rows, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    some, ratio = min(count, 4096), 0.0
    put(scale, 1, some)
    if minimum is not None:  # values are scale x a + minimum x b
        put(minimum, 0, some)
        a = kind.decode(blocks[:some]).mean()
        put(scale, 0, some)
        put(minimum, 1, some)
        ratio = -a / kind.decode(blocks[:some]).mean()
        put(scale, 1, some)
        put(minimum, ratio, some)
    size = columns**-0.5 / kind.decode(blocks[:some]).std()
    put(scale, size, count)
    if minimum is not None:
        put(minimum, size * ratio, count)
    return blocks.reshape(-1)
