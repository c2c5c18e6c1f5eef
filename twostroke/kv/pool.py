"""The page pool: the pages of KV values, counted by their holders and placed in tiers.

Values, writers and prefix indexes hold page ids, and the pool knows where each page is. A page may be in a *frame* of
the pool's memory, where kernels read it, and in copies elsewhere: in the host's ordinary memory, on disk, in a remote
store. So a page can leave the pool and come back without any change to its holders (`kv.tier_moves`).

These rules decide where a page is:

- A reference asks for a page in one tier. The last reference of `POOL` frees the frame, the last reference of another
  tier frees the copy there. The page's id is free when it has no reference at all.
- A page that was spilled has references of `POOL` and no frame; the host's copy then stays for them.
- Pages that an open writer holds stay in their frames. `step_tables` finds a frame for each of them.

A frame holds all claimed slots of its page. So a page comes back from its fullest copy, which may be that of a longer
value; a value is read where it is from any copy that has its slots.

Any thread may make, cut and drop values. `lock` guards the counts, the places of pages, and the prefix indexes.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.backends.page_memory import PageMemory
from twostroke.errors import OutOfPages
from twostroke.kv.garbage import GarbageCollection
from twostroke.kv.geometry import Geometry
from twostroke.kv.page_copies import PageCopies
from twostroke.kv.pages import HOST, NOWHERE, POOL, Frames, Pins, ReferenceCounts
from twostroke.kv.releases import Releases
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.tiers.private_pages import PrivatePages
from twostroke.kv.tiers.store import Store

LOCKED_BYTES = 1 << 20  # bytes that may be copied while the lock is held
LET_OTHERS_S = 1e-4  # pause after which a thread that waits for the lock has it


class PagePool:
    """All pages of one geometry on one device.

    Attributes:
        geometry, page_size: the shape of an entry, and the number of entries of a page.
        entry_bytes, page_bytes: bytes of an entry in all groups of layers, and of a page of one group.
        num_groups: number of groups of layers; an entry lies in a page of each.
        group_of: [ids] int16, the group of each page; `num_groups` for pages of snapshots of states.
        memory: the frames; num_pages: the number of frames.
        references: who needs which page, and which slots are claimed.
        frames: which page is in which frame.
        copies: the pages outside of the pool.
        pins: the holders whose pages stay in their frames.
        lock: held for every change of a count or a place, and across several changes that must agree.
        release, drop, settle, drop_unneeded_copies: remove references (`kv.releases`).
        reclaim: called with the number of missing frames; may release some (prefix eviction).
        num_quarantined: number of pages that nobody wants, and that are free as soon as nothing can be written to them.
        recomputed_tokens: tokens of values that were cut back to where windowed layers lacked entries, and that were
            computed again.
        wipes: whether writers zero fresh pages, since a model has written NaN: kernels multiply slots of a page that
            a sequence does not use by 0, and 0 times NaN is NaN.
        snapshot_pages: number of pages of a snapshot of all states; 0 for a model without any.
        pages_to_go_on: the most pages that a value's next entry takes: one of each group, and a snapshot.
        max_elsewhere: maximum number of pages that are not in frames.
        max_position: number of positions that an entry may have, those of the model with the fewest.
    """

    wipes = False
    max_elsewhere = 1 << 20
    max_position = 1 << 30

    def __init__(self, geometry: Geometry, memory: PageMemory, num_pages: int, page_size: int = 16) -> None:
        """`memory` must have room for `num_pages` pages of the geometry, each of `page_size` entries."""
        self.geometry, self.page_size, self.entry_bytes = geometry, page_size, geometry.entry_bytes
        self.memory, self.num_pages, self.page_bytes = memory, num_pages, geometry.page_bytes(page_size)
        self.num_groups, self.snapshot_pages = len(geometry.groups), geometry.snapshot_pages(page_size)
        self.pages_to_go_on = self.num_groups + self.snapshot_pages
        max_ids = num_pages + self.max_elsewhere
        self.references, self.frames = ReferenceCounts(max_ids), Frames(num_pages, max_ids)
        self.copies, self.pins = PageCopies(self.page_bytes), Pins()
        releases = Releases(self.references, self.frames, self.copies)
        self.lock, self.release, self.drop = releases.lock, releases.release, releases.drop
        self.settle, self.drop_unneeded_copies = releases.settle, releases.drop_unneeded_copies
        self.group_of = np.zeros(max_ids, np.int16)
        self.stores: dict[str, Store] = {}  # the stores of the tiers "disk" and "remote", if there are any
        self.private: dict[str, PrivatePages] = {}  # what the pool keeps in them, by tier, that nobody else may read
        self.reclaim: Callable[[int], None] | None = None
        self.num_quarantined = self.recomputed_tokens = 0
        self.max_entries = geometry.max_entries(num_pages, page_size)  # the most entries that a single value can have
        self._for_kv = np.array([*(group.kind == "kv" for group in geometry.groups), False])
        self._other = np.zeros(num_pages, bool)  # frames that have held other numbers than K and V
        self._garbage = GarbageCollection()

    @property
    def block_bytes(self) -> int:
        """Bytes of the pages of all groups that hold K and V of the same entries."""
        return self.page_bytes * len(self.geometry.kv_groups)

    # Counts ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of frames that hold no page."""
        self.settle()
        return len(self.frames.free)

    @property
    def num_used(self) -> int:
        """Number of frames that hold a page, or are reserved for one."""
        return self.num_pages - self.num_free

    @property
    def num_arriving(self) -> int:
        """Number of frames that are reserved for pages on their way into the pool."""
        return len(self.frames.reserved)

    def num_in(self, tier: str) -> int:
        """Number of pages with a copy in a tier other than the pool."""
        self.settle()
        return len(self.copies.in_tier(tier))

    @property
    def num_copies(self) -> int:
        """Number of pages in the host tier, each of `page_bytes` bytes."""
        return self.num_in(HOST)

    @property
    def num_held(self) -> int:
        """Number of pages with a reference, in any tier."""
        self.settle()
        return self.references.num_held

    def num_references(self, page: int, tier: str = POOL) -> int:
        """Number of references that ask for a page in a tier."""
        self.settle()
        return int(self.references.of_tier(tier)[page])

    def would_free(self, pages: np.ndarray) -> np.ndarray:
        """For each of these distinct pages, whether releasing one `POOL` reference would free a frame."""
        return (self.references.in_pool[pages] == 1) & ~self.frames.absent(pages)

    def num_would_free(self, pages: np.ndarray) -> int:
        """Number of those whose release would."""
        return int(np.count_nonzero(self.would_free(pages)))

    # Allocation ------------------------------------------------------------------------------------------------

    def allocate(self, count: int, groups: np.ndarray | int | None = None) -> list[int]:
        """Allocate `count` empty pages with one reference each. On OutOfPages none is taken.

        `groups`: the groups of layers that they are for; None: one page for each group in turn, again and again.
        """
        if not count:
            return []
        with self.lock:
            frames = self._take_frames(count)
            try:
                pages = self.references.new_ids(count)
            except OutOfPages:
                self.frames.give_back(frames)
                raise
            one = count == 1  # as for most decodes: a number is a quicker index than a list
            where = pages[0] if one else pages
            self.references.claimed[where] = 0
            self.frames.of_page[where] = frames[0] if one else frames
            self.references.in_pool[where] = 1
            if self.num_groups > 1:
                self.group_of[pages] = np.arange(count) % self.num_groups if groups is None else groups
            if self.geometry.states:
                self._clean(pages)
            return pages

    def set_groups(self, pages: np.ndarray, groups: np.ndarray) -> None:
        """Say what pages hold that were allocated, and filled, before it was known."""
        with self.lock:
            self.group_of[pages] = groups
            if self.geometry.states:
                self._other[self.frames.of_page[pages]] = True

    def _clean(self, pages: list[int]) -> None:
        """Zero what has held other numbers than K and V, which may look like NaN, where K and V come now."""
        frames = self.frames.of_page[pages]
        kept = self._for_kv[self.group_of[pages]]
        for frame in frames[kept & self._other[frames]].tolist():
            self.memory.write_page(frame, bytes(self.page_bytes))
        self._other[frames] = ~kept

    def allocate_elsewhere(self, tier: str, stop: int, group: int) -> int:
        """An id with one reference, for a page whose slots before `stop` are claimed and that is in another tier."""
        with self.lock:
            (page,) = self.references.new_ids(1)
            self.references.claimed[page], self.frames.of_page[page] = stop, NOWHERE
            self.references.of_tier(tier)[page] = 1
            self.group_of[page] = group
            return page

    def reserve_frames(self, count: int) -> list[int]:
        """Frames for pages on their way into the pool. The lock must be held. Raises OutOfPages."""
        frames = self._take_frames(count)
        self.frames.reserved.update(frames)
        self._other[frames] = bool(self.geometry.states)  # whatever comes
        return frames

    def _take_frames(self, count: int) -> list[int]:
        self.settle()
        frames = self.frames
        if count > len(frames.free) and self.reclaim is not None:
            self.reclaim(count - len(frames.free))
        if count > len(frames.free):
            self.collect_garbage()
        if count > len(frames.free):
            raise OutOfPages(
                f"{count} more KV pages are needed and {len(frames.free)} of {self.num_pages} are free: drop "
                f"values that are no longer used, or give the pool more memory (kv_bytes)",
                count,
            )
        return frames.take(count)

    def collect_garbage(self, even_if_recent: bool = False) -> bool:
        """Free the pages of values in garbage reference cycles. Returns whether frames became free.

        For callers that would otherwise preempt a choice, or fail. It does nothing where it could not help: if all
        pages in frames are held by open writers, or soon after a collection that found nothing (`kv.garbage`).
        """
        if not self._garbage.due and (self._garbage.running or not even_if_recent):
            return False
        with self.lock:
            pinned = np.fromiter(self.pins.pages(), np.int64)
            if self.num_used - self.num_arriving <= len(pinned) - np.count_nonzero(self.frames.absent(pinned)):
                return False
            before = self.num_free
            self._garbage.run()
            if freed := self.num_free > before:
                self._garbage.freed_some()
            return freed

    def make_room(self, count: int, collect: bool = False) -> None:
        """Let up to `count` frames become free before they are taken, for callers that do not hold the lock.

        Evicted pages may have to be copied. So a few go at a time, and others get the lock in between. `collect`: if
        that is not enough, also collect garbage, since there is nobody to wait for more pages.
        """
        self._evict_slowly(count)
        if collect and self.num_free < count:
            self.collect_garbage(even_if_recent=True)

    def _evict_slowly(self, count: int) -> None:
        few = max(1, LOCKED_BYTES // self.page_bytes)
        while (missing := count - self.num_free) > 0 and (reclaim := self.reclaim) is not None:
            with self.lock:
                before = self.num_free
                reclaim(min(few, missing))
                if self.num_free <= before:
                    return
            if missing > few:
                time.sleep(LET_OTHERS_S)

    # References ------------------------------------------------------------------------------------------------

    def retain(self, pages: np.ndarray, tier: str = POOL) -> None:
        """Add one reference for every occurrence of a page, without moving it (see `tier_moves`)."""
        if len(pages):
            with self.lock:
                self.references.add(pages, tier)

    # Slots -----------------------------------------------------------------------------------------------------

    def claim(self, page: int, start: int, stop: int) -> bool:
        """Take slots [start, stop) of a page for writing. Returns False if slot `start` is already claimed."""
        claimed = self.references.claimed
        with self.lock:
            if claimed[page] != start:
                return False
            claimed[page] = stop
            return True

    def claim_all(self, pages: Sequence[int], start: int, stop: int) -> bool:
        """Take slots [start, stop) of all of these pages. Returns False, and takes none, if one is taken in any."""
        if len(pages) == 1:
            return self.claim(pages[0], start, stop)
        claimed = self.references.claimed
        with self.lock:
            if (claimed[pages] != start).any():
                return False
            claimed[pages] = stop
            return True

    def claim_fresh(self, pages: Sequence[int] | np.ndarray, stops: np.ndarray) -> None:
        """Take the slots before `stops` of pages in which none is claimed, and which nobody else knows."""
        self.references.claimed[pages] = stops

    def unclaim(self, pages: Sequence[int], start: int) -> None:
        """Give back the slots of pages from `start` on. They must be the last claimed, and in no value."""
        with self.lock:
            self.references.claimed[pages] = start

    # Frames ----------------------------------------------------------------------------------------------------

    def frame(self, page: int) -> int:
        """The frame of a page; NOWHERE if it is not in the pool."""
        return int(self.frames.of_page[page])

    def frames_of(self, pages: Sequence[int] | np.ndarray) -> np.ndarray:
        """The frame of each page, [n] int32."""
        return self.frames.of_page[pages]

    def all_frames(self) -> np.ndarray:
        """[ids] int32: the frame of each page id that was ever used, a copy. The lock must be held."""
        return self.frames.of_page[: self.references.num_ids].copy()

    def step_tables(self, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Span tables of open writers as a step reads them: [P, 3 + groups] int32 each, with frames instead of ids.

        Where a group has no page for a span (`kv.spans`), the frame of the sequence's last page stands, which kernels
        may read for nothing: its numbers are finite. The tables are valid until one of the writers is closed.
        """
        if not tables:
            return []
        table = np.concatenate(tables)
        pages = table[:, PAGE:]
        frames = self.frames.of_page[pages]
        if self.num_groups > 1 and len(table):
            lengths = [len(one) for one in tables]
            last = np.repeat(frames[np.cumsum(lengths) - 1], lengths, 0)
            frames = np.where(pages == NO_PAGE, last, frames)
        assert not len(frames) or frames.min() >= 0, "a step reads pages that have left the pool"
        table[:, PAGE:] = frames
        stops = accumulate(map(len, tables))
        return [table[stop - len(one) : stop] for one, stop in zip(tables, stops, strict=True)]

    def put(self, page: int, data: memoryview | bytes, stop: int) -> None:
        """Fill a fresh page in the pool with bytes and claim its slots before `stop`."""
        self.memory.write_page(self.frame(page), data)
        self.references.claimed[page] = stop

    def copy_page(self, source: int, target: int, stop: int) -> None:
        """Copy a page into a fresh one and claim its slots before `stop`. Both must be in the pool."""
        self.memory.copy_page(self.frame(source), self.frame(target))
        self.references.claimed[target] = stop
