"""Page ids: who refers to each page in which tier, which of its slots are taken, which frame it is in, and for whom."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from twostroke.errors import OutOfPages

TIERS: tuple[str, ...] = ("pool", "host", "disk", "remote")  # what a reference can ask for, nearest first
POOL, HOST, DISK, REMOTE = TIERS
NOWHERE = -1  # frame of a page that is not in the pool
UNUSED = -1  # claimed slots of a page without references


class ReferenceCounts:
    """References to pages by tier, and the claimed slots of each page. The pool's lock guards every change."""

    def __init__(self, max_ids: int) -> None:
        self._counts = np.zeros((len(TIERS), max_ids), np.int64)  # parts of it that are not touched take no memory
        self._of_tier = dict(zip(TIERS, self._counts, strict=True))
        self.in_pool = self._of_tier[POOL]  # [ids] int64, the references that ask for each page in the pool
        # [ids] int64, the number of leading slots of each page that are taken for writing
        self.claimed = np.zeros(max_ids, np.int64)
        self.num_ids = 0  # number of ids used so far
        self._free_ids: list[int] = []

    @property
    def num_held(self) -> int:
        """Number of pages with a reference, in any tier."""
        return self.num_ids - len(self._free_ids)

    def of_tier(self, tier: str) -> np.ndarray:
        """[ids] int64: the references that ask for each page in a tier."""
        return self._of_tier[tier]

    def new_ids(self, count: int) -> list[int]:
        """Ids of pages that nobody refers to. Raises OutOfPages."""
        fresh = max(0, count - len(self._free_ids))
        if self.num_ids + fresh > len(self.claimed):
            raise OutOfPages(f"no more than {len(self.claimed):,} KV pages can be held: drop values")
        ids = [self._free_ids.pop() for _ in range(count - fresh)]
        ids += range(self.num_ids, self.num_ids + fresh)
        self.num_ids += fresh
        return ids

    def add(self, pages: np.ndarray, tier: str) -> None:
        """Add one reference for every occurrence of a page."""
        np.add.at(self._of_tier[tier], pages, 1)

    def subtract(self, pages: np.ndarray, tier: str) -> None:
        """Remove one reference for every occurrence of a page."""
        np.subtract.at(self._of_tier[tier], pages, 1)

    def free_unused_ids(self, pages: np.ndarray) -> None:
        """Free the ids of those pages that no reference needs in any tier."""
        unused = distinct(pages[~np.logical_or.reduce(self._counts[:, pages]) & (self.claimed[pages] != UNUSED)])
        if len(unused):
            self.claimed[unused] = UNUSED
            self._free_ids.extend(unused[::-1].tolist())


class Frames:
    """Places in the pool's memory, where kernels read pages: which are free or reserved, and where each page is.

    The pool's lock guards every change.
    """

    def __init__(self, num_frames: int, max_ids: int) -> None:
        self.of_page = np.zeros(max_ids, np.int32)  # [ids] int32, the frame of each page, or NOWHERE
        self.reserved: set[int] = set()  # frames that wait for the contents of pages on their way into the pool
        self.free = [*_countdown(num_frames)]  # those that hold no page and are not reserved

    def absent(self, pages: np.ndarray) -> np.ndarray:
        """Whether each page has no frame, [n] bool."""
        return self.of_page[pages] == NOWHERE

    def take(self, count: int) -> list[int]:
        """Take free frames, of which there must be as many."""
        return [self.free.pop() for _ in range(count)]

    def give_back(self, frames: Iterable[int]) -> None:
        """Free frames that hold no page. Atomic, so a finalizer may do it without the lock."""
        self.free.extend(frames)

    def vacate(self, pages: np.ndarray) -> None:
        """Free the frames of distinct pages that have one."""
        frames = self.of_page[pages]
        self.of_page[pages] = NOWHERE
        self.free.extend(frames[::-1].tolist())

    def fill(self, page: int, frame: int) -> None:
        """Let a page be found in a reserved frame, which is freed if the page has another one by now."""
        self.reserved.discard(frame)
        if self.of_page[page] == NOWHERE:
            self.of_page[page] = frame
        else:
            self.free.append(frame)

    def cancel(self, frames: list[int]) -> None:
        """Free reserved frames. A finalizer may do it without the lock."""
        self.reserved.difference_update(frames)
        self.give_back(frames)


@cache
def _countdown(count: int) -> tuple[int, ...]:
    """count - 1, ..., 0: numbers that the free lists of a thousand simulated pools share."""
    return tuple(range(count - 1, -1, -1))


def distinct(pages: np.ndarray) -> np.ndarray:
    """Each page once, in ascending order. `np.unique` imports modules, which a finalizer at Python's end cannot; so do
    methods of arrays such as `any`."""
    if len(pages) < 2:
        return pages
    ordered = np.sort(pages)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]


class PageHolder(Protocol):
    """An open writer, or something else that needs its pages where they are. They may grow while it is pinned."""

    @property
    def pages(self) -> Sequence[int] | np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Pin:
    """A holder for pages that are read for a while."""

    pages: np.ndarray


class Pins:
    """The holders whose pages stay in their frames. A holder that is gone pins nothing."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.ref[PageHolder]] = {}  # by id

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: PageHolder) -> None:
        """Keep the holder's pages in their frames, until `remove`. The pool's lock must be held."""
        self._holders[id(holder)] = weakref.ref(holder)

    def remove(self, holder: PageHolder) -> None:
        """Let the holder's pages go. Atomic: finalizers call this, and must not wait."""
        self._holders.pop(id(holder), None)

    def pages(self) -> set[int]:
        """The pages that stay in their frames. The pool's lock must be held."""
        holders = [pin() for pin in list(self._holders.values())]
        return {page for one in holders if one is not None for page in np.asarray(one.pages).tolist()}
