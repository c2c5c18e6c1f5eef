"""Operations on span tables, [P, 3 + groups] int32, which say which slots of which pages hold a value's entries.

A span is a run of entries. It lies in one page of each group of layers, in the same slots of each. It is NO_PAGE where
a windowed group has given its page back, or where no head of a group sees an entry of the span.
"""

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP

NO_PAGE = -1  # in place of a page that nobody reads


def empty(groups: int, spans: int = 0) -> np.ndarray:
    """A table of so many spans, all zeros."""
    return np.zeros((spans, PAGE + groups), np.int32)


def counts(table: np.ndarray) -> np.ndarray:
    """Number of entries in each span, [P]."""
    return table[:, STOP] - table[:, START]


def end_position(table: np.ndarray) -> int:
    """The position after the last entry."""
    start, stop, position = table[-1, :PAGE].tolist()
    return position + stop - start


def positions(table: np.ndarray) -> np.ndarray:
    """The position of each entry, [n]; positions within a span are contiguous."""
    sizes = counts(table)
    starts = np.cumsum(sizes) - sizes
    return np.repeat(table[:, POSITION] - starts, sizes) + np.arange(sizes.sum())


def places(table: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The page of a group, or NO_PAGE, and the slot of each entry, [n] each."""
    sizes = counts(table)
    starts = np.cumsum(sizes) - sizes
    slots = np.repeat(table[:, START] - starts, sizes) + np.arange(sizes.sum())
    return np.repeat(table[:, PAGE + group], sizes), slots


def held(table: np.ndarray) -> np.ndarray:
    """Whether a group has a page for a span, [P, groups]."""
    return table[:, PAGE:] != NO_PAGE


def held_pages(table: np.ndarray) -> np.ndarray:
    """The pages of all spans and groups, span by span; a page may be there more than once."""
    pages = table[:, PAGE:].reshape(-1)
    return pages if not len(pages) or pages.min() != NO_PAGE else pages[pages != NO_PAGE]


def distinct_pages(table: np.ndarray) -> np.ndarray:
    """Each page once, in order of first use."""
    pages, first = np.unique(held_pages(table), return_index=True)
    return pages[np.argsort(first)]


def with_pages(table: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A copy of the table with page old[i] replaced by new[i]. `old` holds each page of the table once."""
    moved = table.copy()
    pages = moved[:, PAGE:]
    held = pages != NO_PAGE
    pages[held] = renumbered(pages[held], old, new)
    return moved


def renumbered(pages: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Pages with new[i] in place of old[i]. `old` holds each of them once."""
    order = np.argsort(old)
    return new[order[np.searchsorted(old, pages, sorter=order)]]


def slot_stops(table: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """For each of the distinct `pages`, the last slot that the table uses, plus one."""
    where = np.argsort(pages)
    stops = np.zeros(len(pages), np.int64)
    each, held = table[:, PAGE:], table[:, PAGE:] != NO_PAGE
    of_each = np.broadcast_to(table[:, STOP, None], each.shape)[held]
    np.maximum.at(stops, where[np.searchsorted(pages, each[held], sorter=where)], of_each)
    return stops


def page_groups(table: np.ndarray, num_pages: int) -> np.ndarray:
    """The group of each page, for a table whose pages are numbered from 0."""
    groups = np.zeros(num_pages, np.int64)
    spans, columns = np.nonzero(table[:, PAGE:] != NO_PAGE)
    groups[table[spans, PAGE + columns]] = columns
    return groups


def used_slots(table: np.ndarray) -> dict[int, tuple[int, np.ndarray]]:
    """For each page, its group and the slots that the table uses, rising."""
    used: dict[int, tuple[int, np.ndarray]] = {}
    for group in range(table.shape[1] - PAGE):
        pages, slots = places(table, group)
        order = np.lexsort((slots, pages))
        pages, slots = pages[order], slots[order]
        starts = np.flatnonzero(np.diff(pages, prepend=-2))
        for page, some in zip(pages[starts].tolist(), np.split(slots, starts[1:]), strict=True) if len(pages) else ():
            if page != NO_PAGE:
                used[page] = group, np.unique(some)
    return used


def cut(table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The spans of entries [start, stop). The first and the last page may be used in part."""
    ends = np.cumsum(counts(table))
    if start >= stop:
        return table[:0]
    first, last = np.searchsorted(ends, [start, stop - 1], side="right")
    part = table[first : last + 1].copy()
    part[-1, STOP] -= ends[last] - stop
    dropped = start - (ends[first] - counts(table)[first])
    part[0, START] += dropped
    part[0, POSITION] += dropped
    return part


def complete(table: np.ndarray, limits: tuple[int | None, ...]) -> bool:
    """Whether every group has its entries behind a position, its limit, or all of them (`Geometry.limits`)."""
    last = table[:, POSITION] + counts(table) - 1
    seen = {limit: slice(None) if limit is None else last > limit for limit in set(limits)}
    return all((table[seen[limit], PAGE + g] != NO_PAGE).all() for g, limit in enumerate(limits))
