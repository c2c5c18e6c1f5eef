"""GGUF files, versions 2 and 3: a reader over a memory map, alone or in sets.

The layout is that of docs/gguf.md in the ggml repository: a header, key-value metadata, tensor descriptions (name,
dimensions innermost first, type, offset), then the aligned tensor data. Files are not trusted: every length is checked
against the file's end, so a damaged file raises CheckpointError.
"""

import logging
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.gguf.split_files import cut, joined, parts_of
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.system.mapped_files import MappedFile

log = logging.getLogger(__name__)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4  # of arrays in arrays; deeper only in a damaged file
STRING, ARRAY = 8, 9

# Metadata value types by number, as struct layouts and numpy dtypes (7 is bool); all little-endian.
LAYOUTS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRUCTS = {kind: struct.Struct("<" + layout) for kind, layout in LAYOUTS.items()}
SCALARS = {kind: np.dtype(layout).newbyteorder("<") for kind, layout in LAYOUTS.items()}
U32, U64 = STRUCTS[4], STRUCTS[10]

# ggml's type numbers (ggml.h). Those without an entry in FORMATS are listed for error messages.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

NUMPY_ARRAYS = {"tokenizer.ggml.scores": np.float32, "tokenizer.ggml.token_type": np.int32}
STRING_ARRAYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")


@dataclass(frozen=True)
class GgufFile:
    """A parsed file: metadata as plain Python values, and tensors by their names in the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]


class MappedStrings(Sequence[str]):
    """An array of strings in a mapped file, each read on access. As lists, those of the 0.5B model take 26 MiB."""

    def __init__(self, buffer: MappedFile, ends: "array[int]") -> None:
        """String i is at [ends[i], ends[i + 1]) of `buffer`: its length in 8 bytes, then its text."""
        self._buffer, self._ends = buffer, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        for start, end in pairwise(self._ends):
            yield self._buffer[start + 8 : end].decode()

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._buffer[self._ends[i] + 8 : self._ends[i + 1]].decode()


class _Cursor:
    """A position in the mapped file. Reading past the end raises struct.error, which `read_gguf` translates."""

    def __init__(self, buffer: MappedFile) -> None:
        self.buffer, self.size, self.position = buffer, len(buffer), 0

    def number(self, code: struct.Struct) -> Any:
        (value,) = code.unpack_from(self.buffer, self.position)
        self.position += code.size
        return value

    def take(self, length: int) -> bytes:
        start, self.position = self.position, self.position + length
        if self.position > self.size:
            raise struct.error("a length runs past the end of the file")
        return self.buffer[start : self.position]

    def string(self) -> str:
        return self.take(self.number(U64)).decode()

    def strings(self, count: int) -> MappedStrings:
        # A vocabulary has 150,000 of these, so this is `string` with everything in local variables.
        buffer, position, unpack, ends = self.buffer, self.position, U64.unpack_from, array("Q", [self.position])
        for _ in range(count):
            (length,) = unpack(buffer, position)
            start = position + 8
            position = start + length
            buffer[start:position].decode()  # so that damage is found now
            ends.append(position)
        if position > self.size:
            raise struct.error("a string runs past the end of the file")
        self.position = position
        return MappedStrings(buffer, ends)

    def value(self, kind: int, nesting: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(self._known(kind, STRUCTS))
        if nesting == MAX_NESTING:
            raise struct.error("arrays are nested too deeply")
        item, count = self.number(U32), self.number(U64)
        if item == STRING:
            return self.strings(count)
        if item == ARRAY:
            return [self.value(ARRAY, nesting + 1) for _ in range(count)]
        dtype = self._known(item, SCALARS)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    @staticmethod
    def _known(kind: int, table: dict[int, Any]) -> Any:
        if kind not in table:
            raise struct.error(f"there is no metadata type {kind}")
        return table[kind]


def read_gguf(path: Path) -> GgufFile:
    """Maps and parses one file; tensor data stays on disk. Raises CheckpointError naming the file and the tensor."""
    try:
        buffer = MappedFile(path)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    cursor = _Cursor(buffer)
    try:
        return _parse(path, cursor)
    except CheckpointError as error:
        raise (cut(path) or error) from None
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        if (reason := cut(path)) is not None:
            raise reason from None
        where = f"near byte {min(cursor.position, cursor.size)} of {cursor.size}"
        raise CheckpointError(f"{path}: damaged or truncated {where}, get it again: {error}") from None


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file (it does not begin with {MAGIC.decode()})")
    version = cursor.number(U32)
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    tensor_count, metadata_count = cursor.number(U64), cursor.number(U64)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise CheckpointError(f"{path}: the metadata key {key!r} is there twice")
        metadata[key] = _plain(path, key, cursor.value(cursor.number(U32)))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
        raise CheckpointError(f"{path}: general.alignment must be a multiple of 8, not {alignment!r}")
    described = [_describe(path, cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.position // alignment) * alignment
    whole = np.frombuffer(cursor.buffer, np.uint8)
    tensors: dict[str, RawTensor] = {}
    for name, shape, type_name, offset in described:
        source = f"{path}: {name}"
        if name in tensors:
            raise CheckpointError(f"{source}: the tensor is there twice")
        fmt = FORMATS[type_name]
        if shape[-1] % fmt.block_size:
            raise CheckpointError(f"{source}: rows of {shape[-1]} are not whole {type_name} blocks of {fmt.block_size}")
        if offset % alignment:
            raise CheckpointError(f"{source}: its data are not aligned to {alignment} bytes")
        start = data_start + offset
        end = start + prod(shape) // fmt.block_size * fmt.block_bytes
        if end > cursor.size:
            raise CheckpointError(
                f"{source}: truncated: data end at byte {end}, the file at {cursor.size}; get it again"
            )
        tensors[name] = RawTensor.from_bytes(name, type_name, shape, whole[start:end], source)
    return GgufFile(path, metadata, tensors)


def _describe(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    """One tensor's name, shape (row-major), format and offset into the data."""
    name, dims = cursor.string(), cursor.number(U32)
    source = f"{path}: {name!r}"
    if not name.isprintable():  # messages that name it are one line
        raise CheckpointError(f"{source}: a tensor's name must be printable")
    if not 1 <= dims <= MAX_DIMS:
        raise CheckpointError(f"{source}: {dims} dimensions, where there are 1 to {MAX_DIMS}")
    shape = tuple(cursor.number(U64) for _ in range(dims))[::-1]
    if 0 in shape:
        raise CheckpointError(f"{source}: a dimension of shape {shape} is 0")
    type_number = cursor.number(U32)
    type_name = TYPE_NAMES.get(type_number, f"number {type_number}")
    if type_name not in FORMATS:
        raise CheckpointError(f"{source}: tensor type {type_name} is not supported, only {', '.join(FORMATS)}")
    return name, shape, type_name, cursor.number(U64)


def _plain(path: Path, key: str, value: Any) -> Any:
    """Metadata arrays as lists. The tokenizer's long arrays are not converted to lists, but their types are checked."""
    if key in NUMPY_ARRAYS:
        if not isinstance(value, np.ndarray):
            raise CheckpointError(f"{path}: {key} must be an array of numbers")
        return value.astype(NUMPY_ARRAYS[key], copy=False)
    if key in STRING_ARRAYS:
        if not isinstance(value, MappedStrings):
            raise CheckpointError(f"{path}: {key} must be an array of strings")
        return value
    return _listed(value)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | MappedStrings):
        return [_listed(item) for item in value]
    return value


def read_set(path: Path) -> tuple[tuple[Path, ...], GgufFile]:
    """The files of the set that a file belongs to, usually itself alone, and all that they hold."""
    given = read_gguf(path)
    paths = parts_of(path, given.metadata)
    if len(paths) == 1:
        return paths, given
    files = [given if part == path else read_gguf(part) for part in paths]
    metadata, tensors = joined([(file.path, file.metadata, file.tensors) for file in files])
    return paths, GgufFile(paths[0], metadata, tensors)
