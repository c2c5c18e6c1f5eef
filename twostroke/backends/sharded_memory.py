"""Pages whose KV heads are divided among ranks without common memory, seen as whole pages."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from twostroke.backends.page_memory import HostMemory, Layout, PageMemory
from twostroke.backends.ranks.rank_group import RankGroup
from twostroke.backends.ranks.sharding import Shard
from twostroke.errors import InvalidRequest
from twostroke.models.layer_groups import PageShape


class PageShards:
    """The pages of a pool, whole and as a rank has them, with its heads alone."""

    def __init__(self, num_pages: int, shape: PageShape, size: int, layout: Layout = "plain") -> None:
        """`size` ranks share the heads. Raises InvalidRequest: groups of layers differ in their heads."""
        if len(set(shape.shapes)) > 1:
            raise InvalidRequest("ranks without common memory need the same KV heads in all layers: use backend=native")
        self.num_pages, self.shape = num_pages, shape
        self.layout: Layout = layout
        # the KV heads of each rank
        self.heads = [Shard(rank, size).of(shape.groups[0].num_kv_heads) for rank in range(size)]

    def of(self, rank: int) -> PageShape:
        """The shape of a rank's pages."""
        groups = (replace(group, num_kv_heads=len(self.heads[rank])) for group in self.shape.groups)
        return replace(self.shape, groups=tuple(groups))

    def memory(self, rank: int) -> HostMemory:
        """Allocate a rank's pages in ordinary memory. Raises OutOfPages."""
        return HostMemory(self.num_pages, self.of(rank), self.layout)

    def joined(self, parts: Sequence[bytes | memoryview]) -> memoryview:
        """A page's bytes, from those of all ranks. In every layout a head's are in one piece."""
        layers, sides, _, size, dim = self.shape.of(0)
        arrays = [
            np.frombuffer(part, np.uint8).reshape(
                layers, sides, len(heads), size, dim * self.shape.dtype_of(0).itemsize
            )
            for part, heads in zip(parts, self.heads, strict=True)
        ]
        return np.concatenate(arrays, 2).reshape(-1).data.toreadonly()

    def part(self, data: bytes | memoryview, rank: int) -> memoryview:
        """A rank's bytes of a page."""
        layers, sides, count, size, dim = self.shape.of(0)
        page = np.frombuffer(data, np.uint8).reshape(layers, sides, count, size, dim * self.shape.dtype_of(0).itemsize)
        heads = self.heads[rank]
        return np.ascontiguousarray(page[:, :, heads.start : heads.stop]).reshape(-1).data


class ShardedMemory:
    """Rank 0's view of pages whose heads are in several ranks. Implements `backends.page_memory.PageMemory`.

    `storages` have rank 0's heads alone; everything else is of whole pages and entries. The other ranks answer with
    results of `act_on_shard`.
    """

    def __init__(self, ranks: RankGroup, number: int, shapes: PageShards, own: PageMemory) -> None:
        """`own`: rank 0's pages, of the shape that `shapes` gives it."""
        self.ranks, self.number, self.shapes, self.own = ranks, number, shapes, own
        self.storages: Sequence[Any] = self.own.storages
        self.state_storage: Any = self.own.state_storage
        self.layout: Layout = shapes.layout
        self.page_bytes = shapes.shape.page_bytes

    def read_pages(self, frames: Sequence[int]) -> list[memoryview]:
        frames = [int(frame) for frame in frames]
        others = self.ranks.ask("read_pages", self.number, frames)
        pages = zip(self.own.read_pages(frames), *others, strict=True)
        return [self.shapes.joined(parts) for parts in pages]

    @contextmanager
    def filling(self, frame: int) -> Generator[memoryview]:
        data = np.empty(self.page_bytes, np.uint8)
        yield data.data
        self.write_page(frame, data.data)

    def write_page(self, frame: int, data: memoryview | bytes) -> None:
        self.own.write_page(frame, self.shapes.part(data, 0))
        parts = [bytes(self.shapes.part(data, rank)) for rank in range(1, len(self.shapes.heads))]
        self.ranks.ask("write_page", self.number, int(frame), parts)

    def copy_page(self, source: int, target: int) -> None:
        self.own.copy_page(source, target)
        self.ranks.ask("copy_page", self.number, int(source), int(target))

    def read(self, group: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        others = self.ranks.ask("read", self.number, group, frames, slots)
        return _joined([self.own.read(group, frames, slots), *others], 3)

    def read_keys(self, group: int, layer: int, frames: np.ndarray, slots: np.ndarray) -> np.ndarray:
        others = self.ranks.ask("read_keys", self.number, group, layer, frames, slots)
        return _joined([self.own.read_keys(group, layer, frames, slots), *others], 1)

    def write(self, group: int, frames: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        parts = [entries[:, :, :, heads.start : heads.stop] for heads in self.shapes.heads]
        self.own.write(group, frames, slots, parts[0])
        self.ranks.ask("write", self.number, group, frames, slots, [np.ascontiguousarray(part) for part in parts[1:]])


def act_on_shard(memory: PageMemory, rank: int, action: str, places: list[Any]) -> Any:
    """Carry out an action of `ShardedMemory` on another rank's shard. A list of parts has one for each rank but 0."""
    if action.startswith("write"):
        places = [*places[:-1], places[-1][rank - 1]]
    found = getattr(memory, action)(*places)
    return [bytes(page) for page in found] if action == "read_pages" else found


def _joined(parts: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Heads of all ranks; as bits, since numpy joins unknown dtypes (bfloat16) slowly."""
    bits = [part.view(f"u{part.itemsize}") for part in parts]
    return np.concatenate(bits, axis).view(parts[0].dtype)
