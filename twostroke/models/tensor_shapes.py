"""The tensors of a model by their Twostroke names, and their shapes."""

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.recurrent import RecurrentMixer


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by Twostroke name; matrices are (out_features, in_features).

    Norm weights are the factors themselves: a family that stores w - 1 (Gemma in Hugging Face form) is shifted on load.
    Each matrix of each expert is a tensor: `layers.3.experts.7.gate`.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    if size := config.token_inputs:
        every = config.num_layers * size
        shapes |= {"inputs.embed": (config.vocab_size, every), "inputs.projection": (every, config.hidden_size)}
        shapes["inputs.norm"] = (size,)
    if config.takes_hidden:
        shapes["join.projection"] = (config.hidden_size, 2 * config.hidden_size)
        shapes |= dict.fromkeys(JOIN_NORMS, (config.hidden_size,))
    for i, layer in enumerate(config.layers):
        own = layer_shapes(layer, config.hidden_size, size)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    shapes["norm"] = (config.hidden_size,)
    if not config.tied:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(layer: Layer, hidden: int, inputs: int = 0) -> dict[str, tuple[int, ...]]:
    """The same of one layer, which gets so many `inputs` of each token; names are without its index."""
    mixer, feed_forward = layer.mixer, layer.feed_forward
    shapes: dict[str, tuple[int, ...]] = {
        **({"attn_norm": (hidden,)} if "attn_norm" in layer.norms else {}),
        **(_state_shapes(mixer, hidden) if isinstance(mixer, RecurrentMixer) else _attention_shapes(mixer, hidden)),
        **({"mlp_norm": (hidden,)} if "mlp_norm" in layer.norms else {}),
    }
    mlp = _mlp_shapes(feed_forward, feed_forward.intermediate_size, hidden)
    if feed_forward.bias:
        mlp |= {f"{part}_bias": shape[:1] for part, shape in mlp.items()}
    if isinstance(feed_forward, Experts):
        if feed_forward.bias:
            shapes[f"{ROUTER}_bias"] = (feed_forward.count,)
        if feed_forward.selection_bias:
            shapes[SELECTION_BIAS] = (feed_forward.count,)
        if feed_forward.factors:
            shapes[FACTORS] = (feed_forward.count,)
        if feed_forward.own_norms:
            shapes |= dict.fromkeys(EXPERT_NORMS, (hidden,))
        shapes[ROUTER] = (feed_forward.count, hidden)
        shapes |= {f"experts.{e}.{part}": shape for e in range(feed_forward.count) for part, shape in mlp.items()}
        if feed_forward.shared_size:
            shared = _mlp_shapes(feed_forward, feed_forward.shared_size, hidden)
            shapes |= {SHARED_GATE: (hidden,)} if feed_forward.shared_gated else {}
            shapes |= {f"shared.{part}": shape for part, shape in shared.items()}
    elif feed_forward.intermediate_size:
        shapes |= mlp
    if layer.scaled:
        shapes["scale"] = (1,)
    if layer.post_norms:
        shapes |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    return shapes | _input_shapes(inputs, hidden)


def _attention_shapes(attention: Attention, hidden: int) -> dict[str, tuple[int, ...]]:
    if attention.latent is not None:
        return attention.latent.shapes(attention.num_heads, hidden) | {"o": (hidden, attention.mixed)}
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q": (q_size, hidden),
        **dict.fromkeys(attention.projections[1:], (kv_size, hidden)),
        **({"q_gate": (q_size, hidden)} if attention.output_gate else {}),
        "o": (hidden, q_size),
    }
    if attention.sink_logits:
        shapes["sink_logits"] = (attention.num_heads,)
    if attention.output_bias:
        shapes["o_bias"] = (hidden,)
    if attention.bias:
        shapes |= {f"{part}_bias": (q_size if part == "q" else kv_size,) for part in attention.projections}
    if attention.qk_norm:
        whole = {"q": q_size, "k": kv_size} if attention.whole_norm else {}
        shapes |= {f"{part}_norm": (whole.get(part, attention.head_dim),) for part in attention.projections[:2]}
    return shapes


def _state_shapes(state: RecurrentMixer, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {part: (size, hidden) for part, size in state.projections.items()}
    return shapes | {"state_o": (hidden, state.v_size)} | state.vectors


def _mlp_shapes(one: GatedMLP | Experts, size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(one.inputs, (size, hidden)) | {"down": (hidden, size)}


def _input_shapes(size: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of what a layer does with its numbers of a token."""
    names = {"input_gate": (size, hidden), "input_projection": (hidden, size), "input_norm": (hidden,)}
    return names if size else {}


# Of a model that takes hidden states: of embeddings, of hidden states, and before the latter the last norm of the model
# that they come from.
JOIN_NORMS = ("join.embed_norm", "join.hidden_norm", "join.main_norm")
SELECTION_BIAS = "selection_bias"  # of the router
SHARED_GATE = "shared_gate"  # of the shared expert
FACTORS = "expert_factors"
# Before the router and the experts, and after the shared expert and the others.
EXPERT_NORMS = ("router_norm", "experts_norm", "shared_post_norm", "experts_post_norm")
ROUTER = "router"  # always float32: it is small, and a wrong choice of experts costs much quality


def is_weight_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the tensor with this Twostroke name is multiplied in its stored format, and may be re-encoded."""
    return len(shape) == 2 and not name.endswith((f".{ROUTER}", ".conv"))


def is_product(name: str, shape: tuple[int, ...]) -> bool:
    """Whether rows are multiplied with a tensor of a layer, the router included."""
    return len(shape) == 2 and name != "conv"
