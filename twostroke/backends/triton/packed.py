"""Weights in GGUF's formats, repacked for the kernels without changing a bit of their values.

A unit has 64 rows and 32 or 64 columns; `kernels/packed.py` says how its bytes lie. Six-bit scales take a byte each,
which makes Q4_K 4.625 bits a weight instead of 4.5. Repacking is done on the device, some rows at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
import torch

from twostroke.models.formats.tensor import RawTensor

ROWS = 64  # of a tile
BLOCK = 256  # columns that share planes of higher bits, and main scales
WORD = 64  # columns whose scales share a word
PACKED_BYTES = 64 << 20  # stored bytes that are repacked at a time


@dataclass(frozen=True)
class PackedFormat:
    """The coding of a format's weights."""

    bits: int  # of a code; 8 is signed
    # 0, a float16 scale for 32 columns; 1, integer scales and minima for 32 columns, times float16 for 256; 2, signed
    # integer scales for 16 columns, times float16 for 256
    kind: int
    zero: int  # what is subtracted from a code
    minima: bool  # whether something is subtracted from the product of scale and code
    # block, block_bytes: columns and bytes of a stored block
    block: int
    block_bytes: int

    @property
    def group(self) -> int:
        """Columns of a group; a unit is two of them."""
        return 16 if self.kind == 2 else 32

    @property
    def code(self) -> int:
        """All that a kernel has to know."""
        return self.bits + 16 * self.kind + 256 * self.zero + 16384 * self.minima


PACKED_FORMATS = {
    "Q4_0": PackedFormat(4, 0, 8, False, 32, 18),
    "Q4_1": PackedFormat(4, 0, 0, True, 32, 20),
    "Q5_0": PackedFormat(5, 0, 16, False, 32, 22),
    "Q5_1": PackedFormat(5, 0, 0, True, 32, 24),
    "Q8_0": PackedFormat(8, 0, 0, False, 32, 34),
    "Q4_K": PackedFormat(4, 1, 0, True, 256, 144),
    "Q5_K": PackedFormat(5, 1, 0, True, 256, 176),
    "Q6_K": PackedFormat(6, 2, 32, False, 256, 210),
}


@dataclass(frozen=True, eq=False)
class RepackedMatrix:
    """A matrix [rows, columns], its rows padded to whole tiles, its columns to whole units."""

    form: PackedFormat
    rows: int
    columns: int
    low: torch.Tensor  # [tiles of rows, units, planes, 64, group] uint8, two planes for 8 bits, else one of low nibbles
    high: torch.Tensor  # [tiles of rows, blocks, planes, 64, group] uint8, the higher bits of 5 or 6
    # [tiles of rows, words, 1 or 2, 64] int32, the scales of 64 columns; kind 0 has minima in a second one
    words: torch.Tensor
    # [tiles of rows, blocks, 64] int32, two float16 (d and dmin) for a block of 256 columns; empty for kind 0
    mains: torch.Tensor

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.low, self.high, self.words, self.mains

    @property
    def units(self) -> int:
        """Units along the columns."""
        return self.low.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks along the columns; the last may have fewer units."""
        return -(-self.columns // BLOCK)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def tensor(stored: np.ndarray) -> torch.Tensor:
    """The same values. What lies in a file is copied: PyTorch warns of arrays that it may not write to."""
    return torch.from_numpy(stored if stored.flags.writeable else stored.copy())


def pack(raw: RawTensor, device: str) -> RepackedMatrix:
    """Repack a matrix of one of `PACKED_FORMATS`."""
    form = PACKED_FORMATS[raw.format]
    step = max(1, PACKED_BYTES // (ROWS * raw.data.shape[1])) * ROWS
    parts = [
        _pack_rows(tensor(raw.data[first : first + step]).to(device), form, raw.shape[1])
        for first in range(0, raw.shape[0], step)
    ]
    whole = parts[0] if len(parts) == 1 else tuple(torch.cat(arrays) for arrays in zip(*parts, strict=True))
    return RepackedMatrix(form, raw.shape[0], raw.shape[1], *whole)


def joined(matrices: Sequence[RepackedMatrix], rows: int) -> RepackedMatrix:
    """Matrices of one form and width, one after the other, each from a whole tile on; `rows` as it is to be counted."""
    arrays = (torch.cat(same) for same in zip(*(one.arrays for one in matrices), strict=True))
    return RepackedMatrix(matrices[0].form, rows, matrices[0].columns, *arrays)


def _pack_rows(stored: torch.Tensor, form: PackedFormat, columns: int) -> tuple[torch.Tensor, ...]:
    rows = len(stored)
    codes, words, mains = (_kind_0 if form.kind == 0 else _kind_k)(stored.reshape(rows, -1, form.block_bytes), form)
    tall, wide, blocks = -(-rows // ROWS), -(-columns // WORD), -(-columns // BLOCK)
    group, more = form.group, form.bits - 4

    def tiled(array: torch.Tensor, width: int, *shape: int) -> torch.Tensor:
        """[rows, n] -> [tiles of rows, *shape, 64, width], padded with zeros."""
        padded = array.new_zeros(tall * ROWS, math.prod(shape) * width)
        padded[:rows, : array.shape[1]] = array
        return padded.view(tall, ROWS, *shape, width).movedim(1, -2)

    low, high = tiled(codes, group, wide * WORD // (2 * group), 2), codes.new_empty(tall, 0)
    if form.bits < 8:
        one, two = low.unbind(2)
        low = (one & 15 | two << 4).unsqueeze(2)
    if 4 < form.bits < 8:
        fields = 8 // more  # of a byte
        parts = tiled(codes >> 4, group, blocks, BLOCK // group // fields, fields).unbind(3)
        high = reduce(or_, [part << more * i for i, part in enumerate(parts)])
    words, mains = tiled(words, words.shape[1] // wide, wide), tiled(mains, 1, blocks)
    return low.contiguous(), high.contiguous(), words.transpose(-1, -2).contiguous(), mains.contiguous()


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at bytes [first, first + 2) of each block: [rows, blocks]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _paired(halves: torch.Tensor) -> torch.Tensor:
    """Float16 [rows, n] as int32 [rows, n / 2], rounded up."""
    return torch.nn.functional.pad(halves, (0, halves.shape[1] % 2)).view(torch.int32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _kind_0(blocks: torch.Tensor, form: PackedFormat) -> _Parts:
    """Codes [rows, columns] uint8, words [rows, words] int32 and no main scales (`models/formats/blocks.py`)."""
    words, at = _paired(_halves(blocks, 0)), 2
    if form.minima:
        words, at = torch.stack((words, _paired(_halves(blocks, 2))), -1).flatten(-2), 4
    if form.bits == 8:
        codes = blocks[..., at:]
    else:
        high = blocks[..., at : at + 4] if form.bits == 5 else None
        at += 4 if form.bits == 5 else 0
        codes = _nibbles(blocks[..., at:])
        if high is not None:
            bits = high[..., :, None] >> torch.arange(8, device=blocks.device, dtype=torch.uint8) & 1
            codes = codes | bits.flatten(-2) << 4
    return codes.reshape(len(blocks), -1), words, words[:, :0]


def _kind_k(blocks: torch.Tensor, form: PackedFormat) -> _Parts:
    """Codes and words like those of `_kind_0`, and main scales [rows, blocks] int32."""
    rows = len(blocks)
    if form.bits == 6:
        low = _nibbles(blocks[..., :128].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, 32)
        shifts = torch.tensor([[0], [2], [4], [6]], device=blocks.device, dtype=torch.uint8)
        high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32) >> shifts & 3
        words = blocks[..., 192:208].reshape(rows, -1).contiguous().view(torch.int32)
        mains = torch.stack((d := _halves(blocks, 208), torch.zeros_like(d)), -1)
        return (low | high << 4).reshape(rows, -1), words, _paired(mains.flatten(1))
    pairs = (part.view(rows, -1, 2) for part in _k_scales(blocks[..., 4:16]))
    words = torch.cat(tuple(pairs), -1).view(rows, -1).view(torch.int32)  # two scales and two minima
    codes = _nibbles(blocks[..., 16 if form.bits == 4 else 48 :].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
    if form.bits == 5:
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
        codes = codes | (blocks[..., None, 16:48] >> shifts & 1) << 4
    mains = torch.stack((_halves(blocks, 0), _halves(blocks, 2)), -1)
    return codes.reshape(rows, -1), words, _paired(mains.flatten(1))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, blocks, 12] bytes -> the 6-bit scales and minima, contiguous [rows, groups of 32] each."""
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (low & 15) | (first >> 2 & 48)), -1)
    minima = torch.cat((second & 63, (low >> 4) | (second >> 2 & 48)), -1)
    return scales.flatten(-2), minima.flatten(-2)
