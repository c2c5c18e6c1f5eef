"""The launches of one pass, in order, over buffers that are there already: so a graph can hold all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from twostroke.backends.interface import PAGE, Weights
from twostroke.backends.triton.experts import ExpertBufferPool, Mixture
from twostroke.backends.triton.kernels import attention as attending
from twostroke.backends.triton.kernels import packed as quantized
from twostroke.backends.triton.kernels import pointwise
from twostroke.backends.triton.linear import ACTIVATIONS, PADDING, GatedLinear, Linear, UnpackBuffer, place
from twostroke.backends.triton.packed import RepackedMatrix
from twostroke.backends.triton.pass_plan import FEW_ROWS, LOG2_E, MAX_PARTS, PassShape, keys_of, power_of_two
from twostroke.backends.triton.tile_shapes import FEW_TOKENS
from twostroke.models import config as models
from twostroke.models.kv_formats import kv_format
from twostroke.models.layer_groups import entry_places, layer_groups
from twostroke.models.rope import Rope, amplitudes, frequencies

EXPANDED = 1024  # slots that a program expands
HEADS = 8  # that a program rotates and stores
COLUMNS = 32  # of a head that a program adds the parts of


@dataclass(frozen=True)
class PlanTensors:
    """Views of the device's copy of `Work.packed`. `work` and `joined`: for each window."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    spans: torch.Tensor
    starts: torch.Tensor
    work: list[torch.Tensor]
    joined: list[torch.Tensor]

    @classmethod
    def of(cls, packed: torch.Tensor, shape: PassShape) -> PlanTensors:
        ids, positions, cells, spans, starts, *windows = torch.split(packed, shape.sizes)
        return cls(ids, positions, cells, spans, starts, windows[::2], windows[1::2])


@dataclass(frozen=True)
class PassExtras:
    """Optional inputs of a pass.

    Factors of dropout [layers, N, hidden], rows that return queries, and states, and what is added to scores [layers,
    KV heads, entries of all sequences], in logarithms to base 2.
    """

    dropout: torch.Tensor | None = None
    query_rows: torch.Tensor | None = None
    state_rows: torch.Tensor | None = None
    biases: torch.Tensor | None = None


class PassBuffers:
    """Activations of a pass of up to `rows` rows, and its sequences' cells and positions.

    Rows are padded, so that tiles of tokens need no masks.
    """

    def __init__(self, decoder: TritonDecoder, rows: int, entries: int) -> None:
        config, device = decoder.config, decoder.device
        heads, dim = decoder.own.num_heads, config.head_dim
        self.rows, self.entries = -(-rows // PADDING) * PADDING, entries
        tall = self.rows

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x = room(tall, config.hidden_size, dtype=torch.float32)
        self.h = room(tall, config.hidden_size)
        self.parts = room(decoder.parts_of(tall), dtype=torch.float32)
        self.q, self.attended = room(tall, heads * dim), room(tall, heads * dim)
        self.gated = room(tall, max((1, *decoder.intermediates)))
        self.ids = room(tall, dtype=torch.int32)
        self.cells, self.positions = room(decoder.groups, entries, dtype=torch.int32), room(entries, dtype=torch.int32)


class TritonLayer:
    """The weights of a layer."""

    def __init__(self, decoder: TritonDecoder, index: int, weights: Weights) -> None:
        def vector(name: str) -> torch.Tensor:
            return decoder.vector(weights(prefix + name).dequantize())

        def matrix(name: str) -> Any:
            return place(weights(prefix + name), decoder.device)

        config, prefix = decoder.config, f"layers.{index}."
        layer, scratch = config.layers[index], decoder.scratch
        self.attention, self.feed_forward = layer.attention, layer.feed_forward
        self.attn_norm, self.mlp_norm = vector("attn_norm"), vector("mlp_norm")
        heads, hidden = config.num_heads + 2 * config.num_kv_heads, config.hidden_size
        self.qkv = Linear([matrix(name) for name in ("q", "k", "v")], scratch, of=heads * config.head_dim)
        self.o = Linear([matrix("o")], scratch, of=hidden)
        biased, normed = layer.attention.bias, layer.attention.qk_norm
        self.bias = torch.cat([vector(name) for name in ("q_bias", "k_bias", "v_bias")]) if biased else None
        self.down_bias: torch.Tensor | None = None
        self.o_bias = decoder.whole_bias(vector("o_bias")) if layer.attention.output_bias else None
        self.sink_logits = decoder.of_own_heads(vector("sink_logits")) if layer.attention.sink_logits else None
        self.qk_norms = (vector("q_norm"), vector("k_norm")) if normed else (None, None)
        self.post_norms = (vector("attn_post_norm"), vector("mlp_post_norm")) if layer.post_norms else (None, None)
        if isinstance(layer.feed_forward, models.Experts):
            self.mixture = Mixture(layer.feed_forward, prefix, weights, decoder.rooms, decoder.whole_gated)
        else:
            activation, biased = ACTIVATIONS.index(layer.feed_forward.activation), layer.feed_forward.bias
            bias = torch.cat([vector("gate_bias"), vector("up_bias")]) if biased else None
            self.gated = GatedLinear(matrix("gate"), matrix("up"), activation, scratch, bias)
            self.down = Linear([matrix("down")], scratch, of=hidden)
            self.down_bias = decoder.whole_bias(vector("down_bias")) if biased else None


class TritonDecoder:
    """A model's weights on a device, and its pass over a ragged batch.

    Attributes:
        own: the description with those heads that are computed here.
    """

    def __init__(
        self,
        config: models.ModelConfig,
        device: str,
        weights: Weights,
        kv_dtype: str,
        own: models.ModelConfig | None = None,
    ) -> None:
        """`own`: the description with a rank's heads, if there are several ranks."""
        self.config, self.device, self.scratch = config, device, UnpackBuffer(device)
        self.own = config if own is None else own
        self.windows: list[int | None] = list(dict.fromkeys(config.windows))
        self.places, self.groups = entry_places(config, kv_dtype), len(layer_groups(config, kv_dtype))
        codes = kv_format(kv_dtype).codes
        self.v_bits = codes[1].bits if codes else 0
        self.stages = config.head_dim.bit_length() - 1 if codes else 0  # of a head's rotation
        self.ropes: list[Rope] = list(dict.fromkeys(config.ropes))
        self.head = Linear([place(weights(config.head_tensor), device)], self.scratch, whole=True)
        head = self.head.pieces[0] if self.head.pieces else None  # a rank may have no part of it
        self.table = head if config.tied else place(weights("embed"), device)
        self.rooms = ExpertBufferPool(device)
        self.layers = [TritonLayer(self, i, weights) for i in range(config.num_layers)]
        self.norm = self.vector(weights("norm").dequantize() * np.float32(config.logit_scale))
        dim, heads = config.head_dim, self.own.num_heads
        self.sums = torch.empty(MAX_PARTS * heads * dim, dtype=torch.float32, device=device)
        self.tops, self.totals = (torch.empty(MAX_PARTS * heads, dtype=torch.float32, device=device) for _ in range(2))
        self.turns: tuple[torch.Tensor, torch.Tensor] | None = None
        self.growths: dict[models.QueryGrowth | None, torch.Tensor] = {}

    def vector(self, values: np.ndarray) -> torch.Tensor:
        """A norm or a bias, float32."""
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    @property
    def intermediates(self) -> list[int]:
        """Widths of the gated MLPs."""
        return [
            one.feed_forward.intermediate_size for one in self.layers if isinstance(one.feed_forward, models.GatedMLP)
        ]

    def parts_of(self, rows: int) -> int:
        """Floats of the largest product in the layers: in segments for few tokens, as `rows` rows for many."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.o, *_downs(layer))]
        few = FEW_TOKENS * max((0, *(linear.features * linear.segments for linear in linears)))
        return max(few, rows * max((self.config.hidden_size, *(linear.features for linear in linears))))

    def reach(self, positions: int) -> bool:
        """Make the table of RoPE's turns cover so many positions. Returns whether it is a new one."""
        if self.turns is not None and self.turns[0].shape[1] >= positions:
            return False
        count = max(power_of_two(positions), min(self.config.max_position, 1 << 17))
        at = np.arange(count, dtype=np.float32)[:, None]
        angles = np.stack([at * frequencies(rope, self.config.head_dim) for rope in self.ropes])
        sizes = np.stack([amplitudes(rope, self.config.head_dim) for rope in self.ropes])[:, None]
        cos, sin = (turn(angles, dtype=np.float64).astype(np.float32) * sizes for turn in (np.cos, np.sin))
        growing = {one.growth for one in self.config.attentions if one.growth is not None}
        self.growths = {growth: self.vector(growth.factors(at[:, 0])) for growth in growing}
        self.turns = torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)
        return True

    # The pass --------------------------------------------------------------------------------------------------

    def launch(
        self,
        work: PlanTensors,
        shape: PassShape,
        drawn: torch.Tensor,
        to: PassBuffers,
        kv: torch.Tensor,
        extras: PassExtras,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the rows through all layers: `to.x` becomes their hidden states.

        Returns the queries, layer by layer, and the hidden states before, between and after the layers.

        Args:
            drawn: tokens that placeholders stand for, int32.
            kv: the pages of any group of layers, [depth, parts, frames, Hkv, page_size, width].
        """
        rows, config = shape.rows, self.config
        queries, states = list[torch.Tensor](), list[torch.Tensor]()
        page_size = kv.shape[4]
        blocks = -(-rows // 256)
        pointwise.resolve_kernel[(blocks,)](work.token_ids, drawn, to.ids, rows, BLOCK=256)
        lanes = power_of_two(page_size)
        spans = max(1, EXPANDED // lanes)
        pointwise.expand_kernel[(-(-shape.spans // spans), self.groups)](
            work.spans, work.starts, to.cells, to.positions, shape.spans, to.entries,
            WIDTH=PAGE + self.groups, PAGE=page_size, SPANS=spans, LANES=lanes,
        )  # fmt: skip
        self.embed(rows, to)
        parts, post, bias = 0, None, None
        for i, layer in enumerate(self.layers):
            self._norm(rows, to, parts, post, layer.attn_norm, bias=bias)
            if extras.state_rows is not None:  # the norm has added the parts of the layer before
                states.append(to.x[extras.state_rows])
            layer.qkv(to.h, to.parts, rows)
            self.store(i, layer, rows, work, to, kv)
            if extras.query_rows is not None:
                taken = self.whole_heads(to.q[extras.query_rows], len(extras.query_rows))
                taken = taken[: len(extras.query_rows)].view(-1, config.num_heads, config.head_dim)
                queries.append(taken.float() * layer.attention.scale)
            self.attend(i, layer, shape, work, to, kv, extras.biases)
            parts = self.add(layer.o, self.whole_heads(to.attended, rows), rows, to, layer.post_norms[0])
            dropout = None if extras.dropout is None else extras.dropout[i]
            self._norm(rows, to, parts, layer.post_norms[0], layer.mlp_norm, dropout, layer.o_bias)
            if isinstance(layer.feed_forward, models.Experts):
                parts = self.mix(layer.mixture, rows, to)
            else:
                gated = to.gated.view(-1)[: to.rows * layer.gated.rows].view(to.rows, layer.gated.rows)
                layer.gated(to.h, gated, rows)
                gated = self.whole_gated(gated, rows, layer.feed_forward.intermediate_size)
                parts = self.add(layer.down, gated, rows, to, layer.post_norms[1])
            post, bias = layer.post_norms[1], layer.down_bias
        if parts or bias is not None:
            self._norm(rows, to, parts, post, None, bias=bias)
        if extras.state_rows is not None:
            states.append(to.x[extras.state_rows])
        return queries, states

    def whole_heads(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """All columns of heads [padded rows, own heads * D]; a single process has them."""
        return x

    def whole_bias(self, own: torch.Tensor) -> torch.Tensor:
        """The bias of a product that is added to the residual stream, of all columns; a single process has them."""
        return own

    def of_own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """What there is for each query head, of those that are computed here."""
        return values

    def whole_gated(self, gated: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """All columns of gated values [padded rows, own], of which there are `width`; a single process has them."""
        return gated

    def add(self, linear: Linear, x: torch.Tensor, rows: int, to: PassBuffers, post: torch.Tensor | None) -> int:
        """A product that is added to the residual stream: at once, or as parts, whose number is returned, by a norm."""
        if rows > FEW_TOKENS and post is None and self.config.residual_scale == 1:
            linear(x, to.x.view(-1), rows, add=True)
            return 0
        linear(x, to.parts, rows)
        return linear.parts(rows)

    def mix(self, mixture: Mixture, rows: int, to: PassBuffers) -> int:
        """A mixture of experts, as parts, whose number is returned."""
        mixture(to.h, to.parts, rows)
        return 1

    def embed(self, rows: int, to: PassBuffers) -> None:
        """Write the embeddings of `to.ids` to `to.x`."""
        self.look_up(to.ids, to.x, rows)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """Rows of the table, times the model's factor: float32."""
        config, table = self.config, self.table
        assert table is not None
        if isinstance(table, RepackedMatrix):
            quantized.unpack_kernel[(rows, table.blocks)](
                *table.arrays, ids, out, config.embedding_scale, table.rows, config.hidden_size,
                table.units, 1, True, False, table.form.code,
            )  # fmt: skip
        else:
            pointwise.embed_kernel[(rows,)](
                ids, table.matrix, out, config.embedding_scale, config.hidden_size,
                power_of_two(config.hidden_size),
            )  # fmt: skip

    def _norm(
        self, rows: int, to: PassBuffers, parts: int, post: torch.Tensor | None, weight: torch.Tensor | None,
        dropout: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """x += the parts of a product and its bias; h = norm(x) if there is a weight."""
        hidden, factor = self.config.hidden_size, self.config.residual_scale
        pointwise.norm_kernel[(rows,)](
            to.x, to.parts, bias, post, weight, dropout, to.h, FEW_TOKENS * hidden, self.config.norm_eps, factor,
            hidden, parts, *(one is not None for one in (bias, post, weight, dropout)), factor != 1,
            power_of_two(hidden), num_warps=norm_warps(hidden), enable_fp_fusion=False,
        )  # fmt: skip

    def store(
        self, i: int, layer: TritonLayer, rows: int, work: PlanTensors, to: PassBuffers, kv: torch.Tensor
    ) -> None:
        """Queries to `to.q`, keys and values to their pages."""
        config, turns = self.own, self.turns
        assert turns is not None, "`reach` comes first"
        rope, (group, place) = self.ropes.index(layer.attention.rope), self.places[i]
        heads = config.num_heads + 2 * config.num_kv_heads
        q_norm, k_norm = layer.qk_norms
        pointwise.rope_store_kernel[(rows, -(-heads // HEADS))](
            to.parts, FEW_TOKENS * layer.qkv.features, layer.bias, q_norm, k_norm, config.norm_eps,
            turns[0][rope], turns[1][rope], self.growths.get(layer.attention.growth), work.positions,
            work.cells.view(self.groups, -1)[group], to.q,
            kv, kv.stride(2), place,
            HQ=config.num_heads, HKV=config.num_kv_heads, D=config.head_dim, PAGE=kv.shape[4],
            PARTS=layer.qkv.parts(rows), BIAS=layer.bias is not None, NORMS=q_norm is not None,
            GROWS=layer.attention.growth is not None, HEADS=HEADS, HALF=power_of_two(config.head_dim // 2),
            V_BITS=self.v_bits, STAGES=self.stages, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(
        self,
        i: int,
        layer: TritonLayer,
        shape: PassShape,
        work: PlanTensors,
        to: PassBuffers,
        kv: torch.Tensor,
        biases: torch.Tensor | None = None,
    ) -> None:
        """Compute attention, and write its outputs to `to.attended`."""
        attention, sinks = layer.attention, layer.sink_logits
        config, which, (group, place) = self.own, self.windows.index(attention.window), self.places[i]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        block = max(16, power_of_two(dim))
        scale = attention.scale * LOG2_E / (dim if self.v_bits else 1)  # rotated twice, a number is times `dim`
        attending.attention_kernel[(shape.items[which], kv_heads)](
            work.work[which], to.q, kv, to.cells[group], to.positions, sinks, biases, to.attended,
            self.sums, self.tops, self.totals, kv.stride(2), place, scale, attention.window or 0,
            0 if biases is None else biases.shape[2],
            HQ=heads, HKV=kv_heads, D=dim, PAGE=kv.shape[4], WINDOW=attention.window is not None, ROWS=shape.tall,
            KEYS=keys_of(dim), BLOCK_D=block, SPLIT=shape.joined[which] > 0, SINKS=sinks is not None,
            BIASED=biases is not None, V_BITS=self.v_bits, STAGES=self.stages,
            **attention_options(shape.tall, block),
        )  # fmt: skip
        if shape.joined[which]:
            columns = dim if self.v_bits else COLUMNS
            attending.combine_kernel[(shape.joined[which], heads, -(-dim // columns))](
                work.joined[which], self.sums, self.tops, self.totals, sinks, to.attended,
                HQ=heads, D=dim, BLOCK_D=columns, BLOCK=32, SINKS=sinks is not None, STAGES=self.stages, num_warps=1,
            )  # fmt: skip

    def launch_head(self, x: torch.Tensor, h: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """The last norm and the head of `rows` rows, over padded buffers."""
        hidden = self.config.hidden_size
        pointwise.norm_kernel[(rows,)](
            x, None, None, None, self.norm, None, h, 0, self.config.norm_eps, 1.0,
            hidden, 0, False, False, True, False, False, power_of_two(hidden),
            num_warps=norm_warps(hidden), enable_fp_fusion=False,
        )  # fmt: skip
        # A packed head is unpacked in registers only: in memory it would take a gigabyte.
        step = FEW_TOKENS if any(isinstance(piece, RepackedMatrix) for piece in self.head.pieces) else rows
        for first in range(0, rows, step):
            self.head(h[first:], out[first:].view(-1), min(step, rows - first))


def attention_options(tall: int, block: int) -> dict[str, int]:
    """Compile options of attention's kernel, by rows of its tile of queries and by the padded width of heads.

    Stages hide the loads of keys and values. Narrow heads leave registers for three programs a multiprocessor.
    """
    if tall == FEW_ROWS:
        return {"num_warps": 4, "num_stages": 3 if block <= 128 else 2}
    if block <= 64:
        return {"num_warps": 4, "num_stages": 3, "maxnreg": 168}
    return {"num_warps": 8, "num_stages": 5 if block <= 128 else 2}


def norm_warps(hidden: int) -> int:
    """Warps of a norm, by the width alone: the order of its sums depends on it."""
    return 8 if hidden <= 1024 else 16


def _downs(layer: TritonLayer) -> Sequence[Linear]:
    return () if isinstance(layer.feed_forward, models.Experts) else (layer.down,)
