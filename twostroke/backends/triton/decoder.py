"""The launches of one pass, in order, over buffers that are there already: so a graph can hold all of them."""

from __future__ import annotations

import numpy as np
import torch

from twostroke.backends.interface import PAGE, Weights
from twostroke.backends.triton.experts import Mixture
from twostroke.backends.triton.kernels import attention as attending
from twostroke.backends.triton.kernels import packed as quantized
from twostroke.backends.triton.kernels import pointwise
from twostroke.backends.triton.layers import AttentionWeights, LayerWeights, TritonLayer
from twostroke.backends.triton.linear import Linear, place
from twostroke.backends.triton.packed import RepackedMatrix
from twostroke.backends.triton.pass_buffers import PassBuffers, PassExtras, PlanTensors
from twostroke.backends.triton.pass_plan import FEW_ROWS, LOG2_E, MAX_PARTS, PassShape, keys_of, power_of_two
from twostroke.backends.triton.recurrent import RecurrentLayer, StateBuffers
from twostroke.backends.triton.tile_shapes import FEW_TOKENS
from twostroke.models import config as models
from twostroke.models.kv_formats import kv_format
from twostroke.models.layer_groups import entry_places, layer_groups
from twostroke.models.rope import Rope, amplitudes, frequencies

EXPANDED = 1024  # slots that a program expands
HEADS = 8  # that a program rotates and stores
COLUMNS = 32  # of a head that a program adds the parts of


class TritonDecoder(LayerWeights):
    """A model's weights on a device, and its pass over a ragged batch."""

    def __init__(
        self,
        config: models.ModelConfig,
        device: str,
        weights: Weights,
        kv_dtype: str,
        own: models.ModelConfig | None = None,
    ) -> None:
        """`own`: the description with a rank's heads, if there are several ranks."""
        super().__init__(config, device, own)
        self.windows: list[int | None] = list(dict.fromkeys(config.windows))
        self.places, self.groups = entry_places(config, kv_dtype), len(layer_groups(config, kv_dtype))
        codes = kv_format(kv_dtype).codes
        self.v_bits = codes[1].bits if codes else 0
        self.stages = config.head_dim.bit_length() - 1 if codes else 0  # of a head's rotation
        self.ropes: list[Rope] = list(dict.fromkeys(config.ropes))
        self.head = Linear([place(weights(config.head_tensor), device)], self.scratch, whole=True)
        head = self.head.pieces[0] if self.head.pieces else None  # a rank may have no part of it
        self.table = head if config.tied else place(weights("embed"), device)
        self.state_rooms = StateBuffers(device)
        self.layers = [TritonLayer(self, i, weights, kv_dtype) for i in range(config.num_layers)]
        self.norm = self.vector(weights("norm").dequantize() * np.float32(config.logit_scale))
        dim, heads = config.head_dim, self.own.num_heads
        self.sums = torch.empty(MAX_PARTS * heads * dim, dtype=torch.float32, device=device)
        self.tops, self.totals = (torch.empty(MAX_PARTS * heads, dtype=torch.float32, device=device) for _ in range(2))
        self.turns: tuple[torch.Tensor, torch.Tensor] | None = None
        self.growths: dict[models.QueryGrowth | None, torch.Tensor] = {}

    def buffers(self, rows: int, entries: int) -> PassBuffers:
        """Room for a pass of so many rows, and entries of all sequences."""
        return PassBuffers(self, self.layers, self.groups, rows, entries)

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
        rows = shape.rows
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
            mixed = self.mix_tokens(i, layer.mixer, shape, work, to, kv, extras, queries)
            parts = self.add(layer.o, mixed, rows, to, layer.post_norms[0])
            dropout = None if extras.dropout is None else extras.dropout[i]
            self._norm(rows, to, parts, layer.post_norms[0], layer.mlp_norm, dropout, layer.o_bias)
            if isinstance(layer.feed_forward, models.Experts):
                parts = self.mix(layer.mixture, rows, to)
                if layer.shared is not None:
                    layer.shared(to.h, to.gated, to.shared, to.parts, rows)
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

    def mix_tokens(
        self,
        i: int,
        layer: AttentionWeights | RecurrentLayer,
        shape: PassShape,
        work: PlanTensors,
        to: PassBuffers,
        kv: torch.Tensor,
        extras: PassExtras,
        queries: list[torch.Tensor],
    ) -> torch.Tensor:
        """What a layer's output projection is given, [padded rows, its columns]. Queries are appended."""
        rows, config = shape.rows, self.config
        if isinstance(layer, RecurrentLayer):
            assert extras.states is not None, "the batch has no states"
            new_cells = work.cells.view(self.groups, -1)
            return layer(to.h, to.parts, rows, new_cells, to.cells, extras.states, self.state_rooms)
        layer.qkv(to.h, to.parts, rows)
        self.store(i, layer, rows, work, to, kv)
        if extras.query_rows is not None:
            taken = self.whole_heads(to.q[extras.query_rows], len(extras.query_rows))
            taken = taken[: len(extras.query_rows)].view(-1, config.num_heads, config.head_dim)
            queries.append(taken.float() * layer.attention.scale)
        self.attend(i, layer, shape, work, to, kv, extras.biases)
        layer.gated(to.h, to.parts, to.attended, rows)
        return self.whole_heads(to.attended, rows)

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
        self, i: int, layer: AttentionWeights, rows: int, work: PlanTensors, to: PassBuffers, kv: torch.Tensor
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
            WIDTH=kv.shape[5], V_BITS=self.v_bits, STAGES=self.stages, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(
        self,
        i: int,
        layer: AttentionWeights,
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
            BIASED=biases is not None, WIDTH=kv.shape[5], V_BITS=self.v_bits, STAGES=self.stages,
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
