"""The shapes of real models, and tiny ones for dry runs on a CPU."""

from __future__ import annotations

from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.rope import Rope, llama3


def _model(
    architecture: str,
    *,
    hidden: int,
    layers: int,
    heads: tuple[int, int, int],
    vocab: int,
    feed_forward: GatedMLP | Experts,
    rope: Rope,
    max_position: int,
    eps: float = 1e-6,
    tied: bool = False,
    bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """`heads`: query heads, KV heads, head_dim."""
    attention = Attention(*heads, scale=heads[2] ** -0.5, rope=rope, bias=bias, qk_norm=qk_norm)
    layer = Layer(attention, feed_forward)
    return ModelConfig(architecture, vocab, hidden, max_position, eps, (layer,) * layers, tied)


MODELS: dict[str, ModelConfig] = {
    "qwen2.5-0.5b": _model(
        "qwen2", hidden=896, layers=24, heads=(14, 2, 64), vocab=151936, feed_forward=GatedMLP(4864),
        rope=Rope(1e6), max_position=32768, tied=True, bias=True,
    ),
    "qwen2.5-1.5b": _model(
        "qwen2", hidden=1536, layers=28, heads=(12, 2, 128), vocab=151936, feed_forward=GatedMLP(8960),
        rope=Rope(1e6), max_position=32768, tied=True, bias=True,
    ),
    "llama-3.1-8b": _model(
        "llama", hidden=4096, layers=32, heads=(32, 8, 128), vocab=128256, feed_forward=GatedMLP(14336),
        rope=llama3(5e5, 128, 8.0, 8192, 1.0, 4.0), max_position=131072, eps=1e-5,
    ),
    "qwen3-30b-a3b": _model(
        "qwen3moe", hidden=2048, layers=48, heads=(32, 4, 128), vocab=151936, feed_forward=Experts(128, 8, 768),
        rope=Rope(1e6), max_position=40960, qk_norm=True,
    ),
    "tiny": _model(
        "llama", hidden=256, layers=2, heads=(4, 2, 64), vocab=512, feed_forward=GatedMLP(512),
        rope=Rope(1e4), max_position=4096,
    ),
    "tiny-moe": _model(
        "qwen3moe", hidden=256, layers=2, heads=(4, 2, 64), vocab=512, feed_forward=Experts(8, 2, 256),
        rope=Rope(1e4), max_position=4096, qk_norm=True,
    ),
}  # fmt: skip
