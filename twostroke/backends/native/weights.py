"""Weights of the native backend: matrices in their GGUF formats, in panels of 16 rows (native/weights.h)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from twostroke.backends.native.library import ThreadTeam
from twostroke.models.formats.tensor import RawTensor
from twostroke.system.mapped_files import row_reader
from twostroke.system.scratch import address

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "MXFP4")  # as in native/weights.h
PANEL = 16
PAGE_SIZE = 16  # entries
PACKED_BYTES = 8 << 20  # bytes of a file that are packed, then released, at a time
LINE = 64  # bytes that panels are aligned to
# Bits of a weight, columns of a block, and bytes of the scales of a block of 16 rows (native/weights.h's LAYOUTS).
LAYOUTS = {
    "Q4_0": (4, 32, 32), "Q4_1": (4, 32, 64), "Q5_0": (5, 32, 32), "Q5_1": (5, 32, 64), "Q8_0": (8, 32, 32),
    "Q4_K": (4, 256, 320), "Q5_K": (5, 256, 320), "Q6_K": (6, 256, 288), "BF16": (16, 32, 0), "MXFP4": (4, 32, 16),
}  # fmt: skip


def packed_bytes(format: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix: for each panel of 16 rows the scales, rounded up to a line, and the quants."""
    bits, block, scales = LAYOUTS[format]
    panel = -(-columns // block * scales // LINE) * LINE + columns // 32 * bits * LINE
    return rows // PANEL * panel


@dataclass(frozen=True)
class MatrixShard:
    """Some rows of a stored matrix, read in pieces."""

    format: str
    shape: tuple[int, ...]  # of the whole matrix
    source: str
    # first, count: its first row, and the number of rows
    first: int
    count: int
    pieces: Iterator[np.ndarray]  # their bytes, [some rows, row_bytes] each; all but the last are whole panels
    raw: RawTensor | None = None

    @classmethod
    def whole(cls, raw: RawTensor) -> "MatrixShard":
        """All rows of a tensor."""
        return cls(raw.format, raw.shape, raw.source, 0, raw.shape[0], _pieces(raw, 0, raw.shape[0]), raw)

    def rows(self, rows: range) -> "MatrixShard":
        """Some rows of a whole matrix."""
        assert self.raw is not None
        return replace(self, first=rows.start, count=len(rows), pieces=_pieces(self.raw, rows.start, rows.stop))


def _pieces(raw: RawTensor, first: int, stop: int) -> Iterator[np.ndarray]:
    """Bytes of rows, released behind the reader: a mapped file would stay in memory beside the packed copy."""
    some = max(1, PACKED_BYTES // (PANEL * raw.data.shape[1])) * PANEL
    for start in range(first, stop, some):
        part = replace(raw, data=raw.data[start : min(start + some, stop)])
        yield part.data
        part.release()


class PackedMatrix:
    """One packed matrix, or a part of one. `multiply` and `row` are for tests; a pass uses the packed form directly.

    If the rows (of a vocabulary) do not fill the last panel, rows of zeros follow: `padded` rows in total, of which
    this part has `count`.
    """

    def __init__(self, team: ThreadTeam, stored: RawTensor | MatrixShard) -> None:
        part = MatrixShard.whole(stored) if isinstance(stored, RawTensor) else stored
        self.team, self.shape, self.padded = team, part.shape, -(-part.shape[0] // PANEL) * PANEL
        self.count = -(-part.count // PANEL) * PANEL
        self.handle = team.library.twostroke_matrix(
            FORMATS.index(part.format), self.count, part.shape[1], part.first, self.padded
        )
        if not self.handle:
            raise MemoryError(f"no memory to pack {part.source}")
        packed = 0
        for piece in part.pieces:
            data = np.ascontiguousarray(piece)
            if missing := -len(data) % PANEL:
                data = np.concatenate([data, np.zeros((missing, data.shape[1]), np.uint8)])
            team.library.twostroke_pack(team.handle, self.handle, packed, len(data), address(data), data.shape[1])
            packed += len(data)
        team.free_with(self, team.library.twostroke_matrix_free, self.handle)

    def bound(self, least: float = 0.0) -> float:
        """A bound of the weights' magnitude, which is raised to `least`."""
        return self.team.library.twostroke_matrix_bound(self.handle, least)

    @property
    def nbytes(self) -> int:
        return self.team.library.twostroke_matrix_bytes(self.handle)

    def row(self, index: int) -> np.ndarray:
        out = np.empty(self.shape[1], np.float32)
        self.team.library.twostroke_unpack(self.handle, index, address(out))
        return out

    def multiply(self, x: np.ndarray) -> np.ndarray:
        out, x, team = np.empty((len(x), self.padded), np.float32), floats(x), self.team
        team.library.twostroke_multiply(team.bare, self.handle, address(x), len(x), address(out))
        return out[:, : self.shape[0]]


class EmbeddingTable:
    """Rows that are only looked up, never multiplied: not packed, and left in their file if it is mapped.

    `read` returns their bytes, in the form that a pass takes. `row` is for tests.
    """

    def __init__(self, team: ThreadTeam, raw: RawTensor) -> None:
        self.team, self.shape, self.format = team, raw.shape, FORMATS.index(raw.format)
        self.read = row_reader(raw.data, raw.source)

    def row(self, index: int) -> np.ndarray:
        out, raw = np.empty(self.shape[1], np.float32), np.frombuffer(self.read([index]), np.uint8)
        self.team.library.twostroke_read_row(self.format, address(raw), self.shape[1], address(out))
        return out


def floats(array: np.ndarray) -> np.ndarray:
    """A contiguous float32 array, as kernels need it."""
    return np.ascontiguousarray(array, np.float32)


def vector(raw: RawTensor) -> np.ndarray:
    """A norm or a bias, [n] float32."""
    values = raw.dequantize()
    raw.release()
    return values
