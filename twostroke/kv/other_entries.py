"""Entries written anew, with the same slots, page by page: at other positions, or in another number format.

At other positions K is turned on by RoPE's angle of the distance, V is what it was, and groups of layers whose K knows
no positions share their pages. In another format entries are decoded, and encoded again as a pool stores them.
"""

from dataclasses import replace

import numpy as np

from twostroke.backends.interface import PAGE, POSITION
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable
from twostroke.kv.page_contents import read_entries, require_page_size, write_entries, zeroed_pages
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.models.rope import turned_on

SPANS_AT_ONCE = 64  # whose K is in memory as float32
PAGES_AT_ONCE = 64  # whose entries are in memory as numbers


def require_positions(pool: PagePool, contents: EntryTable, distance: int) -> None:
    """Raise KVError unless all entries have a position `distance` further."""
    positions = spans.positions(contents.table)
    if (heads := contents.head_positions) is not None:
        positions = np.concatenate([positions, heads.ravel()])
    first, last = int(positions.min()) + distance, int(positions.max()) + distance
    if first < 0:
        raise KVError(f"positions begin at 0: the first of these entries would lie at {first}")
    if last >= pool.max_position:
        raise KVError(
            f"positions end at {pool.max_position - 1}: the last of these entries would lie at {last}, so move them by "
            f"{last + 1 - pool.max_position} less"
        )


def moved(pool: PagePool, contents: EntryTable, distance: int) -> tuple[EntryTable, np.ndarray]:
    """Entries of the pool `distance` positions further, and their fresh pages, each with a reference for the caller.

    Slots stay the same, page by page. Raises OutOfPages or PageLost: nothing has changed.
    """
    table, groups = contents.table, pool.geometry.turned_groups
    turned = table[:, [*range(PAGE), *(PAGE + group for group in groups)]]
    old = spans.distinct_pages(turned)
    fresh = zeroed_pages(pool, pool.group_of[old], spans.slot_stops(turned, old))
    try:
        every, _ = contents.pages_and_stops(pool.page_size)
        of = dict(zip(old.tolist(), fresh.tolist(), strict=True))
        made = contents.in_pages(every, np.array([of.get(page, page) for page in every.tolist()], np.int64))
        ends = np.cumsum(spans.counts(table))
        for start in range(0, len(table), SPANS_AT_ONCE):
            part = table[start : start + SPANS_AT_ONCE]
            first, last = ends[start] - spans.counts(part[:1])[0], ends[start + len(part) - 1]
            target = made.table[start : start + SPANS_AT_ONCE]
            for group in groups:
                _turn(pool, group, contents.cut(first, last), target, distance)
    except BaseException:
        pool.release(fresh)
        raise
    made.table[:, POSITION] += distance
    heads = None if made.head_positions is None else made.head_positions + distance
    pending = contents.tail if contents.tail is not None and contents.tail.pending is not None else None
    unknown = (Stretch(len(contents), None, NOTHING),)
    return replace(made, stretches=unknown, tail=pending, head_positions=heads), fresh


def _turn(pool: PagePool, group: int, source: EntryTable, target: np.ndarray, distance: int) -> None:
    """Write the entries of a group into the spans of `target`, with K turned on by a distance."""
    geometry, (pages, slots) = pool.geometry, spans.places(source.table, group)
    held = pages != spans.NO_PAGE
    entries = read_entries(pool, group, pages[held], slots[held])
    for layer, own in zip(geometry.groups[group].layers, entries, strict=True):
        stored, _ = geometry.stored.sides(own)
        keys = geometry.stored.decode_keys(stored).astype(np.float32)
        positions = source.positions_by_head(len(geometry.kv_layers), 1)[held, geometry.kv_layers.index(layer)]
        stored[:] = geometry.stored.encode_keys(turned_on(geometry.rope_of(layer), keys, positions, distance))
    write_entries(pool, group, spans.places(target, group)[0][held], slots[held], entries)


def converted(source: PagePool, contents: EntryTable, target: PagePool) -> tuple[EntryTable, np.ndarray]:
    """The entries in pages of `target`, and these fresh pages, each with a reference for the caller.

    Slots stay the same, page by page. Nothing is canonical any more.

    Raises:
        GeometryMismatch: more than the format differs. KVError: page sizes differ, or layers have states, whose
            snapshots lie in pages of another size. OutOfPages, PageLost: nothing has changed.
    """
    own, theirs = target.geometry, source.geometry
    own.require(replace(theirs, kv_dtype=own.kv_dtype), "this value cannot be converted")
    if own.states:
        raise KVError("a value of a model with recurrent layers cannot be converted: prefill its tokens there")
    require_page_size(target, source.page_size)
    pages, stops = contents.pages_and_stops(source.page_size)
    groups = source.group_of[pages]
    fresh = zeroed_pages(target, groups, stops)
    try:
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            for start in range(0, len(places), PAGES_AT_ONCE):
                some = places[start : start + PAGES_AT_ONCE]
                slots = np.concatenate([np.arange(stop) for stop in stops[some]])
                entries = read_entries(source, group, np.repeat(pages[some], stops[some]), slots)
                entries = own.stored.encode(theirs.stored.decode(entries))
                write_entries(target, group, np.repeat(fresh[some], stops[some]), slots, entries)
        unknown = (Stretch(len(contents), None, NOTHING),) if len(contents) else ()
        return replace(contents.in_pages(pages, fresh), stretches=unknown), fresh
    except BaseException:
        target.release(fresh)
        raise
