"""The shapes of models that no package carries, for files with random weights (random_gguf.py): for speed alone.

Names of tensors are those of llama.cpp's converter, types those of a usual Q4_K_M or MXFP4 file. The vocabulary is
that of Qwen2.5-Coder (151,936 tokens, where Llama 3 has 128,256 and gpt-oss 201,088).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

VOCAB = 151_936
POSITIONS = 40_960
Tensors = Iterator[tuple[str, tuple[int, ...], str]]  # name, shape (rows first), type as GGUF calls it


@dataclass(frozen=True)
class Shape:
    """What tells models apart; widths are numbers of values."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_base: float
    experts: int = 0
    used_experts: int = 0
    more: dict[str, Any] = field(default_factory=dict[str, Any])  # further metadata, after "ARCH."

    @property
    def quantization(self) -> str:
        return "MXFP4" if self.arch == "gpt-oss" else "Q4_K_M"

    def tensors(self) -> Tensors:
        yield "token_embd.weight", (VOCAB, self.hidden), "Q8_0" if self.arch == "gpt-oss" else "Q4_K"
        for layer in range(self.layers):
            for name, shape, kind in self._layer(layer):
                yield f"blk.{layer}.{name}", shape, kind
        yield "output_norm.weight", (self.hidden,), "F32"
        yield "output.weight", (VOCAB, self.hidden), "Q8_0" if self.arch == "gpt-oss" else "Q6_K"

    def _layer(self, layer: int) -> Tensors:
        """Half of the layers have more bits in two matrices, as in llama.cpp's Q4_K_M."""
        eighth = self.layers // 8
        more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        oss = self.arch == "gpt-oss"
        usual, better = ("Q8_0", "Q8_0") if oss else ("Q4_K", "Q6_K" if more else "Q4_K")
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attn_norm.weight", (self.hidden,), "F32"
        for name, rows, kind in (("q", q, usual), ("k", kv, usual), ("v", kv, better)):
            yield f"attn_{name}.weight", (rows, self.hidden), kind
            if oss:
                yield f"attn_{name}.bias", (rows,), "F32"
        yield "attn_output.weight", (self.hidden, q), usual
        if oss:
            yield "attn_output.bias", (self.hidden,), "F32"
            yield "attn_sinks.weight", (self.heads,), "F32"
        if self.arch in ("qwen3", "qwen3moe"):
            yield "attn_q_norm.weight", (self.head_dim,), "F32"
            yield "attn_k_norm.weight", (self.head_dim,), "F32"
        yield f"{'post_attention' if oss else 'ffn'}_norm.weight", (self.hidden,), "F32"
        yield from self._mlp("MXFP4" if oss else usual, "MXFP4" if oss else better, biased=oss)

    def _mlp(self, usual: str, better: str, *, biased: bool) -> Tensors:
        each, end = ((self.experts,), "_exps") if self.experts else ((), "")
        if self.experts:
            yield "ffn_gate_inp.weight", (self.experts, self.hidden), "F32"
            if biased:
                yield "ffn_gate_inp.bias", (self.experts,), "F32"
        into, out = (self.mlp, self.hidden), (self.hidden, self.mlp)
        for name, size, kind in (("gate", into, usual), ("up", into, usual), ("down", out, better)):
            yield f"ffn_{name}{end}.weight", (*each, *size), kind
            if biased:
                yield f"ffn_{name}{end}.bias", (*each, size[0]), "F32"


OSS = {
    "expert_feed_forward_length": 2880, "attention.sliding_window": 128, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096,
}  # fmt: skip
SHAPES = {
    "random-llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14_336, 5e5),
    "random-qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12_288, 1e6),
    "random-qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 768, 1e6, 128, 8, {"expert_feed_forward_length": 768}
    ),
    "random-gpt-oss-20b": Shape("gpt-oss", 24, 2880, 64, 8, 64, 2880, 1.5e5, 32, 4, OSS),
}
