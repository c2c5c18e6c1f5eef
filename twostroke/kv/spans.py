"""Operations on span tables, [P, 4] int32, which say which slots of which pages hold a value's entries."""

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP


def counts(table: np.ndarray) -> np.ndarray:
    """Number of entries in each span, [P]."""
    return table[:, STOP] - table[:, START]


def end_position(table: np.ndarray) -> int:
    """The position after the last entry."""
    _, start, stop, position = table[-1].tolist()
    return position + stop - start


def positions(table: np.ndarray) -> np.ndarray:
    """The position of each entry, [n]; positions within a span are contiguous."""
    sizes = counts(table)
    starts = np.cumsum(sizes) - sizes
    return np.repeat(table[:, POSITION] - starts, sizes) + np.arange(sizes.sum())


def pages_and_slots(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The page and the slot of each entry, [n] each."""
    sizes = counts(table)
    starts = np.cumsum(sizes) - sizes
    slots = np.repeat(table[:, START] - starts, sizes) + np.arange(sizes.sum())
    return np.repeat(table[:, PAGE], sizes), slots


def distinct_pages(table: np.ndarray) -> np.ndarray:
    """Each page once, in order of first use."""
    pages, first = np.unique(table[:, PAGE], return_index=True)
    return pages[np.argsort(first)]


def pages_only(pages: np.ndarray) -> np.ndarray:
    """A table that names pages and no slots, for what holds pages without reading entries."""
    table = np.zeros((len(pages), 4), np.int32)
    table[:, PAGE] = pages
    return table


def with_pages(table: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """A copy of the table with page old[i] replaced by new[i]. `old` holds each page of the table once."""
    order = np.argsort(old)
    moved = table.copy()
    moved[:, PAGE] = new[order[np.searchsorted(old, table[:, PAGE], sorter=order)]]
    return moved


def slot_stops(table: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """For each of the distinct `pages`, the last slot that the table uses, plus one."""
    where = np.argsort(pages)
    stops = np.zeros(len(pages), np.int64)
    np.maximum.at(stops, where[np.searchsorted(pages, table[:, PAGE], sorter=where)], table[:, STOP])
    return stops


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
