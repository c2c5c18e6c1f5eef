"""The contents of pages, wherever they are: read as bytes or entry by entry, joined, and masked."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from twostroke.backends.page_memory import HostMemory, Layout, PageMemory
from twostroke.errors import KVError
from twostroke.kv.page_copies import PageCopy
from twostroke.kv.pages import NOWHERE, Pin
from twostroke.kv.pool import PagePool
from twostroke.kv.spans import NO_PAGE


@dataclass(frozen=True)
class PageSource:
    """The place to read a page from: a frame, or a copy."""

    memory: PageMemory
    frame: int
    copy: PageCopy | None

    def data(self) -> memoryview:
        """All bytes of the page, read-only. Raises PageLost."""
        if self.copy is None:
            return self.memory.read_pages([self.frame])[0]
        data = np.empty(self.memory.page_bytes, np.uint8)
        self.copy.read(data.data)
        return data.data.toreadonly()


@contextmanager
def reading(pool: PagePool, pages: np.ndarray, stops: np.ndarray) -> Generator[list[PageSource]]:
    """Yield where to read the slots before `stops` of distinct pages, which stay there meanwhile. Raises PageLost."""
    pin = Pin(pages)
    with pool.lock:
        sources = [_source(pool, *one) for one in zip(pages.tolist(), stops.tolist(), strict=True)]
        held = pages[[source.copy is None for source in sources]]
        pool.retain(held)
        pool.pins.add(pin)
    try:
        yield sources
    finally:
        pool.pins.remove(pin)
        pool.release(held)


def _source(pool: PagePool, page: int, stop: int) -> PageSource:
    if (frame := pool.frame(page)) != NOWHERE:
        return PageSource(pool.memory, frame, None)
    return PageSource(pool.memory, NOWHERE, pool.copies.nearest(page, stop))


def read_entries(pool: PagePool, group: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Gather entries of a group as they are stored: [layers, parts, n, Hkv, width], a copy. Raises PageLost.

    All bits are set where there is no page, which are NaN.
    """
    depth = len(pool.geometry.groups[group].layers)
    return _gather(pool, pages, slots, lambda memory, *at: memory.read(group, *at)[:depth], 2)


def require_page_size(pool: PagePool, size: int, what: str = "this value") -> None:
    """Raise KVError if pages of so many entries do not fit the pool's."""
    if size != pool.page_size:
        raise KVError(f"{what} has pages of {size} entries, and the pool has {pool.page_size}")


def zeroed_pages(pool: PagePool, groups: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Fresh pages of groups of layers, with one reference each, of zeros, whose slots before `stops` are claimed.

    Raises OutOfPages: none is taken.
    """
    pool.make_room(len(stops), collect=True)
    pages = np.array(pool.allocate(len(stops), groups), np.int64)
    try:
        for page, stop in zip(pages.tolist(), stops.tolist(), strict=True):
            pool.put(page, bytes(pool.page_bytes), stop)
    except BaseException:
        pool.release(pages)
        raise
    return pages


def write_entries(pool: PagePool, group: int, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
    """Scatter what `read_entries` has gathered over pages that are in the pool and that nobody else knows."""
    rest = pool.geometry.groups[group].depth - len(entries)
    entries = np.pad(entries.view(f"u{entries.itemsize}"), [(0, rest), *[(0, 0)] * 4]).view(entries.dtype)
    pool.memory.write(group, pool.frames_of(pages), slots, entries)


def read_keys(pool: PagePool, group: int, layer: int, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Gather the keys of a group's i-th layer like `read_entries`: [n, Hkv, width]. Raises PageLost."""
    return _gather(pool, pages, slots, lambda memory, *at: memory.read_keys(group, layer, *at), 0)


def one_page_memory(pool: PagePool, data: np.ndarray, layout: Layout | None = None) -> HostMemory:
    """The bytes of one page as memory of one frame, in the pool's layout unless a layout is given."""
    return HostMemory(1, pool.geometry.page_shape(pool.page_size), layout or pool.memory.layout, data)


def in_layout(
    pool: PagePool, group: int, data: np.ndarray, layout: Layout, slots: np.ndarray, to: Layout
) -> memoryview:
    """The bytes of a page of a group in another layout, with zeros in all slots but `slots`."""
    zeros, made = np.zeros_like(slots), np.zeros(pool.page_bytes, np.uint8)
    entries = one_page_memory(pool, data, layout).read(group, zeros, slots)
    one_page_memory(pool, made, to).write(group, zeros, slots, entries)
    return made.data


def joined_page(pool: PagePool, left: int, right: int, at: int, stop: int) -> memoryview:
    """The bytes of a page with slots [0, at) of `left` and [at, stop) of `right`. Raises PageLost."""
    data = np.empty(pool.page_bytes, np.uint8)
    with reading(pool, np.array([left, right]), np.array([at, stop])) as (one, other):
        data[:] = np.frombuffer(one.data(), np.uint8)
        theirs = one_page_memory(pool, np.frombuffer(other.data(), np.uint8))
    slots, group = np.arange(at, stop), int(pool.group_of[left])
    zeros = np.zeros_like(slots)
    one_page_memory(pool, data).write(group, zeros, slots, theirs.read(group, zeros, slots))
    return data.data


def masked_page(pool: PagePool, group: int, data: memoryview, slots: np.ndarray) -> memoryview:
    """The bytes of a page of a group, with zeros in all slots but `slots`."""
    if len(slots) == pool.page_size:
        return data
    layout = pool.memory.layout
    return in_layout(pool, group, np.frombuffer(data, np.uint8), layout, slots, layout)


def copy_pages(source: PagePool, pages: np.ndarray, stops: np.ndarray, target: PagePool, fresh: np.ndarray) -> None:
    """Copy the slots before `stops` of distinct pages to `fresh` pages of another pool, and claim them there.

    Geometry and page size must agree. Raises PageLost: some pages may have been copied.
    """
    with reading(source, pages, stops) as sources:
        for one, page, stop in zip(sources, fresh.tolist(), stops.tolist(), strict=True):
            data, layout = one.data(), target.memory.layout
            group, own = int(target.group_of[page]), source.memory.layout
            if layout != own and source.geometry.has_layout(group):
                data = in_layout(source, group, np.frombuffer(data, np.uint8), own, np.arange(stop), layout)
            target.put(page, data, stop)


def _gather(
    pool: PagePool, pages: np.ndarray, slots: np.ndarray, read: Callable[..., np.ndarray], axis: int
) -> np.ndarray:
    """Apply `read(memory, frames, slots)` in each memory that holds pages, and merge the entries along `axis`."""
    if len(gone := np.flatnonzero(pages == NO_PAGE)):
        kept = np.flatnonzero(pages != NO_PAGE)
        there = _gather(pool, pages[kept], slots[kept], read, axis)
        shape = [*there.shape[:axis], len(pages), *there.shape[axis + 1 :]]
        bits = np.moveaxis(np.empty(shape, f"u{there.itemsize}"), axis, 0)
        bits[kept], bits[gone] = np.moveaxis(there.view(bits.dtype), axis, 0), np.iinfo(bits.dtype).max
        return np.moveaxis(bits, 0, axis).view(there.dtype)
    unique, owners = np.unique(pages, return_inverse=True)
    stops = np.zeros(len(unique), np.int64)
    np.maximum.at(stops, owners, slots + 1)
    with reading(pool, unique, stops) as sources:
        frames = np.array([source.frame for source in sources], np.int64)
        here = np.array([source.copy is None for source in sources], bool)[owners]
        if here.all():
            return read(pool.memory, frames[owners], slots)
        parts, places = [read(pool.memory, frames[owners][here], slots[here])], [np.flatnonzero(here)]
        for i, source in enumerate(sources):
            if source.copy is not None:
                where = np.flatnonzero(owners == i)
                page = one_page_memory(pool, np.frombuffer(source.data(), np.uint8))
                parts.append(read(page, np.zeros_like(where), slots[where]))
                places.append(where)
    bits = np.concatenate([part.view(f"u{part.itemsize}") for part in parts], axis)
    return bits.take(np.argsort(np.concatenate(places)), axis).view(parts[0].dtype)
