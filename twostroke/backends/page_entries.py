"""Single entries of pages, by frame and slot, whatever the order of a page's elements is (`PageMemory.layout`)."""

from abc import abstractmethod
from typing import Literal

import numpy as np

from twostroke.models.kv_formats import SCALE_BYTES, KVFormat

ALL = slice(None)


class EntryPart:
    """K, V or other entries of all pages, by frame and slot: [layers, n, Hkv, width], as they are or in pairs."""

    def __init__(self, storage: np.ndarray, pairs: Literal["columns", "slots"] | None) -> None:
        """`storage`: [layers, frames, Hkv, page_size, width]."""
        self.pairs, self.dtype = pairs, storage.dtype
        bits = storage.view(f"u{storage.itemsize}")  # numpy copies unknown dtypes (bfloat16) one element at a time
        layers, frames, heads, size, dim = storage.shape
        if pairs == "columns":
            self.view = bits.reshape(layers, frames, heads, dim // 2, size, 2).transpose(0, 1, 4, 2, 3, 5)
        elif pairs == "slots":
            self.view = bits.reshape(layers, frames, heads, size // 2, dim, 2).transpose(0, 1, 3, 5, 2, 4)
        else:
            self.view = bits.swapaxes(2, 3)

    @property
    def keys(self) -> "EntryPart":
        return self

    def take(self, frames: np.ndarray, slots: np.ndarray, layers: slice | int = ALL) -> np.ndarray:
        """A copy, [layers, n, Hkv, width]; for one layer [n, Hkv, width]."""
        taken = self.view[(layers, *self._places(frames, slots))]
        if self.pairs == "columns":
            taken = taken.reshape(*taken.shape[:-2], 2 * taken.shape[-2])
        return np.ascontiguousarray(taken).view(self.dtype)

    def put(self, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        bits = np.ascontiguousarray(entries, self.dtype).view(self.view.dtype)
        if self.pairs == "columns":
            bits = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 2, 2)
        self.view[(ALL, *self._places(frames, slots))] = bits

    def _places(self, frames: np.ndarray, slots: np.ndarray) -> list[np.ndarray]:
        return [frames, slots // 2, slots % 2] if self.pairs == "slots" else [frames, slots]


class EntryRecords:
    """Codes and scales of K and V of all pages, by frame and slot: [layers, n, Hkv, width], as they are or in fours."""

    def __init__(self, storage: np.ndarray, stored: KVFormat, in_fours: bool) -> None:
        """`storage`: [layers, frames, Hkv, page_size, width]."""
        self.cut = stored.key_width(storage.shape[-1])
        size = storage.shape[3]
        if in_fours:
            pieces = np.split(storage.reshape(*storage.shape[:3], -1), [size * self.cut], -1)
            self.keys: EntryPart | _Fours = _KeysInFours(pieces[0], size)
            self.values: EntryPart | _Fours = _ValuesInFours(pieces[1], size)
        else:
            self.keys, self.values = (EntryPart(one, None) for one in np.split(storage, [self.cut], -1))

    def take(self, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """A copy, [layers, n, Hkv, width]."""
        return np.concatenate([side.take(frames, slots) for side in (self.keys, self.values)], -1)

    def put(self, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        for side, new in zip((self.keys, self.values), np.split(entries, [self.cut], -1), strict=True):
            side.put(frames, slots, new)


class _Fours:
    """Codes of K or V in pages, each head with its scales behind it: [layers, n, Hkv, width]."""

    def __init__(self, pieces: np.ndarray, size: int) -> None:
        """`pieces`: [layers, frames, Hkv, size * width] uint8."""
        heads = pieces.shape[:3]
        codes, scales = np.split(pieces, [pieces.shape[-1] - size * SCALE_BYTES], -1)
        self.scales = scales.reshape(*heads, size, SCALE_BYTES).swapaxes(2, 3)
        self.codes = self.by_slot(codes.reshape(*heads, -1), size)

    @abstractmethod
    def by_slot(self, codes: np.ndarray, size: int) -> np.ndarray:
        """A view of [layers, frames, Hkv, bytes] with frame and slot in front of the head."""

    @abstractmethod
    def taken(self, layers: slice | int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The bytes of the codes, [layers, n, Hkv, bytes]."""

    @abstractmethod
    def set(self, frames: np.ndarray, slots: np.ndarray, codes: np.ndarray) -> None:
        """The inverse of `taken`."""

    def take(self, frames: np.ndarray, slots: np.ndarray, layers: slice | int = ALL) -> np.ndarray:
        """A copy, [layers, n, Hkv, width]; for one layer [n, Hkv, width]."""
        return np.concatenate([self.taken(layers, frames, slots), self.scales[layers, frames, slots]], -1)

    def put(self, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        codes, self.scales[:, frames, slots] = np.split(entries, [entries.shape[-1] - SCALE_BYTES], -1)
        self.set(frames, slots, codes)


class _KeysInFours(_Fours):
    """Four columns of each key are adjacent."""

    def by_slot(self, codes: np.ndarray, size: int) -> np.ndarray:
        return codes.reshape(*codes.shape[:3], -1, size, 4).transpose(0, 1, 4, 2, 3, 5)

    def taken(self, layers: slice | int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        found = self.codes[layers, frames, slots]
        return found.reshape(*found.shape[:-2], 4 * found.shape[-2])

    def set(self, frames: np.ndarray, slots: np.ndarray, codes: np.ndarray) -> None:
        self.codes[:, frames, slots] = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)


class _ValuesInFours(_Fours):
    """The values of four slots are adjacent."""

    def by_slot(self, codes: np.ndarray, size: int) -> np.ndarray:
        return codes.reshape(*codes.shape[:3], size // 4, -1, 4).transpose(0, 1, 3, 5, 2, 4)

    def taken(self, layers: slice | int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self.codes[layers, frames, slots // 4, slots % 4]

    def set(self, frames: np.ndarray, slots: np.ndarray, codes: np.ndarray) -> None:
        self.codes[:, frames, slots // 4, slots % 4] = codes
