"""Values in which each head holds other entries, as techniques choose them that drop entries by head.

Slot j of a head has its j-th entry, so slots lie in pages as entries do, and kernels attend to them as to any others.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, STOP
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable
from twostroke.kv.geometry import Geometry
from twostroke.kv.page_contents import read_entries, write_entries, zeroed_pages
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch

NO_ENTRY = -1  # in place of an index: an empty slot
SLOTS_AT_ONCE = 256  # whose entries are read together


def require_heads(geometry: Geometry) -> tuple[int, int]:
    """Layers with K and V of their own, and KV heads. Raises KVError if heads cannot hold different entries."""
    if geometry.windowed:
        raise KVError(
            "entries by head need a model whose layers attend to all entries: windows and states go by positions, "
            "which heads would not share"
        )
    if len({group.num_kv_heads * group.head_dim for _, group in geometry.kv_groups}) > 1 or geometry.kv_heads is None:
        raise KVError("entries by head need a model whose layers have K and V of one shape")
    return len(geometry.kv_layers), geometry.kv_heads


def require_parts(geometry: Geometry) -> None:
    """Raise KVError if K and V are one vector."""
    if any(group.one_part for _, group in geometry.kv_groups):
        raise KVError("K and V of latent attention are one vector for all heads, so a technique cannot make them apart")


def checked_indices(geometry: Geometry, length: int, indices: np.ndarray) -> np.ndarray:
    """[layers, KV heads, n] int64. Raises KVError unless they choose among so many entries of such a model.

    A head may begin with NO_ENTRY, but not consist of it.
    """
    (layers, heads), chosen = require_heads(geometry), np.asarray(indices)
    if chosen.ndim != 3 or chosen.shape[:2] != (layers, heads) or not np.issubdtype(chosen.dtype, np.integer):
        raise KVError(
            f"indices are integers of shape [layers, KV heads, n], here [{layers}, {heads}, n], not "
            f"{chosen.dtype} {list(chosen.shape)}"
        )
    if chosen.size and (chosen.min() < NO_ENTRY or chosen.max() >= length):
        raise KVError(f"indices are from 0 to {length - 1}, not {chosen.min()} to {chosen.max()}")
    if chosen.size and (chosen[..., -1] == NO_ENTRY).any():
        raise KVError("each head needs an entry at its end: empty slots come before all others")
    if ((np.diff(chosen, axis=-1) <= 0) & (chosen[..., :-1] != NO_ENTRY)).any():
        raise KVError("the indices of each head must rise, so that positions do")
    return chosen.astype(np.int64)


def gathered(pool: PagePool, contents: EntryTable, indices: np.ndarray) -> tuple[EntryTable, np.ndarray]:
    """The entries that `indices` choose, at least one a head, and their fresh pages, each with a reference.

    An empty slot has the first entry of its head, which the head does not see there, and a position before it.

    Raises OutOfPages or PageLost: nothing has changed.
    """
    empty = indices == NO_ENTRY
    num_empty = empty.sum(-1, keepdims=True)
    indices = np.where(empty, np.take_along_axis(indices, num_empty, -1), indices)
    positions = contents.positions_by_head(*indices.shape[:2])
    before = np.maximum(num_empty - np.arange(indices.shape[-1]), 0)
    positions = np.take_along_axis(positions, indices.transpose(2, 0, 1), 0)
    positions = np.maximum(positions - before.transpose(2, 0, 1), 0).astype(np.int32)
    tokens = contents.tokens[indices[0, 0]]
    bias = contents.bias
    if bias is not None:
        bias = np.take_along_axis(bias, indices.transpose(2, 0, 1), 0)
    if empty.any():
        hidden = empty.transpose(2, 0, 1)
        bias = np.where(hidden, np.float32(-np.inf), np.float32(0) if bias is None else bias)
    made, fresh = placed(
        pool, positions, tokens, lambda group, part: _chosen(pool, group, contents.table, indices[..., part]), bias
    )
    at_end = int(positions.max()) == spans.end_position(contents.table) - 1
    whole = bool((indices[..., -1] == len(contents) - 1).all())
    next_position = contents.next_position if at_end else made.next_position
    return replace(made, next_position=next_position, tail=contents.tail if whole else None), fresh


def placed(
    pool: PagePool,
    positions: np.ndarray,
    tokens: np.ndarray,
    entries: Callable[[int, slice], np.ndarray],
    bias: np.ndarray | None = None,
) -> tuple[EntryTable, np.ndarray]:
    """Entries by head in slots one after another, and their fresh pages, each with a reference.

    Slots get adjacent positions, of which the last is that of the last entry of any head. So none comes before an
    entry that it holds. A group of layers has no page where its heads see none of the slots.

    Args:
        positions: [n, layers, KV heads] int32, n at least 1; tokens: [n] int32.
        entries: gives the entries of a group of layers in some slots, as `read_entries` does.
        bias: [n, layers, KV heads] float32; None: 0.

    Raises OutOfPages, or what `entries` raises: nothing has changed.
    """
    count, size = len(positions), pool.page_size
    table = spans.empty(pool.num_groups, -(-count // size))
    first = size * np.arange(len(table))
    table[:, STOP] = np.minimum(size, count - first)
    table[:, POSITION] = max(0, int(positions.max()) - (count - 1)) + first
    unknown = (Stretch(count, None, NOTHING),)
    made = EntryTable(table, tokens, unknown, spans.end_position(table), head_positions=positions, bias=bias)
    kept = ~pool.geometry.unseen(made) | (pool.num_groups == 1)
    of_span, groups = np.nonzero(kept)
    fresh = zeroed_pages(pool, groups, table[of_span, STOP])
    table[:, PAGE:] = spans.NO_PAGE
    table[of_span, PAGE + groups] = fresh
    try:
        for start in range(0, count, SLOTS_AT_ONCE):
            part = slice(start, start + SLOTS_AT_ONCE)
            for group in range(pool.num_groups):
                pages, slots = (of[part] for of in spans.places(table, group))
                if (held := pages != spans.NO_PAGE).any():
                    write_entries(pool, group, pages[held], slots[held], entries(group, part)[:, :, held])
    except BaseException:
        pool.release(fresh)
        raise
    return made, fresh


def written(
    pool: PagePool, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, tokens: np.ndarray
) -> tuple[EntryTable, np.ndarray]:
    """Entries that a technique has made (`KVCache.of_entries`), and their fresh pages, each with a reference.

    Raises KVError: they are none of this model. OutOfPages: nothing has changed.
    """
    geometry = pool.geometry
    require_parts(geometry)
    shape = (*require_heads(geometry), len(tokens), geometry.kv_groups[0][1].head_dim)
    if np.shape(keys) != shape or np.shape(values) != shape:
        raise KVError(
            f"keys and values have the shape [layers, KV heads, n, head_dim], here {list(shape)}, not "
            f"{list(np.shape(keys))} and {list(np.shape(values))}"
        )
    if not np.issubdtype(positions.dtype, np.integer) or positions.shape not in (shape[2:3], shape[:3]):
        raise KVError(f"positions are integers of shape [n] or [layers, KV heads, n], here {list(shape[:3])}")
    if positions.min() < 0 or positions.max() >= pool.max_position or (np.diff(positions, axis=-1) <= 0).any():
        raise KVError(f"positions of each head rise, from 0 to {pool.max_position - 1} at most")
    both = np.stack([keys, values], 1).astype(np.float32)  # [layers, 2, heads, n, head_dim]
    if not np.isfinite(both).all():
        raise KVError("keys and values must be finite")

    def entries(group: int, part: slice) -> np.ndarray:
        own = [geometry.kv_layers.index(layer) for layer in geometry.groups[group].layers]
        return geometry.stored.encode(both[own][:, :, :, part].swapaxes(2, 3))

    by_head = np.broadcast_to(positions, shape[:3]).transpose(2, 0, 1).astype(np.int32)
    return placed(pool, by_head, tokens, entries)


def biased(pool: PagePool, contents: EntryTable, bias: np.ndarray) -> EntryTable:
    """The entries with this bias, [layers, KV heads, n], in place of what they have. Nothing is canonical any more.

    Raises KVError: it is none of this model.
    """
    shape, given = (*require_heads(pool.geometry), len(contents)), np.asarray(bias)
    if given.shape != shape or not np.issubdtype(given.dtype, np.floating):
        raise KVError(
            f"a bias is floats of shape [layers, KV heads, n], here {list(shape)}, not {given.dtype} "
            f"{list(given.shape)}"
        )
    with np.errstate(over="ignore"):
        by_entry = given.transpose(2, 0, 1).astype(np.float32)
    if not (by_entry < np.inf).all():
        raise KVError("a bias is a finite number (float32), or -inf for an entry that a head does not see")
    tail = contents.tail if contents.tail is not None and contents.tail.pending is not None else None
    unknown = (Stretch(len(contents), None, NOTHING),) if len(contents) else ()
    made = replace(contents, bias=by_entry, stretches=unknown, tail=tail)
    if not pool.geometry.complete(made):
        raise KVError("this bias shows entries that heads did not see, and that were not kept: give it -inf there")
    return made


def _chosen(pool: PagePool, group: int, table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Entries of a group as they are stored, [layers, 2, n, Hkv, width]."""
    own = [pool.geometry.kv_layers.index(layer) for layer in pool.geometry.groups[group].layers]
    needed = np.unique(indices[own])
    pages, slots = spans.places(table, group)
    entries = read_entries(pool, group, pages[needed], slots[needed])
    places = np.searchsorted(needed, indices[own]).transpose(0, 2, 1)[:, None, :, :, None]
    bits = entries.view(f"u{entries.itemsize}")  # numpy copies unknown dtypes (bfloat16) one element at a time
    bits[:, :, pages[needed] == spans.NO_PAGE] = 0  # nobody sees them, nor will here
    return np.take_along_axis(bits, places, 2).view(entries.dtype)
