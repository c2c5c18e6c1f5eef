"""The decoder-only transformer in PyTorch, built from a model's description."""

from collections.abc import Callable, Sequence

import torch

from twostroke.backends.hidden_inputs import HiddenJoin
from twostroke.backends.interface import Weights
from twostroke.backends.reference.activations import capped, gated
from twostroke.backends.reference.arrays import as_array
from twostroke.backends.reference.latent_attention import LatentAttentionLayer
from twostroke.backends.reference.linear_attention import GatedDeltaNetLayer, Mamba2Layer
from twostroke.backends.reference.operations import DenseWeight, Operations, TensorBatch
from twostroke.backends.reference.routing import route
from twostroke.backends.reference.states import ShortConvolutionLayer, StateLayer, StateWeights
from twostroke.models import config as models
from twostroke.models.layer_groups import entry_places
from twostroke.models.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from twostroke.models.tensor_shapes import EXPERT_NORMS, FACTORS, SELECTION_BIAS, SHARED_GATE

STATE_LAYERS: dict[type[RecurrentMixer], type[StateLayer]] = {
    GatedDeltaNet: GatedDeltaNetLayer,
    Mamba2: Mamba2Layer,
    ShortConvolution: ShortConvolutionLayer,
}


class AttentionLayer:
    """A layer's attention, without its output projection."""

    def __init__(
        self,
        config: models.ModelConfig,
        index: int,
        attention: models.Attention,
        operations: Operations,
        pack: Callable[..., DenseWeight],
    ) -> None:
        made = list(dict.fromkeys(attention.projections))
        self.attention, self.operations, self.eps = attention, operations, config.norm_eps
        self.place, self.score_cap = entry_places(config, operations.stored.name)[index], config.score_cap
        self.qkv = pack(*made, bias=[f"{name}_bias" for name in made] if attention.bias else ())
        self.gate = pack("q_gate") if attention.output_gate else None
        self.heads = operations.heads(config, index)
        self.sink_logits = pack("sink_logits").matrix if attention.sink_logits else None
        self.qk_norms = [pack(f"{name}_norm") for name in made[:2]] if attention.qk_norm else []

    def __call__(
        self, h: torch.Tensor, kv: Sequence[torch.Tensor], batch: TensorBatch, queries: list[torch.Tensor]
    ) -> torch.Tensor:
        """[N, hidden] -> [N, Hq * D]. Queries are appended."""
        ops, attention, (group, place) = self.operations, self.attention, self.place
        own = kv[group][place]
        q = ops.rope_store(ops.linear(h, self.qkv), own, batch, group, attention, self.qk_norms, self.eps)
        if batch.query_rows is not None:
            asked = ops.whole(q[batch.query_rows].flatten(1).float() * attention.scale, self.heads)
            queries.append(asked.view(len(asked), attention.num_heads, attention.head_dim))
        attended = ops.attention(q, own, batch, group, attention, self.score_cap, self.sink_logits, group + place)
        if self.gate is not None:
            attended = attended * torch.sigmoid(ops.linear(h, self.gate))
        return ops.whole(attended, self.heads)


class ReferenceLayer:
    """Attention, then feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: models.ModelConfig, index: int, operations: Operations, weights: Weights) -> None:
        def pack(*names: str, bias: Sequence[str] = ()) -> DenseWeight:
            prefix = f"layers.{index}."
            return operations.pack([weights(prefix + n) for n in names], [weights(prefix + n) for n in bias])

        layer = config.layers[index]
        self.operations, self.index, self.eps = operations, index, config.norm_eps
        self.feed_forward, self.residual_scale = layer.feed_forward, config.residual_scale
        self.beside, inputs = layer.beside, layer.feed_forward.inputs
        self.pre_norms = [pack(name) if name in layer.norms else None for name in ("attn_norm", "mlp_norm")]
        if isinstance(layer.mixer, RecurrentMixer):
            vectors = {name: operations.floats(weights(f"layers.{index}.{name}")) for name in layer.mixer.vectors}
            packed, kind = StateWeights(pack(*layer.mixer.projections), vectors), STATE_LAYERS[type(layer.mixer)]
            self.mixer: AttentionLayer | LatentAttentionLayer | StateLayer = kind(config, index, operations, packed)
            self.o = pack("state_o")
        else:
            made = AttentionLayer if layer.mixer.latent is None else LatentAttentionLayer
            self.mixer = made(config, index, layer.mixer, operations, pack)
            self.o = pack("o", bias=("o_bias",) if layer.mixer.output_bias else ())
        self.post_norms = (pack("attn_post_norm"), pack("mlp_post_norm")) if layer.post_norms else (None, None)
        self.scale = pack("scale").matrix if layer.scaled else None
        self.inputs = None
        if config.token_inputs:
            self.inputs = pack("input_gate"), pack("input_projection"), pack("input_norm")
        if isinstance(layer.feed_forward, models.Experts):
            biased = layer.feed_forward.bias
            self.router = pack("router", bias=("router_bias",) if biased else ())
            self.experts = [
                tuple(
                    pack(*names, bias=[f"{name}_bias" for name in names] if biased else ())
                    for names in ([f"experts.{e}.{part}" for part in inputs], [f"experts.{e}.down"])
                )
                for e in range(layer.feed_forward.count)
            ]
            self.selection = self.factors = self.shared = None
            if layer.feed_forward.selection_bias:
                self.selection = operations.floats(weights(f"layers.{index}.{SELECTION_BIAS}"))
            if layer.feed_forward.factors:
                self.factors = operations.floats(weights(f"layers.{index}.{FACTORS}"))
            self.expert_norms = [pack(name) for name in EXPERT_NORMS] if layer.feed_forward.own_norms else [None] * 4
            if layer.feed_forward.shared_size:
                gate = pack(SHARED_GATE) if layer.feed_forward.shared_gated else None
                self.shared = gate, pack(*(f"shared.{part}" for part in inputs)), pack("shared.down")
        elif layer.feed_forward.intermediate_size:
            biased = layer.feed_forward.bias
            self.gate_up = pack(*inputs, bias=[f"{part}_bias" for part in inputs] if biased else ())
            self.down = pack("down", bias=("down_bias",) if biased else ())

    def __call__(
        self,
        x: torch.Tensor,
        kv: Sequence[torch.Tensor],
        snapshots: torch.Tensor,
        batch: TensorBatch,
        queries: list[torch.Tensor],
        inputs: torch.Tensor | None,
        beside: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, hidden] -> [N, hidden]. `kv`, `snapshots`: see `ReferenceDecoder.forward`. Queries are appended.

        `inputs`: the layer's numbers of each row's token, [N, token_inputs], if it gets any. `beside`: what the mixer
        of the layer before has read. Returned with what this layer's mixer has read.
        """
        ops, h = self.operations, self._normed(x, self.pre_norms[0])
        h = read = beside if self.beside and beside is not None else h
        if isinstance(self.mixer, StateLayer):
            mixed = self.mixer(h, kv, snapshots, batch)
        else:
            mixed = self.mixer(h, kv, batch, queries)
        made = ops.whole(ops.linear(mixed, self.o), self.o.split)
        x = self._added(x, self._normed(made, self.post_norms[0]))
        if not self.feed_forward.intermediate_size:
            return x, read
        h = self._dropped(self._normed(x, self.pre_norms[1]), batch)
        if isinstance(self.feed_forward, models.Experts):
            made = self._mixture(x, h, batch, self.feed_forward)
        else:
            h = ops.gated_linear(h, self.gate_up, self.feed_forward.activation)
            made = ops.whole(ops.linear(h, self.down), self.down.split)
        x = self._added(x, self._normed(made, self.post_norms[1]))
        if self.inputs is not None and inputs is not None:
            gate, projection, norm = self.inputs
            h = gated(ops.whole(ops.linear(x, gate), gate.split), inputs, self.feed_forward.activation)
            x = x + ops.norm(ops.whole(ops.linear(h, projection), projection.split), norm, self.eps)
        return x if self.scale is None else x * self.scale, read

    def _normed(self, x: torch.Tensor, norm: DenseWeight | None) -> torch.Tensor:
        """After a norm, if the layer has it."""
        return x if norm is None else self.operations.norm(x, norm, self.eps)

    def _dropped(self, h: torch.Tensor, batch: TensorBatch) -> torch.Tensor:
        """Inputs of feed-forward after dropout, if the batch has it."""
        return h if batch.dropout is None else h * batch.dropout[self.index].to(h.dtype)

    def _added(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """The residual stream with a part's outputs."""
        return x + (made if self.residual_scale == 1 else made * self.residual_scale)

    def _mixture(self, x: torch.Tensor, h: torch.Tensor, batch: TensorBatch, experts: models.Experts) -> torch.Tensor:
        """Weighted sum of each row's experts, in the order of their ids. Experts that no row chose are not read.

        `h`: x after the layer's norm, which all read, or the shared expert alone.
        """
        ops, shared, (router_norm, norm, shared_post_norm, post_norm) = self.operations, h, self.expert_norms
        routed = h if router_norm is None else self._dropped(self._normed(x, router_norm), batch)
        h = h if norm is None else self._dropped(self._normed(x, norm), batch)
        ids, weights = route(routed, self.router, self.selection, self.factors, experts)
        split = self.experts[0][1].split
        total = h.new_zeros(len(h), split.own)
        for e in ids.unique().tolist():
            rows, slots = (ids == e).nonzero(as_tuple=True)
            gate_up, down = self.experts[e]
            made = ops.linear(ops.gated_linear(h[rows], gate_up, experts.activation), down)
            total[rows] += weights[rows, slots, None].to(h.dtype) * made
        if self.shared is not None:
            gate, gate_up, down = self.shared
            made = ops.linear(ops.gated_linear(shared, gate_up, experts.activation), down)
            if gate is not None:
                made = torch.sigmoid(shared.float() @ gate.matrix.float())[:, None].to(h.dtype) * made
            if experts.own_norms:
                made = self._normed(ops.whole(made, split), shared_post_norm)
                return made + self._normed(ops.whole(total, split), post_norm)
            total += made
        return ops.whole(total, split)


class ReferenceDecoder:
    """A model's weights and its forward pass over a ragged batch of tensors."""

    def __init__(
        self,
        config: models.ModelConfig,
        operations: Operations,
        weights: Weights,
        beside: "ReferenceDecoder | None" = None,
    ) -> None:
        """`beside`: another model, whose embedding and head are this one's too."""
        self.config, self.operations = config, operations
        self.embed = operations.pack([weights("embed")]) if beside is None else beside.embed
        self.join = None
        if config.takes_hidden:
            self.join = HiddenJoin.of(weights, config.norm_eps), operations.pack([weights("join.projection")])
        self.inputs = None
        if config.token_inputs:
            table, projection, norm = (weights(f"inputs.{name}") for name in ("embed", "projection", "norm"))
            self.inputs = operations.pack([table]), operations.pack([projection]), operations.pack([norm])
        self.layers = [ReferenceLayer(config, i, operations, weights) for i in range(config.num_layers)]
        self.norm = operations.pack([weights("norm")])
        if beside is not None:
            self.head = beside.head
        else:
            self.head = self.embed if config.tied else operations.pack([weights("head")])

    def forward(
        self, batch: TensorBatch, kv: Sequence[torch.Tensor], snapshots: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run the rows through every layer, writing their K and V.

        Args:
            kv: for each group of layers, [depth, parts, pages, Hkv, page_size, width].
            snapshots: all pages as `PageMemory.state_storage` has them.

        Returns:
            Hidden states of the wanted rows before the last norm, [W, hidden]; and, if requested, each layer's
            queries, [R, Hq, D], and the hidden states before, between and after the layers, [T, hidden] float32.
        """
        queries: list[torch.Tensor] = []
        x = self.operations.embed(self.embed, batch.token_ids, self.config.embedding_scale)
        if self.join is not None:
            assert batch.hidden is not None, "the model takes hidden states"
            join, projection = self.join
            x = self.operations.linear(torch.from_numpy(join(as_array(x.float()), batch.hidden)).to(x), projection)
        seen, read = [x], None
        inputs = self._inputs(batch.token_ids, x)
        for layer, own in zip(self.layers, inputs, strict=True):
            x, read = layer(x, kv, snapshots, batch, queries, own, read)
            if batch.state_rows is not None:
                seen.append(x)
        states = [] if batch.state_rows is None else [one[batch.state_rows].float() for one in seen]
        return x[batch.wanted], queries, states

    def _inputs(self, token_ids: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Each layer's numbers of the rows' tokens, whose embeddings are x: [N, token_inputs]."""
        if self.inputs is None:
            return [None] * len(self.layers)
        (table, projection, norm), size = self.inputs, self.config.token_inputs
        projected = self.operations.whole(self.operations.linear(x, projection), projection.split)
        projected = (projected * self.config.hidden_size**-0.5).view(len(x), -1, size)
        found = self.operations.embed(table, token_ids, size**0.5).view(projected.shape)
        return ((self.operations.norm(projected, norm, self.config.norm_eps) + found) * 2**-0.5).unbind(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        logits = self.operations.head(self.operations.norm(hidden, self.norm, self.config.norm_eps), self.head)
        logits = logits if self.config.logit_scale == 1 else logits * self.config.logit_scale
        return logits if self.config.logit_cap is None else capped(logits, self.config.logit_cap)
