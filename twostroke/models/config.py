"""What a decoder-only transformer is made of: one description for every family.

Families differ in a handful of switches, so there is one `ModelConfig` and no subclass. Checkpoint
loaders translate their own metadata into it; `tensor_shapes` names every tensor a model must have.
"""

from dataclasses import dataclass

from twostroke.models.rope import Rope


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and switches of one model.

    `windows[i]` is layer i's sliding window (a query at position p sees keys at positions > p - window),
    None for full attention. `ropes[i]` is layer i's rotary embedding.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    attention_scale: float
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    tied: bool = False  # the head is the embedding
    attention_bias: bool = False  # q, k and v have biases (Qwen2)
    qk_norm: bool = False  # RMSNorm over each head of q and k before RoPE (Qwen3, Gemma 3)
    post_norms: bool = False  # RMSNorm on what attention and MLP return, before the residual (Gemma 3)
    activation: str = "silu"  # "silu" or "gelu_tanh"
    embedding_scale: float = 1.0  # Gemma multiplies embeddings by sqrt(hidden_size)


def stored_names(config: ModelConfig, outer: dict[str, str], layers: str, parts: dict[str, str]) -> dict[str, str]:
    """Twostroke name -> a file format's, for every tensor of the model.

    `outer` names the tensors outside the layers; one of layer i is called `layers` (with {} for i) and its part.
    """
    names: dict[str, str] = {}
    for ours in tensor_shapes(config):
        if ours in outer:
            names[ours] = outer[ours]
        else:
            _, layer, part = ours.split(".")
            names[ours] = layers.format(layer) + parts[part]
    return names


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Twostroke name, with its shape; matrices are (out_features, in_features).

    Norm weights multiply as they are: a family that stores w - 1 (Gemma in Hugging Face form) is shifted on load.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "q": (q_size, hidden),
            "k": (kv_size, hidden),
            "v": (kv_size, hidden),
            "o": (hidden, q_size),
            "mlp_norm": (hidden,),
            "gate": (config.intermediate_size, hidden),
            "up": (config.intermediate_size, hidden),
            "down": (hidden, config.intermediate_size),
        }
        if config.attention_bias:
            layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
        if config.qk_norm:
            layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
        if config.post_norms:
            layer |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["norm"] = (hidden,)
    if not config.tied:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes
