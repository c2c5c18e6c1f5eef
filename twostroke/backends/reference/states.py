"""Layers with a state in PyTorch (`models.recurrent`): what all kinds do, and short convolutions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.interface import PAGE, START, STOP
from twostroke.backends.reference.operations import DenseWeight, Operations, TensorBatch
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import StatePages, entry_places


class StateWeights(NamedTuple):
    """A layer's tensors: the projections of its inputs together, and float32 vectors by name."""

    inputs: DenseWeight
    vectors: Mapping[str, torch.Tensor]


class SequenceStep(NamedTuple):
    """A sequence's part of a step: what the projections made of its rows, and where its entries are.

    `own`: its rows of the batch; `since`: the number of entries between the snapshot and these rows.
    """

    made: torch.Tensor
    positions: torch.Tensor
    table: np.ndarray
    since: int
    kv: Sequence[torch.Tensor]
    batch: TensorBatch
    own: slice


class StateLayer(ABC):
    """What takes the place of attention in a layer with a state."""

    def __init__(self, config: ModelConfig, index: int, operations: Operations, weights: StateWeights) -> None:
        self.shape, self.eps = config.state_layers[index], config.norm_eps
        self.operations, self.weights, self.index, self.layers = operations, weights, index, config.state_layers
        self.inputs = entry_places(config, operations.stored.name, "inputs")[index]

    def __call__(
        self, h: torch.Tensor, kv: Sequence[torch.Tensor], snapshots: torch.Tensor, batch: TensorBatch
    ) -> torch.Tensor:
        """[N, hidden] -> [N, heads of v * v_dim], before the output projection. `snapshots`: `state_storage`."""
        made = self.operations.linear(h, self.weights.inputs)
        mixed, inputs = self._mixed(made), entries_at(kv, self.inputs)
        self._keep(inputs, batch, self.inputs[0], mixed)
        out = torch.empty(len(h), self.shape.v_size, device=h.device)
        for i, step in enumerate(batch.states):
            own = slice(batch.row_starts[i], batch.row_starts[i + 1])
            state, before = self._load(snapshots, step.source)
            seen = self._seen(mixed[own], inputs, before, batch.tables[i], step.rows)
            part = SequenceStep(made[own], batch.positions[own], batch.tables[i], step.rows, kv, batch, own)
            out[own], reached = self._run(seen, state, part)
            for count, frames in step.targets:
                last = seen[count : count + self.shape.conv_width - 1]
                self._store(snapshots, frames, reached.get(count, state), last)
        return self._gated(out, made).to(h.dtype)

    @abstractmethod
    def _mixed(self, made: torch.Tensor) -> torch.Tensor:
        """The inputs of the convolution, [N, conv_size]."""

    @abstractmethod
    def _run(
        self, seen: torch.Tensor, state: torch.Tensor, step: SequenceStep
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run a sequence's rows, and keep theirs.

        Returns (their outputs [n, v_size], the states at the ends of chunks by the number of rows before).
        """

    @abstractmethod
    def _gated(self, out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Outputs [N, v_size] after the layer's norm and gate."""

    def _convolved(self, seen: torch.Tensor) -> torch.Tensor:
        """[conv_width - 1 + n, conv_size] -> [n, conv_size]."""
        kernel, bias = self.weights.vectors["conv"][:, None], self.weights.vectors.get("conv_bias")
        return F.conv1d(seen.T[None], kernel, bias, groups=self.shape.conv_size)[0].T

    def _keep(
        self, storage: torch.Tensor, batch: TensorBatch, group: int, entries: torch.Tensor, own: slice = slice(None)
    ) -> None:
        """Write entries [n, values] to their pages, [frames, page_size, values], where they have one."""
        pages, slots = batch.pages[group][own], batch.slots[own]
        kept = pages >= 0
        storage[pages[kept], slots[kept]] = entries[kept].to(storage.dtype)

    def _seen(
        self, mixed: torch.Tensor, inputs: torch.Tensor, before: torch.Tensor, table: np.ndarray, since: int
    ) -> torch.Tensor:
        """The inputs of the convolution, [conv_width - 1 + n, conv_size] float32; `since`: entries after `before`."""
        count = self.shape.conv_width - 1
        pages, slots = places(table, self.inputs[0], len(mixed), min(count, since))
        seen = torch.cat([inputs[pages, slots], mixed.to(inputs.dtype)]).float()
        return torch.cat([before[len(pages) :], seen])

    # Snapshots -------------------------------------------------------------------------------------------------

    def _load(self, snapshots: torch.Tensor, frames: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's state [heads of v, k_dim, v_dim] in a snapshot, and the convolution's inputs before it."""
        shape = self.shape
        if len(frames):
            own, size = self._own(snapshots, frames)
            numbers = snapshots[own, :size].reshape(-1)[: shape.snapshot_values]
        else:
            numbers = torch.zeros(shape.snapshot_values, device=snapshots.device)
        state, inputs = numbers.split([shape.state_values, shape.snapshot_values - shape.state_values])
        return state.view(shape.num_v_heads, shape.k_dim, shape.v_dim), inputs.view(-1, shape.conv_size)

    def _store(self, snapshots: torch.Tensor, frames: np.ndarray, state: torch.Tensor, inputs: torch.Tensor) -> None:
        own, size = self._own(snapshots, frames)
        numbers = torch.cat([state.flatten(), inputs.flatten()])
        padded = F.pad(numbers, (0, len(own) * size - self.shape.snapshot_values))
        snapshots[own, :size] = padded.view(len(own), size)

    def _own(self, snapshots: torch.Tensor, frames: np.ndarray) -> tuple[torch.Tensor, int]:
        """The layer's frames of a snapshot, and the numbers in each."""
        places = StatePages(self.layers, 4 * snapshots.shape[1])
        first = places.starts[self.index]
        own = frames[first : first + places.num_pages_of(self.index)].astype(np.int64)
        return torch.from_numpy(own).to(snapshots.device), places.rows_in_page(self.index) * self.shape.snapshot_row


class ShortConvolutionLayer(StateLayer):
    """`models.recurrent.ShortConvolution`."""

    def _mixed(self, made: torch.Tensor) -> torch.Tensor:
        b, _, x = made.chunk(3, 1)
        return b * x

    def _run(
        self, seen: torch.Tensor, state: torch.Tensor, step: SequenceStep
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return self._convolved(seen), {}

    def _gated(self, out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return out * made.chunk(3, 1)[1].float()


def entries_at(kv: Sequence[torch.Tensor], place: tuple[int, int]) -> torch.Tensor:
    """A layer's entries of a kind that is neither K nor V, [frames, page_size, values]."""
    return kv[place[0]][place[1], 0, :, 0]


def places(table: np.ndarray, group: int, new: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and slots of the `count` entries before the last `new` ones of a table, or of as many as there are."""
    sizes = table[:, STOP] - table[:, START]
    starts = np.cumsum(sizes) - sizes
    last = int(sizes.sum()) - new
    order = np.arange(max(0, last - count), last)
    span = np.searchsorted(starts, order, side="right") - 1
    frames, slots = table[span, PAGE + group], order - starts[span] + table[span, START]
    return torch.from_numpy(frames.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
