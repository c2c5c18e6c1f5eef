"""What a GGUF file's metadata and tensor names mean: the architectures llama, qwen2, qwen3 and gemma3.

Keys and defaults are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp); Mistral models are `llama` there.
"""

import re
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig, stored_names
from twostroke.models.rope import Rope

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
GEMMA3_PATTERN = 6  # five sliding layers, then a global one
GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not head_dim ** -0.5
LIMIT = 1 << 31  # no count in a real file comes near; a damaged one must not make us allocate by it
MAX_HEAD_DIM = 1 << 14

NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}
OUTER_NAMES = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
ROPE_FACTORS = "rope_freqs.weight"
# Tables that some converters wrote and nobody reads: frequencies follow from the metadata.
UNUSED = re.compile(r"blk\.\d+\.(attn_rot_embd|attn\.rotary_emb\.inv_freq)(\.weight)?|rope_freqs\.weight")


class _Metadata:
    """Typed access to the keys of one architecture; a missing or bad value is a CheckpointError naming the key."""

    def __init__(self, values: Mapping[str, Any], architecture: str, path: Path) -> None:
        self.values, self.architecture, self.path = values, architecture, path

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None, limit: int = LIMIT) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # a value per layer, all alike
        elif isinstance(value, list):
            raise UnsupportedArchitecture(f"{self.path}: {self.architecture}.{key} differs between layers")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
            raise self.wrong(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value <= 0:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def wrong(self, key: str, expected: str, value: Any) -> CheckpointError:
        shown = "missing" if value is None else repr(value)[:40]
        return CheckpointError(f"{self.path}: {self.architecture}.{key} must be {expected}; it is {shown}")

    def unsupported(self, what: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(f"{self.path}: architecture {self.architecture} {what}, which is not supported")


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor], path: Path) -> ModelConfig:
    """The model a file describes. Raises UnsupportedArchitecture for other architectures, and for variants of these
    (mixtures of experts, other RoPE scalings, tensors that we would have to ignore); CheckpointError for bad values."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedArchitecture(f"{path}: architecture {str(architecture)[:40]!r} is not supported, only {known}")
    meta = _Metadata(metadata, architecture, path)
    if experts := meta.get("expert_count"):
        raise meta.unsupported(f"with {experts!r:.20} experts (a mixture)")
    embedding = tensors.get(OUTER_NAMES["embed"])
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: there is no matrix {OUTER_NAMES['embed']}")
    gemma = architecture == "gemma3"
    hidden, num_heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    num_kv_heads = meta.integer("attention.head_count_kv", default=num_heads)
    # As many layers as the file has tensors for, lest a damaged count have us name billions of them.
    num_layers = meta.integer("block_count", limit=len(tensors) + 1)
    head_dim = meta.integer("attention.key_length", default=hidden // num_heads or None, limit=MAX_HEAD_DIM)
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(f"{path}: {num_heads} heads of {head_dim} and {num_kv_heads} KV heads cannot be")
    if meta.integer("attention.value_length", default=head_dim) != head_dim:
        raise meta.unsupported("with values of another size than keys")
    if meta.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise meta.unsupported("with RoPE on a part of each head")
    if meta.get("attn_logit_softcapping") or meta.get("final_logit_softcapping"):
        raise meta.unsupported("with capped logits")
    windows = _windows(meta, num_layers)
    rope = _rope(meta, head_dim, tensors.get(ROPE_FACTORS))
    ropes = (rope,) * num_layers
    attention_scale = head_dim**-0.5
    if gemma:
        local = Rope(meta.number("rope.freq_base_swa", default=1e4))
        ropes = tuple(rope if window is None else local for window in windows)
        if num_layers == GEMMA3_27B_LAYERS:
            attention_scale = (hidden / num_heads) ** -0.5
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=meta.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position=meta.integer("context_length"),
        norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        attention_scale=attention_scale,
        ropes=ropes,
        windows=windows,
        tied=OUTER_NAMES["head"] not in tensors,
        attention_bias=architecture == "qwen2",
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
    )
    expected = set(tensor_names(config).values())
    for name in tensors:
        if name not in expected and not UNUSED.fullmatch(name):
            raise meta.unsupported(f"with the tensor {name}")
    return config


def _windows(meta: _Metadata, num_layers: int) -> tuple[int | None, ...]:
    if meta.architecture == "gemma3":
        window = meta.integer("attention.sliding_window")
        pattern = meta.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):  # True for a sliding layer
            if len(pattern) != num_layers:
                raise meta.wrong("attention.sliding_window_pattern", f"{num_layers} long", pattern)
            return tuple(window if sliding else None for sliding in pattern)
        period = meta.integer("attention.sliding_window_pattern", default=GEMMA3_PATTERN)
        return tuple(None if (i + 1) % period == 0 else window for i in range(num_layers))
    if meta.architecture == "llama" and meta.get("attention.sliding_window"):  # Mistral 7B v0.1
        return (meta.integer("attention.sliding_window"),) * num_layers
    return (None,) * num_layers


def _rope(meta: _Metadata, head_dim: int, factors: RawTensor | None) -> Rope:
    """The rotary embedding of full-attention layers. Llama 3's scaling comes as a tensor, not as metadata."""
    base = meta.number("rope.freq_base", default=1e6 if meta.architecture == "gemma3" else 1e4)
    scaling = meta.get("rope.scaling.type")
    divisors = np.ones(head_dim // 2)
    if scaling == "linear":
        divisors *= meta.number("rope.scaling.factor")
    elif scaling not in (None, "none"):
        raise meta.unsupported(f"with RoPE scaling {str(scaling)[:40]!r}")
    elif meta.get("rope.scale_linear") is not None:  # the key's name before `rope.scaling`
        divisors *= meta.number("rope.scale_linear")
    if factors is not None:
        if factors.shape != (head_dim // 2,):
            raise CheckpointError(f"{factors.source}: shape {factors.shape} where {(head_dim // 2,)} is needed")
        values = factors.dequantize()
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(f"{factors.source}: RoPE factors must be positive")
        divisors = divisors * values
    return Rope(base, None if (divisors == 1).all() else tuple(divisors.tolist()))


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Twostroke name -> name in a GGUF file, for every tensor of the model."""
    return stored_names(config, OUTER_NAMES, "blk.{}.", NAMES)


def tensor_transforms(config: ModelConfig) -> dict[str, Callable[[RawTensor], RawTensor]]:
    """llama files hold Q and K with the two halves of each head interleaved, (i, i + half) side by side: undo that."""
    if config.architecture != "llama":
        return {}

    def split_halves(tensor: RawTensor) -> RawTensor:
        rows = np.arange(tensor.shape[0]).reshape(-1, config.head_dim // 2, 2)
        return tensor.permute_rows(rows.swapaxes(1, 2).reshape(-1))

    return {f"layers.{i}.{part}": split_halves for i in range(config.num_layers) for part in ("q", "k")}
