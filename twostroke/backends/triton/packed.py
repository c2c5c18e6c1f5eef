"""Weights in GGUF's formats, repacked for the kernels without changing a bit of their values.

A tile has 64 rows and 128 columns; `kernels/packed.py` says how its bytes lie. Six-bit scales take a byte each, which
makes Q4_K 4.625 bits a weight instead of 4.5. Repacking is done on the device, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch

from twostroke.formats.tensor import RawTensor

ROWS, COLUMNS, GROUP = 64, 128, 16
PACKED_BYTES = 64 << 20  # stored bytes that are repacked at a time


@dataclass(frozen=True)
class Form:
    """How the weights of a format are coded.

    Attributes:
        bits: of a code; 8 is signed.
        kind: 0, a float16 scale for 32 columns; 1, integer scales and minima for 32 columns, times float16 for 256; 2,
            signed integer scales for 16 columns, times float16 for 256.
        zero: what is subtracted from a code.
        minima: whether something is subtracted from the product of scale and code.
        block, block_bytes: columns and bytes of a stored block.
    """

    bits: int
    kind: int
    zero: int
    minima: bool
    block: int
    block_bytes: int

    @property
    def code(self) -> int:
        """All that a kernel has to know."""
        return self.bits + 16 * self.kind + 256 * self.zero + 16384 * self.minima


FORMS = {
    "Q4_0": Form(4, 0, 8, False, 32, 18),
    "Q4_1": Form(4, 0, 0, True, 32, 20),
    "Q5_0": Form(5, 0, 16, False, 32, 22),
    "Q5_1": Form(5, 0, 0, True, 32, 24),
    "Q8_0": Form(8, 0, 0, False, 32, 34),
    "Q4_K": Form(4, 1, 0, True, 256, 144),
    "Q5_K": Form(5, 1, 0, True, 256, 176),
    "Q6_K": Form(6, 2, 32, False, 256, 210),
}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [rows, columns], its rows padded to whole tiles.

    Attributes:
        planes: [tiles of rows, tiles of columns, planes, 64, 16] uint8.
        scales, minima: [tiles of rows, tiles of columns, 4 or 8, 64] uint8; empty for kind 0.
        d, dmin: float16, [tiles of rows, tiles of columns, 4, 64] for kind 0, else [.., 256 columns, 64].
    """

    form: Form
    rows: int
    columns: int
    planes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor
    d: torch.Tensor
    dmin: torch.Tensor

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        return self.planes, self.scales, self.minima, self.d, self.dmin

    @property
    def tiles(self) -> int:
        """Tiles along the columns."""
        return self.planes.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack(raw: RawTensor, device: str) -> Packed:
    """Repack a matrix of one of `FORMS`."""
    form = FORMS[raw.format]
    step = max(1, PACKED_BYTES // (ROWS * raw.data.shape[1])) * ROWS
    parts = [
        _pack_rows(torch.from_numpy(raw.data[first : first + step]).to(device), form, raw.shape[1])
        for first in range(0, raw.shape[0], step)
    ]
    whole = parts[0] if len(parts) == 1 else tuple(torch.cat(arrays) for arrays in zip(*parts, strict=True))
    return Packed(form, raw.shape[0], raw.shape[1], *whole)


def joined(matrices: Sequence[Packed], rows: int) -> Packed:
    """Matrices of one form and width, one after the other, each from a whole tile on; `rows` as it is to be counted."""
    arrays = (torch.cat(same) for same in zip(*(one.arrays for one in matrices), strict=True))
    return Packed(matrices[0].form, rows, matrices[0].columns, *arrays)


def _pack_rows(stored: torch.Tensor, form: Form, columns: int) -> tuple[torch.Tensor, ...]:
    rows = len(stored)
    blocks = stored.reshape(rows, -1, form.block_bytes)
    codes, scales, minima, d, dmin = (_kind_0 if form.kind == 0 else _kind_k)(blocks, form)
    tall, wide = -(-rows // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS

    def tiled(array: torch.Tensor, width: int) -> torch.Tensor:
        """[rows, n] -> [tiles of rows, n / width, width, 64], padded with zeros."""
        padded = array.new_zeros(tall, -(-array.shape[1] // width) * width)
        padded[:rows, : array.shape[1]] = array
        return padded.view(tall // ROWS, ROWS, -1, width).permute(0, 2, 3, 1).contiguous()

    padded = codes.new_zeros(tall, wide)
    padded[:rows, :columns] = codes
    groups = padded.view(tall // ROWS, ROWS, wide // COLUMNS, 8, GROUP).permute(0, 2, 3, 1, 4)
    group = groups.unbind(2)
    if form.bits == 8:
        planes = groups.contiguous()
    else:
        made = [group[j] & 15 | (group[j + 4] & 15) << 4 for j in range(4)]
        if form.bits == 5:
            made.append(reduce(or_, [(one >> 4 & 1) << i for i, one in enumerate(group)]))
        if form.bits == 6:
            made += [reduce(or_, [(group[4 * h + j] >> 4 & 3) << 2 * j for j in range(4)]) for h in range(2)]
        planes = torch.stack(made, 2)
    if form.kind == 0:
        empty = stored.new_empty(0)
        return planes, empty, empty, tiled(d, 4), tiled(dmin, 4) if form.minima else empty.half()
    main = tiled(d, 1).squeeze(2)
    if form.kind == 1:
        return planes, tiled(scales, 4), tiled(minima, 4), main, tiled(dmin, 1).squeeze(2)
    return planes, tiled(scales, 8), stored.new_empty(0), main, stored.new_empty(0).half()


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """The float16 at bytes [first, first + 2) of each block: [rows, blocks]."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), -1)


def _kind_0(blocks: torch.Tensor, form: Form) -> _Parts:
    """Codes [rows, columns] uint8, no scales and minima, d and dmin [rows, blocks] (`formats/blocks.py`)."""
    d, at = _halves(blocks, 0), 2
    dmin = d.new_empty(0)
    if form.minima:
        dmin, at = _halves(blocks, 2), 4
    if form.bits == 8:
        codes = blocks[..., at:]
    else:
        high = blocks[..., at : at + 4] if form.bits == 5 else None
        at += 4 if form.bits == 5 else 0
        codes = _nibbles(blocks[..., at:])
        if high is not None:
            bits = high[..., :, None] >> torch.arange(8, device=blocks.device, dtype=torch.uint8) & 1
            codes = codes | bits.flatten(-2) << 4
    none = blocks.new_empty(0)
    return codes.reshape(len(blocks), -1), none, none, d, dmin


def _kind_k(blocks: torch.Tensor, form: Form) -> _Parts:
    """As `_kind_0`; scales and minima [rows, groups] uint8 (Q6_K: the bytes of signed scales, and no minima)."""
    rows, none = len(blocks), blocks.new_empty(0)
    if form.bits == 6:
        low = _nibbles(blocks[..., :128].reshape(rows, -1, 2, 64)).reshape(rows, -1, 2, 4, 32)
        shifts = torch.tensor([[0], [2], [4], [6]], device=blocks.device, dtype=torch.uint8)
        high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32) >> shifts & 3
        scales = blocks[..., 192:208].reshape(rows, -1)
        return (low | high << 4).reshape(rows, -1), scales, none, _halves(blocks, 208), none.half()
    scales, minima = _k_scales(blocks[..., 4:16])
    codes = _nibbles(blocks[..., 16 if form.bits == 4 else 48 :].reshape(rows, -1, 4, 32)).reshape(rows, -1, 8, 32)
    if form.bits == 5:
        shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
        codes = codes | (blocks[..., None, 16:48] >> shifts & 1) << 4
    return codes.reshape(rows, -1), scales, minima, _halves(blocks, 0), _halves(blocks, 2)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, blocks, 12] bytes -> the 6-bit scales and minima, [rows, groups of 32] each."""
    first, second, low = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (low & 15) | (first >> 2 & 48)), -1)
    minima = torch.cat((second & 63, (low >> 4) | (second >> 2 & 48)), -1)
    return scales.flatten(-2), minima.flatten(-2)
