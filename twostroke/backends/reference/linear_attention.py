"""Gated DeltaNet and Mamba-2 in PyTorch (`models.recurrent`), by the closed form of a chunk."""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.reference.operations import Operations
from twostroke.backends.reference.states import SequenceStep, StateLayer, StateWeights, entries_at, places
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import entry_places
from twostroke.models.recurrent import LinearAttention

NORM_EPS = 1e-6  # of the norms of q and k


class ChunkRows(NamedTuple):
    """The new rows of a chunk by head of v, and what they meet: `k` is of all its rows, and `known` is u of the first.

    `whole`: the decay since the snapshot; `decay`: since each row of the chunk, [heads, new rows, rows].
    """

    v: torch.Tensor
    write: torch.Tensor
    k: torch.Tensor
    state: torch.Tensor
    whole: torch.Tensor
    decay: torch.Tensor
    known: torch.Tensor


class LinearAttentionLayer(StateLayer):
    """Rows of a chunk attend to one another and to the state before it."""

    def __init__(self, config: ModelConfig, index: int, operations: Operations, weights: StateWeights) -> None:
        super().__init__(config, index, operations, weights)
        assert isinstance(self.shape, LinearAttention), "others have no rows"
        self.rows, self.row_order = entry_places(config, operations.stored.name, "rows")[index], self.shape.row_order

    def _mixed(self, made: torch.Tensor) -> torch.Tensor:
        return made[:, : self.shape.conv_size]

    def _run(
        self, seen: torch.Tensor, state: torch.Tensor, step: SequenceStep
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        rows = entries_at(step.kv, self.rows)
        q, k, v = self._heads(F.silu(self._convolved(seen)))
        k = k.to(rows.dtype).float()
        step_size = F.softplus(step.made[:, -self.shape.num_v_heads :].float() + self.weights.vectors["dt_bias"])
        write, log_decay = self._write(step.made, step_size), -self.weights.vectors["decay"] * step_size
        known = self._known(rows, step.table, step.since, len(q))
        found, new, reached = self._chunks(q, k, v, write, log_decay, known, state, step.positions)
        self._keep(rows, step.batch, self.rows[0], new, step.own)
        return self._skipped(found, v).flatten(1), reached

    def _heads(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, [n, heads, dim] float32, of what the convolution made."""
        shape = self.shape
        q, k, v = found.split([shape.k_size, shape.k_size, shape.v_size], 1)
        q, k = (one.unflatten(1, (shape.num_k_heads, shape.k_dim)) for one in (q, k))
        return q, k, v.unflatten(1, (shape.num_v_heads, shape.v_dim))

    @abstractmethod
    def _write(self, made: torch.Tensor, step_size: torch.Tensor) -> torch.Tensor:
        """How strongly each row writes, [n, heads of v]."""

    def _skipped(self, out: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Outputs, with what goes past the state."""
        return out

    @abstractmethod
    def _written(self, rows: ChunkRows) -> torch.Tensor:
        """u of the new rows of a chunk, [heads, new rows, v_dim]."""

    def _z(self, made: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        return made[:, shape.conv_size : shape.conv_size + shape.v_size].float()

    def _known(self, rows: torch.Tensor, table: np.ndarray, count: int, new: int) -> tuple[torch.Tensor, ...]:
        """k, u and the sums of log decays of the rows since the snapshot."""
        shape = self.shape
        found = rows[places(table, self.rows[0], new, count)]
        own, sums = found.split([shape.k_size + shape.v_size, 2 * shape.num_v_heads], 1)
        k, u = own[:, np.argsort(self.row_order)].split([shape.k_size, shape.v_size], 1)
        sums = sums.contiguous().view(torch.float32)[:, : shape.num_v_heads]
        k = k.float().unflatten(1, (shape.num_k_heads, shape.k_dim))
        return k, u.float().unflatten(1, (shape.num_v_heads, shape.v_dim)), sums

    def _chunks(
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
        u = self._written(ChunkRows(v, write, k, state, whole, decay, known))
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
        own = torch.cat([k.flatten(1).to(dtype), u.flatten(1).to(dtype)], 1)
        return torch.cat([own[:, self.row_order], bits], 1)

    def _advanced(self, state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """The state behind these rows."""
        left = torch.exp(sums[-1] - sums)
        keys = self._shared(k) * left[..., None]
        return torch.exp(sums[-1])[:, None, None] * state + torch.einsum("nhk,nhv->hkv", keys, u)


class GatedDeltaNetLayer(LinearAttentionLayer):
    """`models.recurrent.GatedDeltaNet`."""

    def _heads(self, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super()._heads(found)
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + NORM_EPS) for one in (q, k))
        return q * self.shape.k_dim**-0.5, k, v

    def _write(self, made: torch.Tensor, step_size: torch.Tensor) -> torch.Tensor:
        heads = self.shape.num_v_heads
        return torch.sigmoid(made[:, -2 * heads : -heads].float())

    def _written(self, rows: ChunkRows) -> torch.Tensor:
        """What the state and the rows before have for the keys is taken off."""
        new, old = rows.v.shape[1], rows.known.shape[1]
        own, write = rows.k[:, old:], rows.write[..., None]
        among = write * rows.decay * (own @ rows.k.transpose(1, 2))
        wanted = write * (rows.v - rows.whole * (own @ rows.state)) - among[:, :, :old] @ rows.known
        lower = among[:, :, old:].tril(-1) + torch.eye(new, device=own.device)
        return torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)

    def _gated(self, out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        heads = out.unflatten(1, (self.shape.num_v_heads, self.shape.v_dim))
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weights.vectors["state_norm"]).flatten(1) * F.silu(self._z(made))


class Mamba2Layer(LinearAttentionLayer):
    """`models.recurrent.Mamba2`."""

    def _write(self, made: torch.Tensor, step_size: torch.Tensor) -> torch.Tensor:
        return step_size

    def _skipped(self, out: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return out + self.weights.vectors["skip"][:, None] * v

    def _written(self, rows: ChunkRows) -> torch.Tensor:
        return rows.write[..., None] * rows.v

    def _gated(self, out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        groups = (out * F.silu(self._z(made))).unflatten(1, (self.shape.num_k_heads, -1))
        if "state_norm" not in self.weights.vectors:
            return groups.flatten(1)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return normed.flatten(1) * self.weights.vectors["state_norm"]
