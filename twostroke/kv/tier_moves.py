"""Pages move between tiers: out to copies, back into frames, and aside when the pool is full.

The pool's lock is held for counts and places only, never while bytes are copied, written or read.
"""

import numpy as np

from twostroke.errors import KVError
from twostroke.kv.page_contents import joined_page, masked_page, reading
from twostroke.kv.page_copies import HostCopy, PageCopy, StoredCopy
from twostroke.kv.pages import DISK, HOST, POOL, REMOTE, TIERS, Pin
from twostroke.kv.pool import PagePool
from twostroke.kv.swap_in import SwapIn
from twostroke.kv.tiers.names import Namespace
from twostroke.kv.tiers.private_pages import PrivatePages

SPILL_BATCH = 16  # pages that `spill` has in flight
TIER_OPTIONS = {DISK: "kv_disk=DIRECTORY", REMOTE: "kv_remote=URL"}


def require_tier(pool: PagePool, tier: str) -> None:
    """Raise KVError if the pool has no such tier."""
    if tier not in TIERS:
        raise KVError(f"the tier {tier!r} is unknown: use {', '.join(TIERS[:-1])} or {TIERS[-1]}")
    if tier in TIER_OPTIONS and tier not in pool.stores:
        raise KVError(f"there is no {tier} tier: open the model with {TIER_OPTIONS[tier]}")


# Out of the pool, and back -------------------------------------------------------------------------------------


def retain_in_tier(pool: PagePool, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
    """Add one reference in a tier to each of these distinct pages, and copy their slots before `stops` there.

    Pages that are already there are not moved again. Raises OutOfPages, PageLost or KVError: nothing has changed.
    """
    require_tier(pool, tier)
    if tier == POOL:
        pool.make_room(int(np.count_nonzero(pool.frames.absent(pages))), collect=True)
        with SwapIn(pool, pages) as bringing:
            bringing.load()
            bringing.publish()
            pool.retain(pages)
        return
    pool.retain(pages, tier)
    try:
        _copy_out(pool, pages, stops, tier)
    except BaseException:
        pool.release(pages, tier)
        raise


def _copy_out(pool: PagePool, pages: np.ndarray, stops: np.ndarray, tier: str) -> None:
    with pool.lock:
        wanted = zip(pages.tolist(), stops.tolist(), strict=True)
        short = [not pool.copies.holds(page, stop, tier) for page, stop in wanted]
        pages, stops = pages[short], stops[short]
        rooms = pool.copies.new_host_copies(len(pages)) if tier == HOST else [None] * len(pages)
    with reading(pool, pages, stops) as sources:
        made = [
            _copy(pool, int(pool.group_of[page]), source.data(), stop, tier, room)
            for page, source, stop, room in zip(pages.tolist(), sources, stops.tolist(), rooms, strict=True)
        ]
    with pool.lock:
        for page, copy in zip(pages.tolist(), made, strict=True):
            pool.copies.keep(page, copy, tier)


def _copy(pool: PagePool, group: int, data: memoryview, stop: int, tier: str, room: HostCopy | None) -> PageCopy:
    if room is not None:
        room.fill(data, stop)
        return room
    # Slots after those of the value may be written meanwhile, and are nobody else's business.
    return StoredCopy(_private_pages(pool, tier), masked_page(pool, group, data, np.arange(stop)), stop)


def _private_pages(pool: PagePool, tier: str) -> PrivatePages:
    """The pages in a store that only this pool reads."""
    with pool.lock:
        store, known = pool.stores[tier], pool.private.get(tier)
        if known is None or known.store is not store:
            layout, size = pool.memory.layout, pool.page_size
            namespace = Namespace("", "", pool.geometry.fingerprint, layout, size, pool.page_bytes)
            known = pool.private[tier] = PrivatePages(store, namespace)
        return known


def join_pages(pool: PagePool, left: int, right: int, at: int, stop: int, tier: str) -> int:
    """A fresh page in a tier, with one reference: slots [0, at) of `left` and [at, stop) of `right`.

    Raises OutOfPages or PageLost: nothing has changed.
    """
    data, group = joined_page(pool, left, right, at, stop), int(pool.group_of[left])
    if tier == POOL:
        (page,) = pool.allocate(1, group)
        pool.put(page, data, stop)
        return page
    with pool.lock:
        room = pool.copies.new_host_copies(1)[0] if tier == HOST else None
    copy = _copy(pool, group, data, stop, tier, room)
    with pool.lock:
        page = pool.allocate_elsewhere(tier, stop, group)
        pool.copies.keep(page, copy, tier)
        return page


def fetch(pool: PagePool, pages: np.ndarray) -> None:
    """Bring spilled pages back into frames. Raises OutOfPages: nothing has changed."""
    if np.count_nonzero(pool.frames.absent(pages)):
        with SwapIn(pool, np.unique(pages)) as bringing:
            bringing.load()
            bringing.publish()


# Aside ---------------------------------------------------------------------------------------------------------


def spill(pool: PagePool, pages: np.ndarray) -> int:
    """Move pages to the host tier, except those of open writers. Returns the number of frames freed.

    Holders need not know: a writer brings them back. Raises OutOfPages if there is no memory; pages moved before that
    stay moved.
    """
    pages, count = np.unique(pages), 0
    for first in range(0, len(pages), SPILL_BATCH):
        count += _spill_batch(pool, pages[first : first + SPILL_BATCH])
    return count


def _spill_batch(pool: PagePool, pages: np.ndarray) -> int:
    with pool.lock:
        pinned = pool.pins.pages()
        movable = (pool.references.in_pool[pages] > 0) & ~pool.frames.absent(pages)
        pages = np.array([page for page in pages[movable].tolist() if page not in pinned], np.int64)
        stops, frames = pool.references.claimed[pages].tolist(), pool.frames_of(pages).tolist()
        # While these references are held, claimed slots stay claimed, and only an open writer claims more.
        pool.retain(pages)
        pin = Pin(pages)
        pool.pins.add(pin)
    try:
        with pool.lock:
            todo = [
                (page, frame, stop)
                for page, frame, stop in zip(pages.tolist(), frames, stops, strict=True)
                if not pool.copies.holds(page, stop, HOST)
            ]
            rooms = pool.copies.new_host_copies(len(todo))
        for (_, frame, stop), room in zip(todo, rooms, strict=True):
            room.fill(pool.memory.read_pages([frame])[0], stop)
        copied = {page: room for (page, _, _), room in zip(todo, rooms, strict=True)}
        with pool.lock:
            pool.pins.remove(pin)
            return _vacate_copied(pool, pages.tolist(), copied)
    finally:
        pool.pins.remove(pin)
        pool.release(pages)


def _vacate_copied(pool: PagePool, pages: list[int], copied: dict[int, HostCopy]) -> int:
    """Free the frames of pages whose copies in the host hold all that is claimed by now."""
    count, pinned = 0, pool.pins.pages()
    references, in_host = pool.references, pool.copies.in_tier(HOST)
    for page in pages:
        copy = copied.get(page) or in_host.get(page)
        unused = references.in_pool[page] == 1  # only the mover holds it
        if copy is None or page in pinned or unused or copy.stop < references.claimed[page]:
            continue
        pool.copies.keep(page, copy, HOST)
        pool.frames.vacate(np.array([page]))
        count += 1
    return count
