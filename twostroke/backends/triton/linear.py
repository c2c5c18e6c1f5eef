"""Matrices on the device, and the choice of tiles for their products.

What a result's bits depend on is fixed by a matrix's shape: `segments`, and the order of columns. What only its speed
depends on is chosen by the number of tokens: `tiles`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.backends.triton.kernels import linear as dense
from twostroke.backends.triton.kernels import packed as quantized
from twostroke.backends.triton.packed import BLOCK, PACKED_FORMATS, ROWS, RepackedMatrix, joined, pack, tensor
from twostroke.backends.triton.tile_shapes import (
    FEW_TOKENS,
    GATED_LOW,
    GATED_WIDE,
    PROCESSORS,
    UNIT,
    few,
    many,
    packed_stages,
    segment_columns,
    segments,
    stages,
)
from twostroke.models.feed_forward import Activation
from twostroke.models.formats.tensor import RawTensor

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "swiglu_oai")  # as kernels count them
PADDING = 256  # buffers of tokens have a multiple of these rows
BAND = 8  # tiles of tokens that are next to each other in time


@dataclass(frozen=True, eq=False)
class DenseMatrix:
    """A bfloat16 matrix [rows, columns]; of a gated pair [2, rows, columns]."""

    rows: int
    columns: int
    matrix: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes


Matrix = DenseMatrix | RepackedMatrix


class UnpackBuffer:
    """Room for one matrix at a time, unpacked to bfloat16. It is as large as the largest, so it never moves."""

    def __init__(self, device: str) -> None:
        self.device, self._most = device, 0
        self._room: torch.Tensor | None = None

    def reserve(self, matrix: Matrix) -> None:
        """Make sure that there will be room for a matrix, before the first is unpacked."""
        if isinstance(matrix, RepackedMatrix):
            assert self._room is None, "graphs may point to it"
            self._most = max(self._most, len(matrix.low) * ROWS * matrix.columns)

    def unpacked(self, matrix: RepackedMatrix, height: int) -> torch.Tensor:
        """The first `height` padded rows of a matrix, [height, columns]. The next call overwrites them."""
        if self._room is None:
            self._room = torch.empty(self._most, dtype=torch.bfloat16, device=self.device)
        quantized.unpack_kernel[(-(-height // ROWS), matrix.blocks)](
            *matrix.arrays, None, self._room, 1.0, height, matrix.columns, matrix.units, ROWS, False, True,
            matrix.form.code,
        )  # fmt: skip
        return self._room[: height * matrix.columns].view(height, matrix.columns)


def place(raw: RawTensor, device: str) -> Matrix:
    """A matrix on the device, in its own format if there are kernels for it, else in bfloat16."""
    if raw.format in PACKED_FORMATS and raw.shape[0]:  # a rank may have no rows
        made: Matrix = pack(raw, device)
    else:
        made = DenseMatrix(raw.shape[0], raw.shape[1], bfloat16(raw, device))
    raw.release()
    return made


def bfloat16(raw: RawTensor, device: str) -> torch.Tensor:
    """The values of a matrix, each rounded once."""
    if raw.format == "BF16":
        return tensor(raw.data).to(device, copy=True).view(torch.bfloat16).reshape(raw.shape)
    made = torch.empty(raw.num_elements, dtype=torch.bfloat16, device=device)
    for start, values in raw.chunks():
        made[start : start + len(values)] = torch.from_numpy(values).to(device)
    return made.reshape(raw.shape)


class Linear:
    """A product with one or more matrices side by side (q, k and v): float32 parts, to be added by who reads them.

    They are [segments, FEW_TOKENS, features] for few tokens and [1, tokens, features] for many.
    """

    def __init__(
        self, matrices: Sequence[Matrix], scratch: UnpackBuffer, whole: bool = False, of: int | None = None
    ) -> None:
        """Args:
        whole: never more than one part; if it is packed, never more than FEW_TOKENS.
        of: the number of features that the matrices of all ranks have together. Segments are those of the whole
            product, so bits do not depend on the number of ranks.
        """
        self.features, self.columns = sum(matrix.rows for matrix in matrices), matrices[0].columns
        self.pieces, self.scratch = _merged([matrix for matrix in matrices if matrix.rows]), scratch
        for piece in self.pieces if not whole else ():
            scratch.reserve(piece)
        # One number for all pieces, so that their parts can be added together.
        self.segments = 1 if whole else segments(self.features if of is None else of, self.columns)
        unit = BLOCK if any(isinstance(piece, RepackedMatrix) for piece in self.pieces) else UNIT
        self.length = segment_columns(self.columns, self.segments, unit)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def parts(self, tokens: int) -> int:
        """The number of parts that a product with so many tokens has."""
        return self.segments if tokens <= FEW_TOKENS else 1

    def made(self, out: torch.Tensor, tokens: int) -> torch.Tensor:
        """The parts in a buffer: [parts, tokens, features]."""
        parts, rows = self.parts(tokens), FEW_TOKENS if tokens <= FEW_TOKENS else tokens
        return out.view(-1)[: parts * rows * self.features].view(parts, rows, self.features)[:, :tokens]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, tokens: int, add: bool = False) -> None:
        """x [padded tokens, columns] bfloat16; out: float32, room for the parts of padded tokens.

        With `add`, for more than FEW_TOKENS, the result is added to what is in `out`.
        """
        first, width, length = 0, self.features, self.length
        stride = FEW_TOKENS * width
        for piece in self.pieces:
            place = out[first:]
            if tokens <= FEW_TOKENS:
                chosen = few(tokens)
                tall = -(-tokens // chosen.tokens)
                if isinstance(piece, RepackedMatrix):
                    quantized.packed_linear_kernel[(tall, -(-piece.rows // ROWS), self.segments)](
                        x, tokens, *piece.arrays, place, stride, width, piece.rows, self.columns, piece.units, length,
                        chosen.tokens, piece.form.code, num_warps=4, num_stages=packed_stages(chosen.tokens),
                    )  # fmt: skip
                else:
                    grid = tall, -(-piece.rows // chosen.features), self.segments
                    dense.linear_kernel[grid](
                        x, piece.matrix, place, stride, width, piece.rows, self.columns, length,
                        chosen.features, chosen.tokens, chosen.columns,
                        num_warps=chosen.warps, num_stages=stages(chosen, prod(grid), chosen.stages),
                    )  # fmt: skip
            else:
                w = piece.matrix if isinstance(piece, DenseMatrix) else self.scratch.unpacked(piece, piece.rows)
                chosen = many(tokens, piece.rows, self.segments)
                programs = -(-tokens // chosen.tokens) * -(-piece.rows // chosen.features)
                dense.many_kernel[(programs,)](
                    tiled(x, chosen.tokens, chosen.columns), tiled(w, chosen.features, chosen.columns), place, tokens,
                    width, piece.rows, self.columns, length, self.segments, add,
                    chosen.features, chosen.tokens, chosen.columns, BAND,
                    num_warps=chosen.warps, num_stages=chosen.stages,
                )  # fmt: skip
            first += piece.rows


def tiled(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix whose tiles the bulk copy engine loads."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


class GatedLinear:
    """activation(gate x) * (up x), bfloat16; `activation`: its place in ACTIVATIONS; `bias`: [2 * rows], of both."""

    def __init__(
        self, gate: Matrix, up: Matrix, activation: int, scratch: UnpackBuffer, bias: torch.Tensor | None = None
    ) -> None:
        self.bias = bias
        self.rows, self.columns, self.activation, self.scratch = gate.rows, gate.columns, activation, scratch
        if isinstance(gate, RepackedMatrix) and isinstance(up, RepackedMatrix) and gate.form == up.form:
            self.pair: Matrix = joined((gate, up), gate.rows)
            scratch.reserve(self.pair)
        else:  # of two formats: in bfloat16, the values that a product takes anyway
            self.pair = DenseMatrix(gate.rows, gate.columns, torch.stack([_unpacked(one) for one in (gate, up)]))

    @property
    def nbytes(self) -> int:
        return self.pair.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        """x [padded tokens, columns] -> out [padded tokens, rows], both bfloat16."""
        pair = self.pair
        if not self.rows:
            return
        if tokens <= FEW_TOKENS:
            chosen = few(tokens)
            tall = -(-tokens // chosen.tokens)
            if isinstance(pair, RepackedMatrix):
                quantized.packed_gated_kernel[(tall, -(-self.rows // ROWS))](
                    x, tokens, *pair.arrays, self.bias, out, self.rows, self.columns, pair.units, chosen.tokens,
                    self.activation, self.bias is not None, pair.form.code,
                    num_warps=4, num_stages=packed_stages(chosen.tokens),
                )  # fmt: skip
            else:
                grid = tall, -(-self.rows // chosen.features)
                dense.gated_kernel[grid](
                    x, pair.matrix, self.bias, out, self.rows, self.columns, self.activation, self.bias is not None,
                    chosen.features, chosen.tokens, chosen.columns,
                    num_warps=chosen.warps, num_stages=stages(chosen, prod(grid), 3),
                )  # fmt: skip
            return
        tall = -(-tokens // GATED_WIDE.tokens)
        chosen = GATED_WIDE if tall * (self.rows // GATED_WIDE.features) >= PROCESSORS else GATED_LOW
        height = self.rows if isinstance(pair, DenseMatrix) else -(-self.rows // ROWS) * ROWS
        whole = pair.matrix if isinstance(pair, DenseMatrix) else self.scratch.unpacked(pair, 2 * height)
        whole = whole.view(2, height, self.columns)
        sides = (tiled(side[: self.rows], chosen.features, chosen.columns) for side in whole)
        dense.many_gated_kernel[(tall * -(-self.rows // chosen.features),)](
            tiled(x, chosen.tokens, chosen.columns), *sides, self.bias, out, tokens, self.rows, self.columns,
            self.activation, self.bias is not None, chosen.features, chosen.tokens, chosen.columns, BAND,
            num_warps=chosen.warps, num_stages=chosen.stages,
        )  # fmt: skip


def _unpacked(matrix: Matrix) -> torch.Tensor:
    if isinstance(matrix, DenseMatrix):
        return matrix.matrix
    own = UnpackBuffer(str(matrix.low.device))
    own.reserve(matrix)
    return own.unpacked(matrix, matrix.rows)


def _merged(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Neighbours of one form as one matrix, if the first fills its tiles."""
    merged = list(matrices[:1])
    for one in matrices[1:]:
        last = merged[-1]
        if isinstance(last, DenseMatrix) and isinstance(one, DenseMatrix):
            merged[-1] = DenseMatrix(last.rows + one.rows, one.columns, torch.cat((last.matrix, one.matrix)))
        elif (
            isinstance(last, RepackedMatrix)
            and isinstance(one, RepackedMatrix)
            and last.form == one.form
            and last.rows % ROWS == 0
        ):
            merged[-1] = joined((last, one), last.rows + one.rows)
        else:
            merged.append(one)
    return merged
