"""Gated DeltaNet in PyTorch (`models.config.GatedDeltaNet`), by the closed form of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.interface import PAGE, START, STOP
from twostroke.backends.reference.operations import DenseWeight, Operations, TensorBatch
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import StatePages, entry_places

NORM_EPS = 1e-6  # of the norms of q and k


@dataclass(frozen=True)
class StateWeights:
    """A layer's tensors: the projections of its inputs together, float32 vectors, and the convolution's [C, width]."""

    inputs: DenseWeight
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor


class StateLayer:
    """What takes the place of attention in a layer with a state."""

    def __init__(self, config: ModelConfig, index: int, operations: Operations, weights: StateWeights) -> None:
        self.shape, self.eps = config.state_layers[index], config.norm_eps
        self.operations, self.weights, self.index, self.layers = operations, weights, index, config.state_layers
        self.rows, self.inputs = (
            entry_places(config, operations.stored.name, kind)[index] for kind in ("rows", "inputs")
        )

    def __call__(
        self, h: torch.Tensor, kv: Sequence[torch.Tensor], snapshots: torch.Tensor, batch: TensorBatch
    ) -> torch.Tensor:
        """[N, hidden] -> [N, heads of v * v_dim], before the output projection. `snapshots`: `state_storage`."""
        shape, sizes = self.shape, list(self.shape.projections.values())
        made = self.operations.linear(h, self.weights.inputs)
        mixed, z, b, a = made.split([shape.conv_size, *sizes[3:]], 1)
        inputs, rows = kv[self.inputs[0]][self.inputs[1], 0, :, 0], kv[self.rows[0]][self.rows[1], 0, :, 0]
        self._keep(inputs, batch, self.inputs[0], mixed)
        write = torch.sigmoid(b.float())
        log_decay = -self.weights.decay * F.softplus(a.float() + self.weights.dt_bias)
        out = torch.empty(len(h), shape.num_v_heads, shape.v_dim, device=h.device)
        for i, step in enumerate(batch.states):
            own = slice(batch.row_starts[i], batch.row_starts[i + 1])
            state, before = self._load(snapshots, step.source)
            seen = self._seen(mixed[own], inputs, before, batch.tables[i], step.rows)
            q, k, v = self._convolved(seen)
            k = k.to(rows.dtype).float()
            known = self._known(rows, batch.tables[i], step.rows, own.stop - own.start)
            found, new, reached = self._run(q, k, v, write[own], log_decay[own], known, state, batch.positions[own])
            for count, frames in step.targets:
                self._store(snapshots, frames, reached[count], seen[count : count + shape.conv_width - 1])
            out[own] = found
            self._keep(rows, batch, self.rows[0], new, own)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.eps) * self.weights.norm
        gated = normed * F.silu(z.float().view_as(out))
        return gated.flatten(1).to(h.dtype)

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
        pages, slots = _places(table, self.inputs[0], len(mixed), min(count, since))
        seen = torch.cat([inputs[pages, slots], mixed.to(inputs.dtype)]).float()
        return torch.cat([before[len(pages) :], seen])

    def _convolved(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k of norm 1, and v, [n, heads, dim] float32, of a sequence's rows."""
        shape = self.shape
        found = F.silu(F.conv1d(seen.T[None], self.weights.conv[:, None], groups=shape.conv_size)[0].T)
        q, k, v = found.split([shape.k_size, shape.k_size, shape.v_size], 1)
        q, k = (one.unflatten(1, (shape.num_k_heads, shape.k_dim)) for one in (q, k))
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + NORM_EPS) for one in (q, k))
        return q * shape.k_dim**-0.5, k, v.unflatten(1, (shape.num_v_heads, shape.v_dim))

    def _known(self, rows: torch.Tensor, table: np.ndarray, count: int, new: int) -> tuple[torch.Tensor, ...]:
        """k, u and the sums of log decays of the rows since the snapshot."""
        shape = self.shape
        found = rows[_places(table, self.rows[0], new, count)]
        k, u, sums = found.split([shape.k_size, shape.v_size, 2 * shape.num_v_heads], 1)
        sums = sums.contiguous().view(torch.float32)[:, : shape.num_v_heads]
        k = k.float().unflatten(1, (shape.num_k_heads, shape.k_dim))
        return k, u.float().unflatten(1, (shape.num_v_heads, shape.v_dim)), sums

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        write: torch.Tensor,
        log_decay: torch.Tensor,
        known: tuple[torch.Tensor, ...],
        state: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """Run a sequence's rows.

        Returns (their outputs [n, heads of v, v_dim], the rows to keep [n, row_values], the states at the ends of
        chunks by the number of rows before).
        """
        outs, kept, reached = list[torch.Tensor](), list[torch.Tensor](), dict[int, torch.Tensor]()
        old_k, old_u, old_sums = known
        start = 0
        while start < len(q):
            stop = min(len(q), start + self.shape.chunk - int(positions[start]) % self.shape.chunk)
            part = slice(start, stop)
            base = old_sums[-1] if len(old_sums) else torch.zeros_like(log_decay[0])
            sums = torch.cat([old_sums, base + log_decay[part].cumsum(0)])
            every_k = torch.cat([old_k, k[part]])
            out, u = self._chunk(q[part], every_k, v[part], write[part], sums, state, old_u)
            every_u = torch.cat([old_u, u])
            outs.append(out)
            kept.append(self._row(k[part], u, sums[len(old_sums) :]))
            if (int(positions[stop - 1]) + 1) % self.shape.chunk == 0:
                reached[stop] = state = self._advanced(state, every_k, every_u, sums)
                old_k, old_u, old_sums = every_k[:0], every_u[:0], sums[:0]
            else:
                old_k, old_u, old_sums = every_k, every_u, sums
            start = stop
        return torch.cat(outs), torch.cat(kept), reached

    def _chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        write: torch.Tensor,
        sums: torch.Tensor,
        state: torch.Tensor,
        known: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and u of the last rows of a chunk; k and sums are of all its rows, and u of the first is known."""
        new, old = len(q), len(known)
        q, k = (self._shared(one).transpose(0, 1) for one in (q, k))  # [heads, rows, dim]
        v, write, sums, known = (one.transpose(0, 1) for one in (v, write, sums, known))
        later = torch.ones(new, old + new, dtype=torch.bool, device=q.device).tril(old)
        decay = torch.where(later, torch.exp((sums[:, old:, None] - sums[:, None, :]).clamp(max=0)), 0.0)
        whole = torch.exp(sums[:, old:, None])  # the decay since the snapshot
        own = k[:, old:]
        among = write[..., None] * decay * (own @ k.transpose(1, 2))
        wanted = write[..., None] * (v - whole * (own @ state)) - among[:, :, :old] @ known
        lower = among[:, :, old:].tril(-1)
        u = torch.linalg.solve_triangular(
            lower + torch.eye(new, device=q.device), wanted, upper=False, unitriangular=True
        )
        seen = decay * (q @ k.transpose(1, 2))
        out = whole * (q @ state) + seen @ torch.cat([known, u], 1)
        return out.transpose(0, 1), u.transpose(0, 1)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """q or k of each head of v, [n, heads of v, k_dim]."""
        count = self.shape.num_v_heads // self.shape.num_k_heads
        return x.repeat(1, count, 1) if self.shape.tiled else x.repeat_interleave(count, 1)

    def _row(self, k: torch.Tensor, u: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.operations.dtype)
        bits = sums.contiguous().view(dtype) if dtype.itemsize == 2 else F.pad(sums, (0, sums.shape[1]))
        return torch.cat([k.flatten(1).to(dtype), u.flatten(1).to(dtype), bits], 1)

    def _advanced(self, state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """The state behind these rows."""
        left = torch.exp(sums[-1] - sums)
        keys = self._shared(k) * left[..., None]
        return torch.exp(sums[-1])[:, None, None] * state + torch.einsum("nhk,nhv->hkv", keys, u)

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
        return torch.from_numpy(own).to(snapshots.device), places.rows_in_page(self.index) * self.shape.v_dim


def _places(table: np.ndarray, group: int, new: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames and slots of the `count` entries before the last `new` ones of a table, or of as many as there are."""
    sizes = table[:, STOP] - table[:, START]
    starts = np.cumsum(sizes) - sizes
    last = int(sizes.sum()) - new
    order = np.arange(max(0, last - count), last)
    span = np.searchsorted(starts, order, side="right") - 1
    frames, slots = table[span, PAGE + group], order - starts[span] + table[span, START]
    return torch.from_numpy(frames.astype(np.int64)), torch.from_numpy(slots.astype(np.int64))
