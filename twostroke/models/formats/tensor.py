"""A tensor in its stored bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.formats.blocks import FORMATS
from twostroke.system.mapped_files import drop_resident

CHUNK_ELEMENTS = 1 << 20  # elements decoded at a time: temporaries take a few MB for tensors of any size


def exponential(values: np.ndarray) -> np.ndarray:
    """e to float32 values. NumPy's own function of float32 has other last bits on other processors."""
    return np.exp(values.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A stored tensor: `data` is uint8 of shape (rows, row_bytes), with rows over all but the last axis of `shape`.

    A 1-D tensor is one row. `source` names the file and the tensor in it, for messages.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: np.ndarray
    source: str

    @classmethod
    def from_bytes(cls, name: str, format: str, shape: tuple[int, ...], data: np.ndarray, source: str) -> RawTensor:
        """Wraps a flat uint8 array without copying. Raises CheckpointError if its size does not match the shape."""
        try:
            row_bytes = FORMATS[format].row_bytes(shape[-1])
        except ValueError as error:
            raise CheckpointError(f"{source}: {error}") from None
        except KeyError:
            raise CheckpointError(f"{source}: the format {format:.40} is not supported") from None
        rows = prod(shape[:-1])
        if data.size != rows * row_bytes:
            raise CheckpointError(f"{source}: {data.size} bytes where {format} {shape} takes {rows * row_bytes}")
        return cls(name, format, shape, data.reshape(rows, row_bytes), source)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes in its file."""
        return self.data.nbytes

    def stored(self) -> tuple[RawTensor, ...]:
        """The tensors of the file that this one is made of."""
        return (self,)

    def outline(self) -> RawTensor:
        """The format and the shape that `unpack` will return; the bytes may be missing."""
        return self

    def unpack(self) -> RawTensor:
        """The tensor with its bytes in `format`: itself, if one tensor of a file is the whole of it."""
        return self

    def rows(self, start: int, stop: int) -> RawTensor:
        """Rows [start, stop) of a matrix, or numbers of a vector, as a view."""
        fmt, inside = FORMATS[self.format], 0 <= start <= stop <= self.shape[0]
        if len(self.shape) == 1 and fmt.block_size == 1 and inside:
            size = fmt.block_bytes
            return replace(self, shape=(stop - start,), data=self.data[:, start * size : stop * size])
        if len(self.shape) != 2 or not inside:
            raise ValueError(f"{self.source}: no rows {start} to {stop} in shape {self.shape}")
        return replace(self, shape=(stop - start, self.shape[1]), data=self.data[start:stop])

    def part(self, index: int) -> RawTensor:
        """The part at `index` of the first axis, as a view: a matrix or a vector. Raises CheckpointError."""
        if len(self.shape) not in (2, 3) or not 0 <= index < self.shape[0]:
            raise CheckpointError(f"{self.source}: there is no part {index} in shape {self.shape}")
        rows = prod(self.shape[1:-1])
        part = self.data[index * rows : (index + 1) * rows]
        return replace(self, shape=self.shape[1:], data=part, source=f"{self.source}[{index}]")

    def permute_rows(self, order: Sequence[int] | np.ndarray) -> RawTensor:
        """A copy whose row i is row order[i]; of a vector, number i. Stored bytes are copied: nothing is rounded."""
        index = np.asarray(order)
        if len(self.shape) == 1 and FORMATS[self.format].block_size == 1:
            return replace(self, data=self.data.reshape(self.shape[0], -1)[index].reshape(1, -1))
        if len(self.shape) != 2 or not np.array_equal(np.sort(index), np.arange(self.shape[0])):
            raise ValueError(f"{self.source}: not an order of the rows of shape {self.shape}")
        return replace(self, data=self.data[index])

    def with_floats(self, values: np.ndarray) -> RawTensor:
        """The vector with other float32 values."""
        return replace(self, format="F32", data=values.astype(np.float32).view(np.uint8).reshape(1, -1))

    def exponential(self) -> RawTensor:
        """The vector with e to its values."""
        return self.with_floats(exponential(self.dequantize()))

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """The values in order, in chunks: (index of the chunk's first value, float32 values)."""
        fmt = FORMATS[self.format]
        blocks = self.data.reshape(-1, fmt.block_bytes)
        step = CHUNK_ELEMENTS // fmt.block_size
        for start in range(0, len(blocks), step):
            yield start * fmt.block_size, fmt.decode(blocks[start : start + step]).reshape(-1)

    def dequantize(self) -> np.ndarray:
        """The float32 values, of shape `shape`. Temporaries are small beside the result."""
        result = np.empty(self.num_elements, np.float32)
        for start, values in self.chunks():
            result[start : start + len(values)] = values
        return result.reshape(self.shape)

    def release(self) -> None:
        """Frees the resident pages of bytes in a mapped file; a later access reads the file again."""
        drop_resident(self.data)
