"""The launches of one pass, in order, over buffers that are there already: so a graph can hold all of them."""

from collections.abc import Sequence

import numpy as np
import torch

from twostroke.backends.interface import PAGE, Weights
from twostroke.backends.triton.attention import AttentionPass
from twostroke.backends.triton.experts import Mixture
from twostroke.backends.triton.kernels import packed as quantized
from twostroke.backends.triton.kernels import pointwise
from twostroke.backends.triton.layers import AttentionWeights, TritonLayer
from twostroke.backends.triton.linear import Linear, Matrix, place
from twostroke.backends.triton.packed import RepackedMatrix
from twostroke.backends.triton.pass_buffers import PassBuffers, PassExtras, PlanTensors
from twostroke.backends.triton.pass_plan import PassShape, power_of_two
from twostroke.backends.triton.recurrent import RecurrentLayer, StateBuffers
from twostroke.backends.triton.tile_shapes import FEW_TOKENS
from twostroke.backends.triton.token_inputs import TokenInputs
from twostroke.models import config as models

EXPANDED = 1024  # slots that a program expands
CAPPED = 1024  # logits that a program caps


class TritonDecoder(AttentionPass):
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
        super().__init__(config, device, kv_dtype, own)
        self.head = Linear([place(weights(config.head_tensor), device)], self.scratch, whole=True)
        head = self.head.pieces[0] if self.head.pieces else None  # a rank may have no part of it
        self.table = head if config.tied else place(weights("embed"), device)
        self.state_rooms = StateBuffers(device)
        self.layers = [TritonLayer(self, i, weights, kv_dtype) for i in range(config.num_layers)]
        self.inputs: TokenInputs | None = None
        if config.token_inputs:
            table, projection = (place(weights(f"inputs.{name}"), device) for name in ("embed", "projection"))
            norm = self.vector(weights("inputs.norm").dequantize())
            self.inputs = TokenInputs(table, Linear([projection], self.scratch), norm, config.norm_eps)
        self.norm = self.vector(weights("norm").dequantize() * np.float32(config.logit_scale))

    def buffers(self, rows: int, entries: int) -> PassBuffers:
        """Room for a pass of so many rows, and entries of all sequences."""
        own = [] if self.inputs is None else [self.inputs.projection]
        linears = [*own, *(linear for layer in self.layers for linear in layer.linears)]
        return PassBuffers(self, self.layers, linears, self.groups, rows, entries)

    # The pass --------------------------------------------------------------------------------------------------

    def launch(
        self,
        work: PlanTensors,
        shape: PassShape,
        drawn: torch.Tensor,  # tokens that placeholders stand for, int32
        to: PassBuffers,
        kv: Sequence[torch.Tensor],  # the pages of each group of layers, [depth, parts, frames, Hkv, page_size, width]
        extras: PassExtras,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the rows through all layers: `to.x` becomes their hidden states.

        Returns the queries, layer by layer, and the hidden states before, between and after the layers.
        """
        rows = shape.rows
        queries, states = list[torch.Tensor](), list[torch.Tensor]()
        page_size = kv[0].shape[4]
        blocks = -(-rows // 256)
        pointwise.resolve_kernel[(blocks,)](work.token_ids, drawn, to.ids, rows, BLOCK=256)
        lanes = power_of_two(page_size)
        spans = max(1, EXPANDED // lanes)
        pointwise.expand_kernel[(-(-shape.spans // spans), self.groups)](
            work.spans, work.starts, to.cells, to.positions, shape.spans, to.entries,
            WIDTH=PAGE + self.groups, PAGE=page_size, SPANS=spans, LANES=lanes,
        )  # fmt: skip
        self.embed(rows, to)
        if self.inputs is not None:
            self._norm(rows, to, 0, None, None, copied=True)
            self.inputs(self.look_up, to.ids, to.h, to.parts, to.inputs, rows)
        parts, post, bias, scale = 0, None, None, 1.0
        for i, layer in enumerate(self.layers):
            self._norm(rows, to, parts, post, layer.pre_norms[0], bias=bias, copied=True, scale=scale)
            if extras.state_rows is not None:  # the norm has added the parts of the layer before
                states.append(to.x[extras.state_rows])
            mixed = self.mix_tokens(i, layer.mixer, shape, work, to, kv, extras, queries)
            parts = self.add(layer.o, mixed, rows, to, layer.post_norms[0])
            dropout = None if extras.dropout is None else extras.dropout[i]
            self._norm(rows, to, parts, layer.post_norms[0], layer.pre_norms[1], dropout, layer.o_bias, copied=True)
            if isinstance(layer.feed_forward, models.Experts):
                if layer.shared is not None:
                    layer.shared.multiply(to.h, to.gated, to.shared, rows)
                routed = to.h
                if layer.expert_norms:
                    routed, (router_norm, norm, *_) = to.routed, layer.expert_norms
                    self._norm(rows, to, 0, None, router_norm, dropout, out=routed)
                    self._norm(rows, to, 0, None, norm, dropout)
                parts = self.mix(layer.mixture, routed, rows, to)
                if layer.shared is not None:
                    layer.shared.add(to.h, to.shared, to.parts, rows)
            else:
                gated = _columns(to.gated, layer.gated.rows)
                layer.gated(to.h, gated, rows)
                gated = self.whole_gated(gated, rows, layer.feed_forward.intermediate_size)
                parts = self.add(layer.down, gated, rows, to, layer.post_norms[1])
            post, bias, scale = layer.post_norms[1], layer.down_bias, layer.scale
            if layer.inputs is not None:
                self._norm(rows, to, parts, post, None, bias=bias, copied=True)
                between = _columns(to.gated, self.config.token_inputs)
                parts = layer.inputs(i, to.h, between, to.parts, to.inputs, rows)
                post, bias = layer.inputs.norm, None
        if parts or bias is not None or scale != 1:
            self._norm(rows, to, parts, post, None, bias=bias, scale=scale)
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
        kv: Sequence[torch.Tensor],
        extras: PassExtras,
        queries: list[torch.Tensor],
    ) -> torch.Tensor:
        """What a layer's output projection is given, [padded rows, its columns]. Queries are appended."""
        rows = shape.rows
        if isinstance(layer, RecurrentLayer):
            assert extras.states is not None, "the batch has no states"
            new_cells = work.cells.view(self.groups, -1)
            return layer(to.h, to.parts, rows, new_cells, to.cells, extras.states, self.state_rooms)
        layer.qkv(to.h, to.parts, rows)
        own, pages = layer.own, kv[self.places[i][0]]
        self.store(i, layer, rows, work, to, pages, self.squares(layer, rows, to))
        q, attended = (_columns(room, own.num_heads * own.head_dim) for room in (to.q, to.attended))
        if extras.query_rows is not None:
            taken = self.whole_heads(q[extras.query_rows], len(extras.query_rows))
            taken = taken[: len(extras.query_rows)].view(-1, layer.attention.num_heads, own.head_dim)
            queries.append(taken.float() * own.scale)
        self.attend(i, layer, shape, work, to, pages, extras.biases)
        layer.gated(to.h, to.parts, to.attended, rows)
        return self.whole_heads(attended, rows)

    def add(self, linear: Linear, x: torch.Tensor, rows: int, to: PassBuffers, post: torch.Tensor | None) -> int:
        """A product that is added to the residual stream: at once, or as parts, whose number is returned, by a norm."""
        if rows > FEW_TOKENS and post is None and self.config.residual_scale == 1:
            linear(x, to.x.view(-1), rows, add=True)
            return 0
        linear(x, to.parts, rows)
        return linear.parts(rows)

    def mix(self, mixture: Mixture, routed: torch.Tensor, rows: int, to: PassBuffers) -> int:
        """A mixture of experts, as parts, whose number is returned. `routed`: what the router reads."""
        mixture(to.h, to.parts, rows, routed)
        return 1

    def embed(self, rows: int, to: PassBuffers) -> None:
        """Write the embeddings of `to.ids` to `to.x`."""
        self.look_up(self.table, self.config.embedding_scale, to.ids, to.x, rows)

    def look_up(self, table: Matrix | None, factor: float, ids: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """Rows of a table, times a factor: float32."""
        assert table is not None
        if isinstance(table, RepackedMatrix):
            quantized.unpack_kernel[(rows, table.blocks)](
                *table.arrays, ids, out, factor, table.rows, table.columns,
                table.units, 1, True, False, table.form.code,
            )  # fmt: skip
        else:
            pointwise.embed_kernel[(rows,)](
                ids, table.matrix, out, factor, table.columns, power_of_two(table.columns)
            )  # fmt: skip

    def _norm(
        self, rows: int, to: PassBuffers, parts: int, post: torch.Tensor | None, weight: torch.Tensor | None,
        dropout: torch.Tensor | None = None, bias: torch.Tensor | None = None, copied: bool = False, scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """x = scale * (x + the parts of a product and its bias); h = norm(x) if there is a weight, or x if `copied`.

        `out`: what is written in place of h.
        """
        hidden, factor = self.config.hidden_size, self.config.residual_scale
        pointwise.norm_kernel[(rows,)](
            to.x, to.parts, bias, post, weight, dropout, to.h if out is None else out, FEW_TOKENS * hidden,
            self.config.norm_eps, factor, scale, hidden, parts,
            *(one is not None for one in (bias, post, weight, dropout)), factor != 1, copied and weight is None,
            scale != 1, power_of_two(hidden), num_warps=norm_warps(hidden),
        )  # fmt: skip

    def launch_head(self, x: torch.Tensor, h: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """The last norm and the head of `rows` rows, over padded buffers."""
        hidden = self.config.hidden_size
        pointwise.norm_kernel[(rows,)](
            x, None, None, None, self.norm, None, h, 0, self.config.norm_eps, 1.0, 1.0,
            hidden, 0, False, False, True, False, False, False, False, power_of_two(hidden),
            num_warps=norm_warps(hidden),
        )  # fmt: skip
        # A packed head is unpacked in registers only: in memory it would take a gigabyte.
        step = FEW_TOKENS if any(isinstance(piece, RepackedMatrix) for piece in self.head.pieces) else rows
        for first in range(0, rows, step):
            self.head(h[first:], out[first:].view(-1), min(step, rows - first))
        if self.config.logit_cap is not None:
            count = rows * self.head.features
            pointwise.cap_kernel[(-(-count // CAPPED),)](out, count, self.config.logit_cap, CAPPED)


def _columns(room: torch.Tensor, width: int) -> torch.Tensor:
    """The beginning of a buffer as rows of another width."""
    return room.view(-1)[: len(room) * width].view(len(room), width)


def norm_warps(hidden: int) -> int:
    """Warps of a norm, by the width alone: the order of its sums depends on it."""
    return 8 if hidden <= 1024 else 16
