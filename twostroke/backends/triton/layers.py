"""The weights of a layer on a device, and what a rank has of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twostroke.backends.interface import Weights
from twostroke.backends.triton.experts import ExpertBufferPool, Mixture, SharedExpert
from twostroke.backends.triton.kernels import recurrent
from twostroke.backends.triton.linear import ACTIVATIONS, FEW_TOKENS, GatedLinear, Linear, UnpackBuffer, place
from twostroke.backends.triton.recurrent import RecurrentLayer
from twostroke.backends.triton.token_inputs import LayerInputs
from twostroke.models import config as models
from twostroke.models.recurrent import RecurrentMixer
from twostroke.models.tensor_shapes import EXPERT_NORMS, SHARED_GATE

GATED_ROWS, GATED_COLUMNS = 16, 256  # that a program multiplies by the output gate


class LayerWeights:
    """Where the weights of a model are placed. A single process has all columns of all products."""

    def __init__(self, config: models.ModelConfig, device: str, own: models.ModelConfig | None) -> None:
        self.config, self.device, self.scratch = config, device, UnpackBuffer(device)
        self.own = config if own is None else own  # the description with those heads that are computed here
        self.rooms = ExpertBufferPool(device)

    def vector(self, values: np.ndarray) -> torch.Tensor:
        """A norm or a bias, float32."""
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(self.device)

    def whole_heads(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """All columns of heads [padded rows, own heads * D]; a single process has them."""
        return x

    def whole_bias(self, own: torch.Tensor) -> torch.Tensor:
        """The bias of a product that is added to the residual stream, of all columns; a single process has them."""
        return own

    def of_own_heads(self, values: torch.Tensor) -> torch.Tensor:
        """What there is for each head of queries, or of keys, of those that are computed here."""
        return values

    def whole_squares(self, own: torch.Tensor) -> torch.Tensor:
        """Squares [rows, own heads] of queries, or of keys, of all heads; a single process has them."""
        return own

    def whole_gated(self, gated: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        """All columns of gated values [padded rows, own], of which there are `width`; a single process has them."""
        return gated


class AttentionWeights:
    """The weights of a layer's attention."""

    def __init__(self, model: LayerWeights, index: int, prefix: str, weights: Weights) -> None:
        def vector(name: str) -> torch.Tensor:
            return model.vector(weights(prefix + name).dequantize())

        def linear(*names: str, of: int) -> Linear:
            return Linear([place(weights(prefix + name), model.device) for name in names], model.scratch, of=of)

        def norm(name: str, heads: int) -> torch.Tensor:
            values = vector(name)
            return model.of_own_heads(values.view(heads, -1)).reshape(-1) if attention.whole_norm else values

        self.attention = attention = model.config.layers[index].attention
        self.own = model.own.layers[index].attention  # `attention` with those heads that are computed here
        made = tuple(dict.fromkeys(attention.projections))
        queries, entries = attention.num_heads * attention.head_dim, attention.kv_values // 2
        self.qkv = linear(*made, of=queries + (len(made) - 1) * entries)
        self.gate = linear("q_gate", of=queries) if attention.output_gate else None
        self.bias = torch.cat([vector(f"{name}_bias") for name in made]) if attention.bias else None
        self.sink_logits = model.of_own_heads(vector("sink_logits")) if attention.sink_logits else None
        self.qk_norms: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if attention.qk_norm:  # a layer without keys of its own has no norm of them
            q_norm = norm("q_norm", attention.num_heads)
            self.qk_norms = q_norm, norm("k_norm", attention.num_kv_heads) if "k" in made else q_norm

    def gated(self, h: torch.Tensor, parts: torch.Tensor, attended: torch.Tensor, rows: int) -> None:
        """Multiply what attention has made by the output gate, if the layer has one."""
        if self.gate is None:
            return
        self.gate(h, parts, rows)
        blocks = -(-self.gate.features // GATED_COLUMNS)
        recurrent.output_gate_kernel[(-(-rows // GATED_ROWS), blocks)](
            attended, parts, FEW_TOKENS * self.gate.features, rows, SIZE=self.gate.features,
            PARTS=self.gate.parts(rows), ROWS=GATED_ROWS, BLOCK=GATED_COLUMNS,
        )  # fmt: skip

    @property
    def linears(self) -> Sequence[Linear]:
        """The products of a layer's inputs."""
        return (self.qkv,) if self.gate is None else (self.qkv, self.gate)


class TritonLayer:
    """The weights of a layer."""

    def __init__(self, model: LayerWeights, index: int, weights: Weights, kv_dtype: str) -> None:
        def vector(name: str) -> torch.Tensor:
            return model.vector(weights(prefix + name).dequantize())

        def matrix(name: str) -> Any:
            return place(weights(prefix + name), model.device)

        config, prefix = model.config, f"layers.{index}."
        layer, scratch, hidden = config.layers[index], model.scratch, config.hidden_size
        self.feed_forward = layer.feed_forward
        self.pre_norms = (vector("attn_norm"), vector("mlp_norm")) if layer.pre_norms else (None, None)
        self.scale = float(weights(prefix + "scale").dequantize()[0]) if layer.scaled else 1.0
        self.inputs: LayerInputs | None = None
        if config.token_inputs:
            gate, projection = (Linear([matrix(f"input_{name}")], scratch) for name in ("gate", "projection"))
            activation = ACTIVATIONS.index(layer.feed_forward.activation)
            self.inputs = LayerInputs(gate, projection, vector("input_norm"), activation)
        self.down_bias: torch.Tensor | None = None
        self.o_bias: torch.Tensor | None = None
        self.shared: SharedExpert | None = None
        if isinstance(layer.mixer, RecurrentMixer):
            inputs = Linear([matrix(name) for name in layer.mixer.projections], scratch)
            vectors = {name: vector(name) for name in layer.mixer.vectors}
            self.mixer: AttentionWeights | RecurrentLayer = RecurrentLayer(config, index, kv_dtype, inputs, vectors)
            self.o = Linear([matrix("state_o")], scratch, of=hidden)
        else:
            self.mixer = AttentionWeights(model, index, prefix, weights)
            self.o = Linear([matrix("o")], scratch, of=hidden)
            self.o_bias = model.whole_bias(vector("o_bias")) if layer.mixer.output_bias else None
        self.post_norms = (vector("attn_post_norm"), vector("mlp_post_norm")) if layer.post_norms else (None, None)
        self.expert_norms: list[torch.Tensor] = []
        if isinstance(layer.feed_forward, models.Experts):
            self.expert_norms = [vector(name) for name in EXPERT_NORMS] if layer.feed_forward.own_norms else []
            self.mixture = Mixture(layer.feed_forward, prefix, weights, model.rooms, model.whole_gated)
            if layer.feed_forward.shared_size:
                activation = ACTIVATIONS.index(layer.feed_forward.activation)
                gated = GatedLinear(matrix("shared.gate"), matrix("shared.up"), activation, scratch)
                gate = vector(SHARED_GATE) if layer.feed_forward.shared_gated else None
                down = Linear([matrix("shared.down")], scratch, of=hidden)
                self.shared = SharedExpert(gated, down, gate, self.expert_norms[2:], config.norm_eps)
        else:
            activation, biased = ACTIVATIONS.index(layer.feed_forward.activation), layer.feed_forward.bias
            bias = torch.cat([vector("gate_bias"), vector("up_bias")]) if biased else None
            self.gated = GatedLinear(matrix("gate"), matrix("up"), activation, scratch, bias)
            self.down = Linear([matrix("down")], scratch, of=hidden)
            self.down_bias = model.whole_bias(vector("down_bias")) if biased else None

    @property
    def linears(self) -> Sequence[Linear]:
        """The products whose outputs are parts."""
        shared = () if self.shared is None else (self.shared.down,)
        downs = shared if isinstance(self.feed_forward, models.Experts) else (self.down,)
        inputs = () if self.inputs is None else self.inputs.linears
        return (*self.mixer.linears, self.o, *downs, *inputs)
