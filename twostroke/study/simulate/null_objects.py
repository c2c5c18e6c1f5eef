"""What an engine has and a simulation does not read: the contents of pages, and text."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from twostroke.backends.page_memory import Layout
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool


class NullMemory:
    """A `Memory` of pages without contents: all are zeros."""

    storages: Sequence[Any] = ()
    state_storage: Any = None
    layout: Layout = "plain"

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes, self._zeros = page_bytes, memoryview(bytes(page_bytes))

    def read_pages(self, frames: Sequence[int]) -> list[memoryview]:
        return [self._zeros for _ in frames]

    @contextmanager
    def filling(self, frame: int) -> Generator[memoryview]:
        yield memoryview(bytearray(self.page_bytes))

    def write_page(self, frame: int, data: memoryview | bytes) -> None: ...

    def copy_page(self, source: int, target: int) -> None: ...

    def read(self, group: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        raise NotImplementedError("entries of a simulation have no contents")

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        raise NotImplementedError("entries of a simulation have no contents")

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        raise NotImplementedError("entries of a simulation have no contents")


class NullPool(PagePool):
    """A pool that counts its pages as any other. Nothing is written to them, so no step has to know where they are.

    `gaps`: whether values may have gaps, so that steps have to know what they hold.
    """

    max_elsewhere = 1 << 10

    def __init__(self, geometry: Geometry, num_pages: int, page_size: int, gaps: bool = False) -> None:
        self._gaps = gaps
        super().__init__(geometry, NullMemory(geometry.page_bytes(page_size)), num_pages, page_size)

    def step_tables(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(tables) if self._gaps else []


class NullTokenizer:
    """A tokenizer whose tokens have no text and end nothing: the part of `Tokenizer` that requests use.

    Techniques that look for passages find a blank line at every 128th id.
    """

    special_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    fingerprint = "none"

    def stream(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> "NullTokenizer":
        return self

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return b"\n\n" if token_id % 128 == 0 else b"x"

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""
