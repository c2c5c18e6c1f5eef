"""Entries in another number format: decoded, and encoded again for a pool that stores K and V in its own way."""

from dataclasses import replace

import numpy as np

from twostroke.errors import KVError
from twostroke.kv.entries import EntryTable
from twostroke.kv.page_contents import read_entries, require_page_size, write_entries, zeroed_pages
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch

PAGES_AT_ONCE = 64  # whose entries are in memory as numbers


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
