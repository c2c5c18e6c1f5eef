"""Snapshots of the states of recurrent layers, and the rows between them (`models.recurrent`).

A snapshot has pages of its own, in which no slot is ever written again. Between snapshots the rows of tokens, which are
entries as K and V are, say how each token changes a state. So the state after any token is known where the last
snapshot before it and all rows since then are there, and what is cut from the end costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twostroke.backends.interface import StateStep
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable, StateSnapshot, snapshot_before
from twostroke.kv.page_contents import read_entries, reading
from twostroke.kv.pool import PagePool
from twostroke.models.formats.tensor import exponential
from twostroke.models.layer_groups import EntryKind
from twostroke.models.recurrent import LinearAttention, RecurrentMixer


def needed_snapshots(snapshots: Sequence[StateSnapshot], length: int) -> tuple[StateSnapshot, ...]:
    """The last snapshot of at most `length` entries, and those behind it."""
    first = snapshot_before(snapshots, length)
    return tuple(one for one in snapshots if first is None or one.at >= first.at)


def num_snapshots(pool: PagePool) -> int:
    """Number of snapshots in the pool, of running sequences, values and the prefix index. Needs no lock."""
    states = (pool.group_of == pool.num_groups) & (pool.references.in_pool > 0)
    return int(np.count_nonzero(states)) // pool.snapshot_pages if pool.snapshot_pages else 0


class OpenStates:
    """The snapshots of an open writer, and those that its next tokens will make."""

    def __init__(self, pool: PagePool, snapshots: Sequence[StateSnapshot], length: int, parting: int) -> None:
        # parting: a position whose snapshot is kept besides, for others that part there; 0: none
        self._pool, self.parting = pool, parting
        self.snapshots = list(needed_snapshots(snapshots, length))

    @property
    def pages(self) -> list[int]:
        return [page for one in self.snapshots for page in one.pages.tolist()]

    def boundaries(self, position: int, count: int, kept_from: int) -> list[int]:
        """The positions before which states will be kept, when `count` tokens from `position` on are entered.

        All that a value may need that ends at `kept_from` or later, but no others.
        """
        chunk = self._pool.geometry.chunk
        first = max(position + 1, kept_from // chunk * chunk)
        needed = list(range(-(-first // chunk) * chunk, position + count + 1, chunk))
        return [self.parting, *needed] if position < self.parting < first else needed

    def allocate(self, boundaries: Sequence[int]) -> list[int]:
        """Pages for snapshots before these positions. Raises OutOfPages: none is taken."""
        pages = self._pool.allocate(self._pool.snapshot_pages * len(boundaries), self._pool.num_groups)
        self._pool.claim_fresh(pages, np.full(len(pages), self._pool.page_size))
        return pages

    def step(self, length: int, position: int, boundaries: Sequence[int], pages: Sequence[int]) -> StateStep:
        """What a step reads and writes that enters tokens behind `length` entries, from `position` on."""
        source = snapshot_before(self.snapshots, length)
        assert source is not None, "a writer begins with a known state"
        targets: list[tuple[int, np.ndarray]] = []
        for i, boundary in enumerate(boundaries):
            own = np.array(pages[i * self._pool.snapshot_pages : (i + 1) * self._pool.snapshot_pages], np.int32)
            self.snapshots.append(StateSnapshot(length + boundary - position, own))
            targets.append((boundary - position, self._pool.frames_of(own)))
        return StateStep(length - source.at, self._pool.frames_of(source.pages), targets)

    def forget_before(self, length: int) -> list[int]:
        """Drop the snapshots that no value of `length` entries or more needs. Returns their pages."""
        needed = needed_snapshots(self.snapshots, length)
        kept = [one for one in self.snapshots if one in needed or one.at == self.parting]
        gone = [page for one in self.snapshots if one not in kept for page in one.pages.tolist()]
        self.snapshots = list(kept)
        return gone

    def truncate(self, length: int) -> list[int]:
        """Drop the snapshots of more than `length` entries. Returns their pages."""
        gone = [page for one in self.snapshots if one.at > length for page in one.pages.tolist()]
        self.snapshots = [one for one in self.snapshots if one.at <= length]
        return gone


# The state at the end of a value --------------------------------------------------------------------------------


def closed(pool: PagePool, contents: EntryTable) -> tuple[EntryTable, np.ndarray]:
    """The entries with a snapshot at their end alone, and its fresh pages, each with a reference for the caller.

    For values that lose rows at their front, or go on at another position. Without a state that is known, none is left.
    Raises OutOfPages or PageLost.
    """
    length, source = len(contents), contents.last_snapshot
    nothing = np.zeros(0, np.int64)
    if source is not None and source.at == length:
        return replace(contents, snapshots=(source,)), nothing
    if (states := states_behind(pool, contents)) is None:
        return replace(contents, snapshots=()), nothing
    pages = _write_states(pool, states)
    return replace(contents, snapshots=(StateSnapshot(length, pages.astype(np.int32)),)), pages


def states_behind(pool: PagePool, contents: EntryTable) -> "dict[int, LayerState] | None":
    """The state of each layer behind the last entry; None if it is not known. Raises PageLost."""
    length, source = len(contents), contents.last_snapshot
    if source is None or not pool.geometry.known_state(contents):
        return None
    states, rows = read_states(pool, source), contents.cut(source.at, length)
    if source.at == length:
        return states
    shapes = dict(pool.geometry.states)
    for g, group in enumerate(pool.geometry.groups):
        if group.kind == "kv":
            continue
        entries = read_entries(pool, g, *spans.places(rows.table, g))[:, 0, :, 0]
        for layer, own in zip(group.layers, entries, strict=True):
            states[layer] = states[layer].behind(shapes[layer], group.kind, own)
    return states


@dataclass(frozen=True)
class LayerState:
    """A layer's part of a snapshot, float32."""

    state: np.ndarray  # [heads of v, k_dim, v_dim]
    inputs: np.ndarray  # [conv_width - 1, conv_size], those of the convolution that later tokens see

    @classmethod
    def of(cls, shape: RecurrentMixer, numbers: np.ndarray) -> "LayerState":
        """Take it apart."""
        state, inputs = np.split(numbers[: shape.snapshot_values].copy(), [shape.state_values])
        return cls(state.reshape(shape.num_v_heads, shape.k_dim, shape.v_dim), inputs.reshape(-1, shape.conv_size))

    def behind(self, shape: RecurrentMixer, kind: EntryKind, entries: np.ndarray) -> "LayerState":
        """What it is behind entries of one kind, [n, values]."""
        if kind == "rows":
            return replace(self, state=_advanced(shape, self.state, entries))
        return replace(self, inputs=np.concatenate([self.inputs, entries.astype(np.float32)])[-len(self.inputs) :])


def read_states(pool: PagePool, snapshot: StateSnapshot) -> dict[int, LayerState]:
    """The part of each layer. Raises PageLost."""
    places, found = pool.geometry.state_pages(pool.page_size), dict[int, LayerState]()
    if not len(snapshot.pages):
        zeros = {layer: np.zeros(shape.snapshot_values, np.float32) for layer, shape in pool.geometry.states}
        return {layer: LayerState.of(shape, zeros[layer]) for layer, shape in pool.geometry.states}
    with reading(pool, snapshot.pages, np.full(len(snapshot.pages), pool.page_size)) as sources:
        data = [np.frombuffer(source.data(), np.uint8).copy() for source in sources]
    for layer, shape in pool.geometry.states:
        first, size = places.starts[layer], places.rows_in_page(layer) * 4 * shape.snapshot_row
        rows = [page[:size] for page in data[first : first + places.num_pages_of(layer)]]
        found[layer] = LayerState.of(shape, np.concatenate(rows).view(np.float32))
    return found


def _write_states(pool: PagePool, states: dict[int, LayerState]) -> np.ndarray:
    places = pool.geometry.state_pages(pool.page_size)
    pool.make_room(places.num_pages, collect=True)
    pages = pool.allocate(places.num_pages, pool.num_groups)
    for layer, shape in pool.geometry.states:
        size, own = places.rows_in_page(layer) * shape.snapshot_row, states[layer]
        numbers = np.concatenate([own.state.reshape(-1), own.inputs.reshape(-1)]).astype(np.float32)
        for i in range(places.num_pages_of(layer)):
            data, part = np.zeros(pool.page_bytes, np.uint8), numbers[i * size : (i + 1) * size]
            data[: part.nbytes] = part.view(np.uint8)
            pool.put(pages[places.starts[layer] + i], data.data, pool.page_size)
    return np.array(pages, np.int64)


def _advanced(state: RecurrentMixer, before: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The state after rows [n, row_values]: its decay to their end, plus the decayed products of k and u.

    Row after row, for the same bits on every processor: NumPy's `einsum` has other last bits on others.
    """
    keys, written, decays = split_rows(state, rows)
    left = exponential(decays[-1] - decays)  # [n, heads of v]
    count = state.num_v_heads // state.num_k_heads
    keys = (np.tile(keys, (1, count, 1)) if state.tiled else keys.repeat(count, 1)) * left[:, :, None]
    after = before * exponential(decays[-1])[:, None, None]
    for key, u in zip(keys, written, strict=True):
        after += key[:, :, None] * u[:, None, :]
    return after


def split_rows(state: RecurrentMixer, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """k [n, heads of k, k_dim], u [n, heads of v, v_dim] and the sums of log decays [n, heads of v], all float32."""
    assert isinstance(state, LinearAttention), "others have no rows"
    own, decays = np.split(rows, [state.k_size + state.v_size], 1)
    keys, written = np.split(own[:, np.argsort(state.row_order)], [state.k_size], 1)
    whole = np.ascontiguousarray(decays).view(np.float32)[:, : state.num_v_heads]
    keys = keys.astype(np.float32).reshape(-1, state.num_k_heads, state.k_dim)
    return keys, written.astype(np.float32).reshape(-1, state.num_v_heads, state.v_dim), whole
