"""The operations of the PyTorch reference.

Weights are dequantized on load to the compute dtype. Attention processes each sequence's pages in tiles of fixed size
with an online softmax (FlashAttention, Dao et al. 2022): a tile of K and V is gathered, used and dropped, so the KV
cache is never copied whole, and all decode rows of a batch are processed together in each tile. The rounding of
PyTorch's matrix products depends on the number of rows: equal schedules give equal bits, different schedules agree
only within tolerance.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F

from twostroke.backends.interface import RaggedBatch
from twostroke.backends.ranks.sharding import ColumnSplit
from twostroke.backends.reference.activations import capped, gated
from twostroke.backends.reference.attention_tiles import SequenceGroup, groups_of, tile_bias
from twostroke.backends.reference.entry_codes import entries_of, numbers_of
from twostroke.models.config import Attention, ModelConfig
from twostroke.models.feed_forward import UNGATED, Activation
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.kv_formats import kv_format
from twostroke.models.rope import Rope, amplitudes, frequencies

TensorBatch: TypeAlias = RaggedBatch[torch.Tensor]

_forked = False  # whether this process was forked from one that uses PyTorch


def _after_fork() -> None:
    """OpenMP's threads do not survive a fork: with more than one thread, the child's first product would never end."""
    global _forked
    _forked = True
    torch.set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class DenseWeight:
    """A matrix with its bias. `split`: the outputs that this rank has; all of them in a single process."""

    matrix: torch.Tensor
    bias: torch.Tensor | None
    split: ColumnSplit


class Operations:
    """The operations of a forward pass, on PyTorch tensors."""

    def __init__(
        self, device: str = "cpu", dtype: str = "float32", threads: int | None = None, kv_dtype: str | None = None
    ) -> None:
        """`device`: any PyTorch device. `kv_dtype`: None is `dtype`.

        Raises RuntimeError or AssertionError if the device is not available.
        """
        self.stored = kv_format(kv_dtype or dtype)
        on_cpu = torch.empty(1, device=device).device.type == "cpu"
        if threads is not None and on_cpu:
            torch.set_num_threads(1 if _forked else threads)
        self.device, self.dtype = "cpu" if on_cpu else device, dtype
        self.threads = torch.get_num_threads()
        where = f"cpu {torch.backends.cpu.get_cpu_capability()}" if on_cpu else _device_name(device)
        self.arithmetic = f"reference {torch.__version__} {where} {dtype}"

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> DenseWeight:
        """A linear layer with the concatenated outputs of `parts`; or an embedding, or a norm."""
        matrix = self._joined(parts)
        return DenseWeight(matrix, self._joined(bias) if bias else None, ColumnSplit((0, len(matrix))))

    def floats(self, tensor: RawTensor) -> torch.Tensor:
        """A small tensor in float32."""
        return torch.from_numpy(tensor.dequantize().reshape(tensor.shape)).to(self.device)

    def heads(self, config: ModelConfig, layer: int) -> ColumnSplit:
        """The columns of the queries, and of what they attend to, that are computed here."""
        attention = config.attention_layers[layer]
        return ColumnSplit((0, attention.num_heads * attention.head_dim))

    def whole(self, x: torch.Tensor, split: ColumnSplit) -> torch.Tensor:
        """All columns of an activation, [N, own] -> [N, width]; a single process has them."""
        return x

    def _joined(self, parts: Sequence[RawTensor]) -> torch.Tensor:
        """Concatenated tensors, filled in pieces: a concatenation would hold two copies of the largest."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        flat, first = joined.view(-1), 0
        for part in parts:
            for start, values in part.chunks():
                flat[first + start :][: len(values)] = torch.from_numpy(values)
            first += part.num_elements
        return joined

    def enter(self, batch: RaggedBatch[np.ndarray]) -> TensorBatch:
        """The batch with tensors on the operations' device instead of arrays."""
        there: dict[str, Any] = {}
        for name in ("token_ids", "positions", "pages", "slots", "wanted", "query_rows", "state_rows", "dropout"):
            if (array := getattr(batch, name)) is not None:
                there[name] = torch.from_numpy(array).to(self.device)
        return cast(TensorBatch, replace(batch, **there))

    def running(self) -> AbstractContextManager[Any]:
        """The context in which operations must be called."""
        return torch.inference_mode()

    def embed(self, weight: DenseWeight, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """[N] ids -> [N, hidden], times `scale`."""
        rows = F.embedding(token_ids, weight.matrix)
        return rows if scale == 1.0 else rows * scale

    def norm(self, x: torch.Tensor, weight: DenseWeight, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.matrix).to(x.dtype)

    def linear(self, x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        """[N, in] -> [N, out], plus bias if packed with one."""
        return F.linear(x, weight.matrix, weight.bias)

    def gated_linear(self, x: torch.Tensor, weight: DenseWeight, activation: Activation) -> torch.Tensor:
        """`weight` packs (gate, up), or up alone: [N, in] -> [N, intermediate] = activation(gate x) * (up x)."""
        made = self.linear(x, weight)
        if activation == UNGATED:
            return self.whole(gated(made, made, activation), weight.split)
        split = replace(weight.split, cuts=tuple(cut // 2 for cut in weight.split.cuts))
        gate, up = made.chunk(2, dim=-1)
        return self.whole(gated(gate, up, activation), split)

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        batch: TensorBatch,
        group: int,
        attention: Attention,
        norms: Sequence[DenseWeight],
        eps: float,
    ) -> torch.Tensor:
        """Norm q and k if `norms` are given, apply RoPE, write K and V to their pages unless they are another layer's.

        `qkv` is [N, (Hq + 2 Hkv) * D], without own K and V [N, Hq * D], where V is K [N, (Hq + Hkv) * D]. `kv` is one
        layer of the pool, [parts, pages, Hkv, page_size, width], of a group of layers. Returns q, [N, Hq, D].
        """
        q, k, v = self.turned(qkv, kv.shape[2], batch, attention, norms, eps)
        if k is not None and v is not None:
            for part, entries in zip(kv, entries_of(k, v, self.stored), strict=True):
                part[batch.pages[group], :, batch.slots] = entries
        return q

    def turned(
        self,
        qkv: torch.Tensor,
        num_kv_heads: int,
        batch: TensorBatch,
        attention: Attention,
        norms: Sequence[DenseWeight],
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Split into q [N, Hq, D], k and v [N, Hkv, D]; q and k after their norms, if given, and RoPE."""
        heads = qkv.view(len(qkv), -1, attention.head_dim)
        cos, sin = self.angles(batch, attention.rope, attention.head_dim)

        def turn(x: torch.Tensor, norm: Sequence[DenseWeight]) -> torch.Tensor:
            if norm:
                x = self.norm_heads(x, norm[0], eps, attention) if attention.whole_norm else self.norm(x, norm[0], eps)
            return rotate(x, cos, sin)

        if attention.source is not None:
            return self._grown(turn(heads, norms), batch, attention), None, None
        own = [num_kv_heads] * (1 if attention.keys_as_values else 2)
        q, k, *values = heads.split([heads.shape[1] - sum(own), *own], dim=1)
        v = values[0] if values else k
        if attention.value_norm:
            v = self.norm(v, DenseWeight(v.new_ones(()), None, ColumnSplit((0, 1))), eps)
        return self._grown(turn(q, norms[:1]), batch, attention), turn(k, norms[1:]), v

    def norm_heads(self, x: torch.Tensor, weight: DenseWeight, eps: float, attention: Attention) -> torch.Tensor:
        """RMSNorm over all heads together, [N, H, D]."""
        return self.norm(x.flatten(1), weight, eps).view(x.shape)

    def _grown(self, q: torch.Tensor, batch: TensorBatch, attention: Attention) -> torch.Tensor:
        """Queries by the factors of their positions."""
        if attention.growth is None:
            return q
        factors = torch.from_numpy(attention.growth.factors(batch.positions.cpu().numpy())).to(self.device)
        return (q.float() * factors[:, None, None]).to(q.dtype)

    def angles(self, batch: TensorBatch, rope: Rope, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row's angles by the amplitude, [N, 1, D / 2] float32, once per step and RoPE."""
        if (cached := batch.scratch.get((rope, head_dim))) is not None:
            return cached
        turns, sizes = (torch.from_numpy(of(rope, head_dim)).to(self.device) for of in (frequencies, amplitudes))
        angles = batch.positions[:, None, None].float() * turns
        batch.scratch[rope, head_dim] = angles.cos() * sizes, angles.sin() * sizes
        return batch.scratch[rope, head_dim]

    def attention(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: TensorBatch,
        group: int,
        attention: Attention,
        cap: float | None,
        sink_logits: torch.Tensor | None = None,
        place: int = 0,
    ) -> torch.Tensor:
        """Attention of each row to its sequence's entries up to its own, at positions > own - window: [N, Hq * D].

        In both directions it is to all entries, at positions < own + window too.

        `group`: the group of layers to which `kv` belongs. `cap`: the bound of scores, if there is one. `sink_logits`:
        [Hq], if the layer has them. `place`: of `kv` among all layers, for biases.
        """
        if not q.shape[1]:  # a rank without heads
            return q.flatten(1)
        if sink_logits is not None:
            sink_logits = self.own_sinks(sink_logits, attention, q.shape[1])
        out = torch.empty_like(q)
        alike = batch.scratch.get("groups")
        if alike is None:
            alike = batch.scratch["groups"] = list(groups_of(batch, q.device, attention.both_ways))
        for some in alike:
            out[some.rows] = self._attend(q[some.rows], kv, some, group, attention, cap, sink_logits, place).to(q.dtype)
        return out.flatten(1)

    def own_sinks(self, sink_logits: torch.Tensor, attention: Attention, heads: int) -> torch.Tensor:
        """Those of the heads that are computed here."""
        return sink_logits

    def _attend(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        sequences: SequenceGroup,
        group: int,
        attention: Attention,
        cap: float | None,
        sink_logits: torch.Tensor | None,
        place: int,
    ) -> torch.Tensor:
        """Attention of some sequences over their tiles, computed in float32: [G * T, Hq, D]."""
        (num_kv_heads, page_size), head_dim = kv.shape[2:4], q.shape[2]
        count, rows = len(sequences.tables), sequences.num_rows
        repeat = q.shape[1] // num_kv_heads
        # Rows of query heads that share a KV head are adjacent: one product per sequence and KV head.
        q = (q.float() * attention.scale).view(count, rows, num_kv_heads, repeat, head_dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(count, num_kv_heads, rows * repeat, head_dim)
        top = q.new_full((count, num_kv_heads, rows * repeat, 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        if sink_logits is not None:  # as a first key, without a value
            total = torch.ones_like(top)
            top.view(count, num_kv_heads, rows, repeat)[:] = sink_logits.view(num_kv_heads, 1, repeat)
        head = torch.arange(num_kv_heads, device=q.device)[None, :, None]
        for tile in sequences.tiles(page_size, group, attention.window):
            n, bias, hidden = tile.count, None, None
            if sequences.biases:
                bias = torch.from_numpy(tile_bias(sequences.biases, tile, place)).to(q.device)
                hidden = bias == -torch.inf  # whose slots may hold anything
                if hidden.all():
                    continue
            pages = tile.pages[:, None, :]
            k, v = (side.view(n, num_kv_heads, -1, head_dim) for side in numbers_of(kv, self.stored, pages, head))
            scores = q[:n] @ k.transpose(-1, -2)
            if cap is not None:
                scores = capped(scores, cap)
            if bias is not None and hidden is not None:
                scores += bias[:, :, None]
                scores.masked_fill_(hidden[:, :, None], -torch.inf)
                v = v.masked_fill(hidden[..., None], 0)
            if tile.mask is not None:
                mask = tile.mask[:, None, :, None, :].expand(n, num_kv_heads, rows, repeat, -1)
                scores.masked_fill_(~mask.reshape(scores.shape), -torch.inf)
                # Slots outside of the sequence may hold another request's NaN, and 0 times NaN is NaN.
                v = v.masked_fill(~tile.mask.any(1)[:, None, :, None], 0)
            new_top = torch.maximum(top[:n], scores.amax(-1, keepdim=True))
            # A row that has seen no key yet keeps -inf; its weights must be 0, not nan.
            base = new_top.clamp_min(torch.finfo(torch.float32).min)
            weights, decay = scores.sub_(base).exp_(), torch.exp(top[:n] - base)
            total[:n] = total[:n] * decay + weights.sum(-1, keepdim=True)
            out[:n] = out[:n] * decay + weights @ v
            top[:n] = new_top
        out = (out / total).view(count, num_kv_heads, rows, repeat, head_dim)
        return out.permute(0, 2, 1, 3, 4).reshape(count * rows, num_kv_heads * repeat, head_dim)

    def head(self, x: torch.Tensor, weight: DenseWeight) -> torch.Tensor:
        """Normalized hidden states [R, hidden] -> logits [R, vocab] float32."""
        return F.linear(x, weight.matrix).float()


def _device_name(device: str) -> str:
    """An accelerator's kind, and how it multiplies float32."""
    kind = torch.device(device).type
    name = torch.cuda.get_device_name(device) if kind == "cuda" else kind
    return f"{name} {torch.get_float32_matmul_precision()}"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + D / 2) of [N, H, D] in float32 (RoFormer, Su et al. 2021)."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
