"""The plan of a pass for layers with a state, as integers: chunks of rows, and snapshots to read and to write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twostroke.backends.interface import START, STOP, RaggedBatch
from twostroke.backends.page_memory import PageMemory

ITEM_FIELDS = 6  # first row, rows, known rows of the chunk, entry of its first, whether it ends, frames of the snapshot
NO_FRAMES = -1


@dataclass(frozen=True)
class StatePass:
    """What layers with a state read and write in a pass. Frames are those of all snapshots, one after another."""

    # storages, snapshots: of `PageMemory`
    storages: Sequence[Any]
    snapshots: torch.Tensor
    # [N, 4] int32: rows of the sequence in this pass before it, entries between the snapshot and the pass, the row's
    # entry among all entries, frames of the snapshot
    rows: torch.Tensor
    items: torch.Tensor  # [chunks, ITEM_FIELDS] int32
    sequences: torch.Tensor  # [S, 3] int32: first chunk, chunks, frames of the snapshot
    targets: torch.Tensor  # [T, 2] int32: the last row before a snapshot that is written, and its frames
    frames: torch.Tensor  # int32


def plan_states(
    batch: RaggedBatch[np.ndarray], chunk: int, memory: PageMemory, there: Callable[[np.ndarray], torch.Tensor]
) -> StatePass:
    """The plan of a batch. `chunk`: positions between snapshots; `there` copies an array to the device."""
    rows = np.zeros((batch.num_rows, 4), np.int32)
    items, sequences, targets = list[list[int]](), list[tuple[int, int, int]](), list[tuple[int, int]]()
    frames = [np.zeros(1, np.int32)]  # kernels look at one where there are none
    held, end = 1, 0

    def add(some: np.ndarray) -> int:
        nonlocal held
        frames.append(some)
        held += len(some)
        return held - len(some)

    for s, step in enumerate(batch.states):
        first, stop = batch.row_starts[s], batch.row_starts[s + 1]
        end += int((batch.tables[s][:, STOP] - batch.tables[s][:, START]).sum())
        source = add(step.source) if len(step.source) else NO_FRAMES
        written = {count: add(own) for count, own in step.targets}
        order = np.arange(stop - first)
        rows[first:stop] = np.stack(np.broadcast_arrays(order, step.rows, end - (stop - first) + order, source), 1)
        targets += [(first + count - 1, own) for count, own in written.items()]
        count, begun, row = len(items), step.rows, first
        while row < stop:
            size = min(stop - row, chunk - int(batch.positions[row]) % chunk)
            ends = (int(batch.positions[row]) + size) % chunk == 0
            own = written.pop(row + size - first, NO_FRAMES)
            items.append([row, size, begun, end - (stop - row) - begun, ends, own])
            row, begun = row + size, 0
        assert not written, "snapshots are at the ends of chunks"
        sequences.append((count, len(items) - count, source))
    chunks, parts, behind = (there(np.array(one, np.int32)) for one in (items, sequences, targets))
    known = there(np.concatenate(frames, dtype=np.int32))
    return StatePass(memory.storages, memory.state_storage, there(rows), chunks, parts, behind, known)
