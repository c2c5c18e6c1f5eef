"""The model's description in a config.json, read by the keys that families use.

Keys have the meaning that transformers' `configuration_*.py` of each family gives them, in the old form (rope_theta and
rope_scaling) and in that of transformers 5 (rope_parameters, by layer type for Gemma 3).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.json_files import read_json
from twostroke.models.config import ModelConfig
from twostroke.models.families import BY_MODEL_TYPE, Family
from twostroke.models.families.config_source import MAX_COUNT, ConfigSource
from twostroke.models.families.missing import reason
from twostroke.models.rope import STILL, Rope, linear, llama3, longrope, longrope_amplitude, yarn, yarn_amplitude

log = logging.getLogger(__name__)

UNSUPPORTED_KEYS = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")

# RoPE's scalings by rope_type; "su" is the name of longrope in Phi-3's first files.
SCALINGS = {"linear": "linear", "llama3": "llama3", "yarn": "yarn", "longrope": "longrope", "su": "longrope"}


class HuggingFaceSource(ConfigSource):
    """Typed access to a config.json. An absent key has its family's default."""

    format = "huggingface"

    def __init__(self, values: Mapping[str, Any], family: Family, path: Path, num_tensors: int) -> None:
        self.values, self.family, self.path, self.num_matrices = values, family, path, num_tensors
        self.vocab_size, self.tied = self.integer("vocab_size"), bool(self.get("tie_word_embeddings"))
        self.num_layers = self.integer("num_hidden_layers", limit=num_tensors + 1)
        keys = {"attention_bias": ("q", "k", "v", "o"), "mlp_bias": ("gate", "up", "down")}
        self.biases = frozenset(part for key, parts in keys.items() if self.get(key) for part in parts)

    @property
    def architecture(self) -> str:
        return self.family.name

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.family.defaults.get(key)

    def rope(self, head_dim: int, kind: str | None = None) -> Rope:
        """Before transformers 5 there is one set of parameters for full attention, and only a base for other layers."""
        parameters, scaling = self._mapping("rope_parameters"), self._mapping("rope_scaling")
        if kind is None:
            return self._rope(scaling or parameters, "rope_theta", head_dim)
        own = parameters.get(kind) or {}
        if not isinstance(own, dict):
            raise CheckpointError(f"{self.path}: rope_parameters must hold an object for each layer type")
        if kind == "full_attention":
            return self._rope({**own, **scaling}, "rope_theta", head_dim)
        return self._rope(own, "rope_local_base_freq", head_dim)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self.bad(key, "an object", value)
        return value or {}

    def _rope(self, parameters: Mapping[str, Any], base_key: str, head_dim: int) -> Rope:
        """One rotary embedding; the base is among its parameters, or at the top level as `base_key`."""
        base = (
            self.checked("rope_theta", parameters["rope_theta"])
            if "rope_theta" in parameters
            else self.number(base_key)
        )
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        part = parameters.get("partial_rotary_factor")
        part = self.get("partial_rotary_factor") if part is None else part
        if kind == "proportional":
            return self._proportional(parameters, base, head_dim)
        if part not in (None, 1):
            if not self.family.partial_rope:
                raise self.unsupported(f"partial_rotary_factor {part}")
            head_dim = self._rotated(part, head_dim)
        return replace(self._scaled(kind, parameters, base, head_dim), rotated=None if part in (None, 1) else head_dim)

    def _proportional(self, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        """Gemma 4's: a part of the pairs turn, each at the speed that it has where all do."""
        part = parameters.get("partial_rotary_factor")
        rotated = 2 * int((1.0 if part is None else self.checked("partial_rotary_factor", part)) * head_dim // 2)
        if not 0 < rotated <= head_dim:
            raise self.bad("partial_rotary_factor", "a part of a head", part)
        factor = self.checked("factor", parameters.get("factor", 1.0))
        factors = (factor,) * (rotated // 2) + (STILL,) * ((head_dim - rotated) // 2)
        return Rope(base, None if set(factors) == {1} else factors)

    def _rotated(self, part: Any, head_dim: int) -> int:
        """How many numbers of a head are rotated."""
        rotated = int(head_dim * self.checked("partial_rotary_factor", part))
        if rotated % 2 or not 0 < rotated <= head_dim:
            raise self.bad("partial_rotary_factor", f"an even part of {head_dim} numbers", part)
        return rotated

    def _scaled(self, kind: Any, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        if kind in ("default", None):
            return Rope(base)
        if kind == "dynamic":
            # The base grows with a sequence that is longer than the context, so keys in a cache would have to change.
            log.warning(
                "%s: dynamic RoPE scaling starts behind the context of %s, where sequences end here: it is never used",
                self.path, self.get("max_position_embeddings"),
            )  # fmt: skip
            return Rope(base)
        scaling = SCALINGS.get(str(kind))
        if scaling is None:
            raise self.unsupported(f"rope_type {kind!r}")
        return getattr(self, f"_{scaling}")(parameters, base, head_dim)

    def _linear(self, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        return linear(base, head_dim, self.checked("factor", parameters.get("factor")))

    def _llama3(self, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        factor = self.checked("factor", parameters.get("factor"))
        low = self.checked("low_freq_factor", parameters.get("low_freq_factor"))
        high = self.checked("high_freq_factor", parameters.get("high_freq_factor"))
        if high <= low:
            raise CheckpointError(f"{self.path}: high_freq_factor must be greater than low_freq_factor")
        return llama3(base, head_dim, factor, self._original(parameters), low, high)

    def _yarn(self, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        def optional(key: str, default: float) -> float:
            value = parameters.get(key)
            return self.checked(key, value) if value else default  # 0 and null mean the default, as in transformers

        original = self._original(parameters)
        factor = optional("factor", self.number("max_position_embeddings") / original)
        amplitude = parameters.get("attention_factor")
        if amplitude is None:
            amplitude = yarn_amplitude(factor, optional("mscale", 0.0), optional("mscale_all_dim", 0.0))
        if base <= 1:
            raise CheckpointError(f"{self.path}: rope_theta must be greater than 1 for YaRN")
        return yarn(
            base,
            head_dim,
            factor,
            original,
            amplitude=self.checked("attention_factor", amplitude),
            beta_fast=optional("beta_fast", 32.0),
            beta_slow=optional("beta_slow", 1.0),
            truncate=bool((self._mapping("rope_scaling") or self._mapping("rope_parameters")).get("truncate", True)),
        )

    def _longrope(self, parameters: Mapping[str, Any], base: float, head_dim: int) -> Rope:
        def divisors(key: str) -> list[float]:
            values = parameters.get(key)
            if not isinstance(values, list) or len(values) != head_dim // 2:
                raise self.bad(key, f"a list of {head_dim // 2} numbers", values)
            return [self.checked(key, value) for value in values]

        short, long = divisors("short_factor"), divisors("long_factor")
        original, context = self._original(parameters), self.number("max_position_embeddings")
        factor = parameters.get("factor")
        factor = context / original if factor is None else self.checked("factor", factor)
        amplitude = parameters.get("attention_factor")
        amplitude = longrope_amplitude(factor, original) if amplitude is None else amplitude
        return longrope(base, short, long, original, context, self.checked("attention_factor", amplitude))

    def _original(self, parameters: Mapping[str, Any]) -> float:
        """Positions of the context before it was extended. The key outside of the parameters has precedence."""
        original = self.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        key = "original_max_position_embeddings"
        original = self.checked(key, original or self.get("max_position_embeddings"))
        if original <= 1:
            raise self.bad(key, "greater than 1", original)
        return original

    def context(self) -> int:
        """The longest sequence: YaRN's is a multiple of its original context, which some configs state alone."""
        stated = self.integer("max_position_embeddings")
        parameters = self._mapping("rope_scaling") or self._mapping("rope_parameters")
        if parameters.get("rope_type", parameters.get("type")) != "yarn" or not parameters.get("factor"):
            return stated
        return max(
            stated, min(int(self._original(parameters) * self.checked("factor", parameters["factor"])), MAX_COUNT)
        )


def stated_family(path: Path, values: Mapping[str, Any]) -> Family:
    """The family that a config.json names. Raises UnsupportedArchitecture, which says what another would take."""
    kind = str(values.get("model_type"))
    if (family := BY_MODEL_TYPE.get(kind)) is None:
        raise UnsupportedArchitecture(f"{path}: model_type {kind[:40]!r} {reason(kind, ', '.join(BY_MODEL_TYPE))}")
    return family


def read_config(path: Path, num_tensors: int) -> ModelConfig:
    """The model that a config.json describes; it cannot have more layers than `num_tensors`.

    Raises:
        UnsupportedArchitecture: another family, RoPE type or variant. CheckpointError: bad values.
    """
    outer = read_json(path)
    family, values = stated_family(path, outer), outer
    if "text_config" in outer:  # a model with vision: this is the text model's config
        inner = outer["text_config"]
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: text_config must be an object")
        values = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer} | inner
        family = BY_MODEL_TYPE.get(str(inner.get("model_type")), family)  # mistral3 contains Mistral or Ministral 3
    source = HuggingFaceSource(values, family, path, num_tensors)
    for key in UNSUPPORTED_KEYS:
        if key not in family.defaults and (source.get(key) or outer.get(key)):
            raise source.unsupported(key)
    config = family.describe(source)
    return replace(config, max_position=max(config.max_position, source.context()))
