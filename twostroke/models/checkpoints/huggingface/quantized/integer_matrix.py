"""Numbers of quantized matrices: tensors as arrays, fields of bits in words of 32, and integers with scales."""

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.formats import transcode
from twostroke.models.formats.block_parts import Blocks, ScaledCodes
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "U32": np.uint32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
# The blocks that hold integers from a lowest to a highest one exactly, the smallest first.
EXACT: tuple[tuple[str, int, int, Callable[[ScaledCodes], Blocks]], ...] = (
    ("Q4_0", -8, 7, transcode.q4_0),
    ("Q5_0", -16, 15, transcode.q5_0),
    ("Q8_0", -128, 127, transcode.q8_0),
)


def array(tensor: RawTensor) -> np.ndarray:
    """The numbers of a tensor, in the dtype and shape that its file states. Raises CheckpointError."""
    dtype = DTYPES.get(tensor.format)
    if dtype is None:
        raise CheckpointError(f"{tensor.source}: the dtype {tensor.format} is not supported")
    data = np.ascontiguousarray(tensor.data).reshape(-1)
    if data.size != tensor.num_elements * np.dtype(dtype).itemsize:
        raise CheckpointError(f"{tensor.source}: {data.size} bytes where {tensor.format} {tensor.shape} takes others")
    return data.view(dtype).reshape(tensor.shape)


def floats(tensor: RawTensor) -> np.ndarray:
    return array(tensor).astype(np.float32)


def unpack_stream(words: np.ndarray, bits: int) -> np.ndarray:
    """(..., k) words of 32 bits -> (..., 32 k // bits) uint8: one field after another, the lowest bits first.

    Fields of a number of bits that does not divide 32 continue in the next word.
    """
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed
    if bits in (2, 4):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields = packed[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return fields.reshape(*packed.shape[:-1], -1)
    each = np.unpackbits(packed, axis=-1, bitorder="little")
    each = each[..., : each.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
    return np.packbits(each, axis=-1, bitorder="little")[..., 0]


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """(..., k) words of 32 bits -> (..., k * (32 // bits)) uint8: no field is in two words."""
    if 32 % bits == 0:
        return unpack_stream(words, bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    fields = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return fields.astype(np.uint8).reshape(*words.shape[:-1], -1)


def module_weight(tensor: RawTensor, name: str) -> str:
    """The source of a module's matrix, for messages: the file of one of its tensors, and its name."""
    return f"{tensor.source.rpartition(': ')[0]}: {name.rpartition('.')[0]}.weight"


@dataclass(frozen=True)
class IntegerMatrix:
    """Column c of row r is `scales[r, group] * (codes()[r, c] - zeros[r, group])`, with `group` that of the column.

    `groups` gives the group of each column; None if they are of equal size, in order.
    """

    shape: tuple[int, int]
    codes: Callable[[], np.ndarray]  # [rows, columns] uint8 or int8
    range: tuple[int, int]  # that codes can be in
    scales: np.ndarray  # [rows, groups] float32
    zeros: np.ndarray  # [rows, groups] int16
    groups: np.ndarray | None = None  # [columns]

    def tensor(self, source: str, method: str, parts: tuple[RawTensor, ...]) -> PackedTensor:
        """The matrix in blocks if these are exact, otherwise in float32. Raises CheckpointError if shapes disagree."""
        rows, columns = self.shape
        count = self.scales.shape[1]
        if self.scales.shape != self.zeros.shape or self.scales.shape[0] != rows or not 0 < count <= columns:
            raise CheckpointError(f"{source}: scales {self.scales.shape} do not fit a matrix of {self.shape}")
        if self.groups is not None and (self.groups.shape != (columns,) or not (self.groups >= 0).all()):
            raise CheckpointError(f"{source}: the groups of its columns are damaged")
        if self.groups is not None and not (self.groups < count).all():
            raise CheckpointError(f"{source}: a column is in a group that has no scale")
        if self.groups is None and columns % count:
            raise CheckpointError(f"{source}: {columns} columns are not {count} groups of equal size")
        format, pack = self._blocks()

        def make() -> np.ndarray:
            codes = self.codes()
            if codes.shape != self.shape:
                raise CheckpointError(f"{source}: codes {codes.shape} where the matrix has {self.shape}")
            if pack is None:
                return self._values(codes).view(np.uint8)
            try:
                return pack(self._scaled(codes))
            except OverflowError:
                raise CheckpointError(f"{source}: damaged: a scale is NaN, or beyond float16") from None

        return PackedTensor.of(self.shape, format, source, method, parts, make)

    def _blocks(self) -> tuple[str, Callable[[ScaledCodes], Blocks] | None]:
        with np.errstate(over="ignore"):
            exact = self.scales.astype(np.float16).astype(np.float32) == self.scales
        if self.groups is None and self.shape[1] // self.scales.shape[1] % 32 == 0 and exact.all():
            lowest, highest = self.range[0] - int(self.zeros.max()), self.range[1] - int(self.zeros.min())
            for format, low, high, pack in EXACT:
                if low <= lowest and highest <= high:
                    return format, pack
        return "F32", None

    def _scaled(self, codes: np.ndarray) -> ScaledCodes:
        centred = codes.reshape(*self.scales.shape, -1).astype(np.int16)
        centred -= self.zeros[..., None]
        small = centred.astype(np.int8).reshape(self.scales.size, -1)
        return ScaledCodes(self.scales.reshape(-1, 1), np.ones((len(small), 1), np.int8), small)

    def _values(self, codes: np.ndarray) -> np.ndarray:
        values = codes.astype(np.float32)
        if self.groups is None:
            grouped = values.reshape(*self.scales.shape, -1)
            grouped -= self.zeros[..., None].astype(np.float32)
            grouped *= self.scales[..., None]
            return values
        values -= self.zeros[:, self.groups].astype(np.float32)
        values *= self.scales[:, self.groups]
        return values
