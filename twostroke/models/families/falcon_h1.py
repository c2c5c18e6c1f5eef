"""Falcon-H1: attention and Mamba-2 beside each other in each layer, then an MLP (TII 2025, arXiv:2507.22448).

A layer of a file is two of ours: Mamba-2 alone, then attention that reads the same, with the MLP. Matrices have factors
(after muP): GGUF files have them in the matrices already, as ours have once they are loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.config import GatedMLP, Layer, ModelConfig
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import (
    GGUF_PARTS,
    HUGGINGFACE_PARTS,
    MATRICES,
    Transform,
    attention_of,
    mlp_of,
    model_of,
)
from twostroke.models.families.mamba2 import MAMBA2_GGUF, MAMBA2_GGUF_KEYS, Mamba2Family, mamba2_of, mamba2_parts
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import tensor_shapes

KEPT: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class FalconH1(Mamba2Family):
    name = "falcon_h1"
    gguf = "falcon-h1"
    model_types = ("falcon_h1",)
    transformers = "FalconH1ForCausalLM"
    huggingface_outer: ClassVar = {"norm": "final_layernorm.weight"}
    huggingface_parts: ClassVar = (
        HUGGINGFACE_PARTS
        | {"mlp_norm": "pre_ff_layernorm.weight"}
        | {part: f"feed_forward.{part}_proj.weight" for part in ("gate", "up", "down")}
        | mamba2_parts("mamba")
    )
    gguf_keys: ClassVar = MAMBA2_GGUF_KEYS
    gguf_parts: ClassVar = GGUF_PARTS | MAMBA2_GGUF | {"mlp_norm": "ffn_norm"}

    def describe(self, source: ConfigSource) -> ModelConfig:
        if not source.biases.isdisjoint(MATRICES) or source.get("projectors_bias"):
            raise source.unsupported("biases of matrices")
        inner, normed = None, bool(source.get("mamba_rms_norm")) or source.has("state_norm")
        if source.format == "huggingface" and source.get("mamba_d_ssm") is not None:
            inner = source.integer("mamba_d_ssm")
        if source.format == "huggingface" and normed and source.get("mamba_norm_before_gate"):
            raise source.unsupported("norms of Mamba-2 before its gate")
        mlp, attention = mlp_of(source), attention_of(source)
        mamba = Layer(mamba2_of(source, inner=inner, normed=normed), GatedMLP(0, mlp.activation))
        layers = [mamba, Layer(attention, mlp, beside=True)] * source.num_layers
        if source.format == "gguf":
            return model_of(source, self, layers)
        scales = {
            "embedding_scale": source.number("embedding_multiplier", 1.0),
            "logit_scale": source.number("lm_head_multiplier", 1.0),
        }
        return model_of(source, self, layers, factors=self._factors(source), **scales)

    def _factors(self, source: ConfigSource) -> tuple[tuple[str, float], ...]:
        """Those of matrices, by a layer's part."""

        def several(key: str, count: int) -> list[float]:
            values = source.get(key)
            if not isinstance(values, list) or len(values) != count:
                raise source.wrong(key, f"a list of {count} numbers")
            return [source.checked(key, one) for one in values]

        gate, down = several("mlp_multipliers", 2)
        into, into_states = (source.number(f"{part}_in_multiplier", 1.0) for part in ("attention", "ssm"))
        out, out_of_states = (source.number(f"{part}_out_multiplier", 1.0) for part in ("attention", "ssm"))
        found = {"gate": gate, "down": down, "q": into, "k": into * source.number("key_multiplier", 1.0), "v": into}
        found |= {"o": out, "state_o": out_of_states}
        states = zip("zvkqa", several("ssm_multipliers", 5), strict=True)
        found |= {f"state_{part}": into_states * factor for part, factor in states}
        return tuple((part, factor) for part, factor in found.items() if factor != 1)

    def stored_layer(self, config: ModelConfig, layer: int, part: str) -> int:
        return layer // 2

    def transforms(self, config: ModelConfig, format: str) -> dict[str, Transform]:
        factors, names = dict(config.factors), (name.split(".") for name in tensor_shapes(config))
        found = {".".join(name): _times(factors[name[-1]]) for name in names if name[-1] in factors}
        return found | super().transforms(config, format)


def _times(factor: float) -> Transform:
    def multiply(tensor: RawTensor) -> RawTensor:
        if tensor.format not in KEPT:
            raise CheckpointError(f"{tensor.source}: {tensor.format} has no factors, only {', '.join(KEPT)}")
        values = (tensor.dequantize() * np.float32(factor)).astype(KEPT[tensor.format])
        return replace(tensor, data=values.reshape(len(tensor.data), -1).view(np.uint8))

    return multiply
