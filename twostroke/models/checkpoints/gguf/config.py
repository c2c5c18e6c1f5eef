"""The model's description in a GGUF file's metadata, read by config.json's keys, which families use.

Keys and defaults are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.pooling import GGUF_DENSE
from twostroke.models.config import ModelConfig
from twostroke.models.families import BY_GGUF, BY_NAME, Family
from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.family import GGUF_KEYS, GGUF_OUTER, MAX_HEAD_DIM
from twostroke.models.families.missing import reason
from twostroke.models.families.tensor_names import StoredName, guesser_of, stored_names, unread_names
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.rope import Rope, linear, longrope, yarn, yarn_amplitude

JOINED_QKV = dict.fromkeys("qkv", "attn_qkv.weight") | dict.fromkeys(("q_bias", "k_bias", "v_bias"), "attn_qkv.bias")
EACH_EXPERT = {f"experts.{part}": f"ffn_{part}.{{}}.weight" for part in ("gate", "up", "down")}
GATE_AND_UP: Mapping[str, str] = dict.fromkeys(("experts.gate", "experts.up"), "ffn_gate_up_exps.weight")
ROPE_FACTORS = "rope_freqs.weight"
# Tables that some converters write. They are not read: the frequencies follow from the metadata, and the classifier of
# a model that ranks is two rows of its head.
UNUSED = re.compile(
    r"blk\.\d+\.(attn_rot_embd|attn\.rotary_emb\.inv_freq)(\.weight)?|rope_(freqs|factors_long|factors_short)\.weight|"
    r"cls\.output\.weight"
)


class GgufSource(ConfigSource):
    """Typed access to the metadata of one file, by config.json's keys."""

    format = "gguf"

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor], family: Family, path: Path
    ) -> None:
        self.family, self.path = family, path
        self._metadata, self._tensors = metadata, tensors
        self._keys = GGUF_KEYS | dict(family.gguf_keys)
        embedding = tensors.get(GGUF_OUTER["embed"])
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"{path}: there is no matrix {GGUF_OUTER['embed']}")
        self.vocab_size = embedding.shape[0]
        self.tied = GGUF_OUTER["head"] not in tensors
        parts = parts_of(family, tensors)
        biases = (ours for ours in parts if ours.endswith("_bias") and f"blk.0.{parts[ours]}" in tensors)
        self.biases = frozenset(ours.removesuffix("_bias") for ours in biases)
        self.num_matrices = sum(prod(tensor.shape[:-2]) for tensor in tensors.values() if len(tensor.shape) > 1)
        # As many layers as the file has tensors for, or a damaged count would have us name billions of them.
        every = self.integer("num_hidden_layers", limit=len(tensors) + 1)
        guessing = self.get("nextn_predict_layers") or 0  # the last layers, which guess further tokens: not read
        if type(guessing) is not int or not 0 <= guessing < every:
            raise self.wrong("nextn_predict_layers", f"from 0 to below {every}")
        self.num_layers, self.guessing = every - guessing, guessing
        values = parts["v"]
        self.without_values = frozenset(i for i in range(self.num_layers) if f"blk.{i}.{values}" not in tensors)

    @property
    def architecture(self) -> str:
        return str(self.family.gguf)

    def name(self, key: str) -> str:
        """The GGUF name of a config.json key; other keys are GGUF names already."""
        return f"{self.family.gguf}.{self._keys.get(key, key)}"

    def get(self, key: str) -> Any:
        found = self._metadata.get(self.name(key))
        return self.family.gguf_defaults.get(key) if found is None else found

    def has(self, part: str) -> bool:
        return f"blk.0.{self.family.gguf_parts[part]}" in self._tensors

    def per_layer(self, key: str) -> Any:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            return value
        if any(one != value[0] for one in value):
            raise UnsupportedArchitecture(f"{self.path}: {self.name(key)} differs between layers")
        return value[0]

    def rope(self, head_dim: int, kind: str | None = None) -> Rope:
        """Sliding layers have a base and no scaling. The scalings of Llama 3 and Phi-3 are tensors."""
        if kind == "sliding_attention":
            return Rope(self.number("rope_local_base_freq", default=self.number("rope_theta", default=1e4)))
        base, whole = self.number("rope_theta", default=1e4), head_dim
        if self.family.partial_rope:
            head_dim = self.integer("rope.dimension_count", default=head_dim, limit=head_dim + 1)
            if head_dim % 2:
                raise self.wrong("rope.dimension_count", "an even number")
        rope = self._turns(base, head_dim)
        return rope if head_dim == whole else replace(rope, rotated=head_dim)

    def _turns(self, base: float, head_dim: int) -> Rope:
        """The RoPE of so many numbers of a head."""
        scaling = self._scaling(base, head_dim)
        if (factors := self._factors(ROPE_FACTORS, head_dim)) is None:
            return scaling
        if scaling.factors is not None:
            factors = factors * np.array(scaling.factors)
        return replace(scaling, factors=None if (factors == 1).all() else tuple(factors.tolist()))

    def _scaling(self, base: float, head_dim: int) -> Rope:
        """The scaling that the metadata state, as llama.cpp computes it (src/llama-context.cpp)."""
        kind = self.get("rope.scaling.type")
        amplitude = self.number("rope.scaling.attn_factor", default=1.0)
        long, short = (self._factors(f"rope_factors_{which}.weight", head_dim) for which in ("long", "short"))
        if long is not None and short is not None:  # Phi-3's files state no type
            context = self.number("max_position_embeddings")
            original = self.number("rope.scaling.original_context_length", default=context)
            return longrope(base, short.tolist(), long.tolist(), original, context, amplitude)
        if kind in (None, "none", "linear"):
            old = self.get("rope.scale_linear")  # the key's name before `rope.scaling`
            key = "rope.scale_linear" if kind is None and old is not None else "rope.scaling.factor"
            factor = 1.0 if kind == "none" else self.number(key, default=1.0) if kind is None else self.number(key)
            return replace(Rope(base) if factor == 1 else linear(base, head_dim, factor), amplitude=amplitude)
        if kind == "yarn" and base > 1:
            factor = self.number("rope.scaling.factor")
            multiplier = self.get("rope.scaling.yarn_log_multiplier")  # DeepSeek's mscale_all_dim
            strength = self.get("rope.scaling.yarn_ext_factor")
            if strength == 0:
                amplitude *= self.number("rope.scaling.yarn_attn_factor", default=1.0)
            else:  # llama.cpp reads no factor then, even where the file has one (OLMo 3)
                amplitude *= yarn_amplitude(factor, 1.0, 0.0 if multiplier is None else float(multiplier))
            return yarn(
                base,
                head_dim,
                factor,
                self.number("rope.scaling.original_context_length", default=self.number("max_position_embeddings")),
                amplitude=amplitude,
                beta_fast=self.number("rope.scaling.yarn_beta_fast", default=32.0),
                beta_slow=self.number("rope.scaling.yarn_beta_slow", default=1.0),
                truncate=self.get("rope.scaling.truncate") is not False,  # no file has it: gpt-oss does not truncate
                strength=1.0 if strength is None or strength < 0 else float(strength),
            )
        raise self.unsupported(f"RoPE scaling {str(kind)[:40]!r}")

    def _factors(self, name: str, head_dim: int) -> np.ndarray | None:
        """Divisors of frequencies that a tensor holds: [head_dim / 2]."""
        if (factors := self._tensors.get(name)) is None:
            return None
        if factors.shape != (head_dim // 2,):
            raise CheckpointError(f"{factors.source}: shape {factors.shape} where {(head_dim // 2,)} is needed")
        values = factors.dequantize()
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise CheckpointError(f"{factors.source}: RoPE factors must be positive")
        return values


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor], path: Path) -> ModelConfig:
    """The model that a file describes.

    Raises:
        UnsupportedArchitecture: another architecture, or a variant (other RoPE scalings, tensors without a known use).
        CheckpointError: bad values.
    """
    architecture = metadata.get("general.architecture")
    family = BY_GGUF.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        why = reason(architecture, ", ".join(BY_GGUF))
        raise UnsupportedArchitecture(f"{path}: architecture {str(architecture)[:40]!r} {why}")
    source = GgufSource(metadata, tensors, family, path)
    _refuse_variants(source)
    config = family.describe(source)
    expected = {name.tensor for name in tensor_names(config, tensors).values()}
    expected |= unread_names(config, "blk.{}.", family.gguf_parts) | set(GGUF_DENSE)
    for name in tensors:
        layer = re.match(r"blk\.(\d{1,6})\.", name)
        if layer is not None and source.num_layers <= int(layer[1]) < source.num_layers + source.guessing:
            continue
        if name not in expected and not UNUSED.fullmatch(name) and not _is_scale(name, tensors):
            raise source.unsupported(f"the tensor {name}")
    return config


def _refuse_variants(source: GgufSource) -> None:
    """Raise UnsupportedArchitecture for variants that no family supports."""
    if (experts := source.get("expert_count")) and "num_experts" not in source.family.gguf_keys:
        raise source.unsupported(f"{experts!r:.20} experts (a mixture)")
    if source.family.latent:
        return
    heads, hidden = source.integer("num_attention_heads"), source.integer("hidden_size")
    head_dim = source.integer("head_dim", default=hidden // heads or None, limit=MAX_HEAD_DIM)
    if source.integer("attention.value_length", default=head_dim) != head_dim:
        raise source.unsupported("values of another size than keys")
    if not source.family.partial_rope and source.integer("rope.dimension_count", default=head_dim) != head_dim:
        raise source.unsupported("RoPE on a part of each head")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if source.get(key) and key not in source.family.defaults:
            raise source.unsupported("capped logits")


def parts_of(family: Family, tensors: Collection[str]) -> Mapping[str, str]:
    """The names of a layer's tensors in a file that has these.

    Some have Q, K and V in one (ChatGLM), or gate and up of experts (Gemma 4); Mixtral's of early 2024 or before have a
    tensor for each expert.
    """
    found = family.gguf_parts
    for other in (JOINED_QKV, EACH_EXPERT, GATE_AND_UP):
        first = next(iter(other.values()))
        if first not in found.values() and f"blk.0.{first.format(0)}" in tensors:
            found = {**found, **other}
    return found


def tensor_names(config: ModelConfig, tensors: Collection[str] = ()) -> dict[str, StoredName]:
    """Map from Twostroke name to name in a GGUF file with these tensors, for every tensor of the model."""
    family = BY_NAME[config.architecture]
    outer, parts = {**GGUF_OUTER, **family.gguf_outer}, parts_of(family, tensors)
    return stored_names(config, outer, "blk.{}.", parts, family.stored_layer)


def guesser_names(
    config: ModelConfig, metadata: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, StoredName] | None:
    """The same for the head of multi-token prediction; None if there is none of one layer that shares embeddings."""
    family, layer = BY_NAME[config.architecture], f"blk.{config.num_layers}."
    own = {ours: layer + theirs for ours, theirs in family.gguf_guesser.items()}
    if not own or metadata.get(f"{family.gguf}.nextn_predict_layers") != 1 or own["join.projection"] not in tensors:
        return None
    if any(f"{layer}nextn.{other}.weight" in tensors for other in ("embed_tokens", "shared_head_head")):
        return None
    outer = {**GGUF_OUTER, "join.main_norm": GGUF_OUTER["norm"], **own}
    if outer["norm"] not in tensors:
        outer["norm"] = GGUF_OUTER["norm"]
    return stored_names(guesser_of(config), outer, layer, parts_of(family, tensors))


def _is_scale(name: str, tensors: Mapping[str, RawTensor]) -> bool:
    """Whether a tensor is the scale of an NVFP4 matrix (see `gguf`), or that of its inputs, which are not quantized."""
    module, _, part = name.rpartition(".")
    matrix = tensors.get(f"{module}.weight")
    return part in ("scale", "input_scale") and matrix is not None and matrix.format == "NVFP4"
