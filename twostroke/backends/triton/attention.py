"""Attention in a pass: turns of RoPE, the store of K and V, and the division of its work among programs."""

import numpy as np
import torch

from twostroke.backends.triton.kernels import attention as attending
from twostroke.backends.triton.kernels import pointwise
from twostroke.backends.triton.layers import AttentionWeights, LayerWeights
from twostroke.backends.triton.pass_buffers import PassBuffers, PlanTensors
from twostroke.backends.triton.pass_plan import FEW_ROWS, LOG2_E, MAX_PARTS, HeadShape, PassShape, keys_of, power_of_two
from twostroke.backends.triton.tile_shapes import FEW_TOKENS
from twostroke.models import config as models
from twostroke.models.kv_formats import kv_format
from twostroke.models.layer_groups import entry_places, layer_groups
from twostroke.models.rope import amplitudes, frequencies

HEADS = 8  # that a program rotates and stores
COLUMNS = 32  # of a head that a program adds the parts of


class AttentionPass(LayerWeights):
    """The launches of attention, for layers of any sizes.

    Attributes:
        shapes: the distinct shapes of heads that are computed here, as the plan counts them.
        has_heads: False for a rank without heads, where nothing is stored and nothing attends.
    """

    has_heads = True

    def __init__(self, config: models.ModelConfig, device: str, kv_dtype: str, own: models.ModelConfig | None) -> None:
        super().__init__(config, device, own)
        self.shapes = list(dict.fromkeys(map(HeadShape.of, self.own.attentions)))
        self.places, self.groups = entry_places(config, kv_dtype), len(layer_groups(config, kv_dtype))
        codes = kv_format(kv_dtype).codes
        self.v_bits = codes[1].bits if codes else 0
        self.ropes = list(dict.fromkeys((one.rope, one.head_dim) for one in config.attentions))
        width, heads = max(one.heads * one.dim for one in self.shapes), max(one.heads for one in self.shapes)
        self.sums = torch.empty(MAX_PARTS * width, dtype=torch.float32, device=device)
        self.tops, self.totals = (torch.empty(MAX_PARTS * heads, dtype=torch.float32, device=device) for _ in range(2))
        self.turns: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.growths: dict[models.QueryGrowth | None, torch.Tensor] = {}

    def reach(self, positions: int) -> bool:
        """Make the tables of RoPE's turns cover so many positions. Returns whether they are new ones."""
        if self.turns and len(self.turns[0][0]) >= positions:
            return False
        count = max(power_of_two(positions), min(self.config.max_position, 1 << 17))
        at = np.arange(count, dtype=np.float32)[:, None]
        growing = {one.growth for one in self.config.attentions if one.growth is not None}
        self.growths = {growth: self.vector(growth.factors(at[:, 0])) for growth in growing}
        self.turns = []
        for rope, dim in self.ropes:
            angles, sizes = at * frequencies(rope, dim), amplitudes(rope, dim)
            cos, sin = (turn(angles, dtype=np.float64).astype(np.float32) * sizes for turn in (np.cos, np.sin))
            self.turns.append((self.vector(cos), self.vector(sin)))
        return True

    def stages(self, dim: int) -> int:
        """Of the rotation of heads of this width; 0 if they are stored as numbers."""
        return dim.bit_length() - 1 if self.v_bits else 0

    def squares(self, layer: AttentionWeights, rows: int, to: PassBuffers) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sum of squares of each head of q and of k, [rows, heads] of the whole model; None if no norm needs it."""
        own = layer.own
        if not own.whole_norm:
            return None
        counts = own.num_heads, own.num_kv_heads
        mine = [room[: rows * count].view(rows, count) for room, count in zip(to.squares, counts, strict=True)]
        if layer.qkv.features:
            pointwise.head_squares_kernel[(rows, -(-sum(counts) // HEADS))](
                to.parts, FEW_TOKENS * layer.qkv.features, layer.bias, *mine,
                HQ=own.num_heads, HKV=own.num_kv_heads, D=own.head_dim, PARTS=layer.qkv.parts(rows),
                BIAS=layer.bias is not None, HEADS=HEADS, BLOCK=power_of_two(own.head_dim),
                num_warps=2,
            )  # fmt: skip
        q, k = (self.whole_squares(one) for one in mine)
        return q, k

    def store(
        self,
        i: int,
        layer: AttentionWeights,
        rows: int,
        work: PlanTensors,
        to: PassBuffers,
        kv: torch.Tensor,
        squares: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Queries to `to.q`, keys and values to their pages `kv`, unless they are another layer's."""
        if not self.has_heads:
            return
        own, (group, place) = layer.own, self.places[i]
        cos, sin = self.turns[self.ropes.index((own.rope, own.head_dim))]
        kv_heads = 0 if own.source is not None else own.num_kv_heads
        heads = own.num_heads + 2 * kv_heads
        q_norm, k_norm = layer.qk_norms
        pointwise.rope_store_kernel[(rows, -(-heads // HEADS))](
            to.parts, FEW_TOKENS * layer.qkv.features, layer.bias, q_norm, k_norm, *(squares or (None, None)),
            self.config.norm_eps, cos, sin, self.growths.get(own.growth), work.positions,
            work.cells.view(self.groups, -1)[group], to.q, kv, kv.stride(2), place,
            HQ=own.num_heads, HKV=kv_heads, D=own.head_dim, PAGE=kv.shape[4], PARTS=layer.qkv.parts(rows),
            BIAS=layer.bias is not None, NORMS=q_norm is not None,
            WHOLE=layer.attention.num_heads if own.whole_norm else 0, VALUE_NORM=own.value_norm,
            SAME=own.keys_as_values, GROWS=own.growth is not None, HEADS=HEADS, HALF=power_of_two(own.head_dim // 2),
            WIDTH=kv.shape[5], V_BITS=self.v_bits, STAGES=self.stages(own.head_dim),
            num_warps=2,
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
        if not self.has_heads:
            return
        own, sinks, cap = layer.own, layer.sink_logits, self.config.score_cap
        which, (group, place) = self.shapes.index(HeadShape.of(own)), self.places[i]
        heads, kv_heads, dim, tall = own.num_heads, own.num_kv_heads, own.head_dim, shape.tall[which]
        block = max(16, power_of_two(dim))
        biases = None if biases is None else biases[group:]  # layers are of one group, or have one each
        scale = own.scale / (dim if self.v_bits else 1)  # rotated twice, a number is times `dim`
        attending.attention_kernel[(shape.items[which], kv_heads)](
            work.work[which], to.q, kv, to.cells[group], to.positions, sinks, biases, to.attended,
            self.sums, self.tops, self.totals, kv.stride(2), place, (scale if cap is None else cap) * LOG2_E,
            own.window or 0, 0 if biases is None else biases.shape[2], 0.0 if cap is None else scale / cap,
            HQ=heads, HKV=kv_heads, D=dim, PAGE=kv.shape[4], WINDOW=own.window is not None, ROWS=tall,
            KEYS=keys_of(dim), BLOCK_D=block, SPLIT=shape.joined[which] > 0, SINKS=sinks is not None,
            BIASED=biases is not None, CAPPED=cap is not None, WIDTH=kv.shape[5], V_BITS=self.v_bits,
            STAGES=self.stages(dim), **attention_options(tall, block),
        )  # fmt: skip
        if shape.joined[which]:
            columns = dim if self.v_bits else COLUMNS
            attending.combine_kernel[(shape.joined[which], heads, -(-dim // columns))](
                work.joined[which], self.sums, self.tops, self.totals, sinks, to.attended,
                HQ=heads, D=dim, BLOCK_D=columns, BLOCK=32, SINKS=sinks is not None, STAGES=self.stages(dim),
                num_warps=1,
            )  # fmt: skip


def attention_options(tall: int, block: int) -> dict[str, int]:
    """Compile options of attention's kernel, by rows of its tile of queries and by the padded width of heads.

    Stages hide the loads of keys and values. Narrow heads leave registers for three programs a multiprocessor.
    """
    if tall == FEW_ROWS:
        return {"num_warps": 4 if block <= 256 else 8, "num_stages": 3 if block <= 128 else 2}
    if block <= 64:
        return {"num_warps": 4, "num_stages": 3, "maxnreg": 168}
    return {"num_warps": 8, "num_stages": 5 if block <= 128 else 2}
