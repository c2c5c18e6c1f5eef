"""The model's description in a config.json, read by the keys that families use.

Keys have the meaning that transformers' `configuration_*.py` of each family gives them, in the old form (rope_theta and
rope_scaling) and in that of transformers 5 (rope_parameters, by layer type for Gemma 3).
"""

from collections.abc import Mapping
from math import pi
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twostroke.checkpoints.json_files import read_json
from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.config import ModelConfig
from twostroke.models.families import BY_MODEL_TYPE, Family
from twostroke.models.families.family import LARGEST, LIMIT
from twostroke.models.rope import Rope

UNSUPPORTED_KEYS = (
    "attention_bias",
    "mlp_bias",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
)


class HuggingFaceSource:
    """Typed access to a config.json. An absent key has its family's default."""

    format: Literal["huggingface"] = "huggingface"

    def __init__(self, values: Mapping[str, Any], family: Family, path: Path, num_tensors: int) -> None:
        self.values, self.family, self.path = values, family, path
        self._num_tensors = num_tensors

    @property
    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    @property
    def tied(self) -> bool:
        return bool(self.get("tie_word_embeddings"))

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", limit=self._num_tensors + 1)

    @property
    def num_matrices(self) -> int:
        return self._num_tensors

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.family.defaults.get(key)

    def integer(self, key: str, default: int | None = None, limit: int = LIMIT) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < limit:
            raise self._bad(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        return self._number(key, default if value is None else value)

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

    def wrong(self, key: str, expected: str) -> CheckpointError:
        return self._bad(key, expected, self.get(key))

    def unsupported(self, what: str) -> UnsupportedArchitecture:
        return UnsupportedArchitecture(f"{self.path}: architecture {self.family.name} with {what:.80} is not supported")

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:  # a NaN is neither
            raise self._bad(key, "a positive number", value)
        return float(value)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self._bad(key, "an object", value)
        return value or {}

    def _bad(self, key: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} must be {expected}; it is {value!r:.40}")

    def _rope(self, parameters: Mapping[str, Any], base_key: str, head_dim: int) -> Rope:
        """One rotary embedding; the base is among its parameters, or at the top level as `base_key`."""
        base = (
            self._number("rope_theta", parameters["rope_theta"])
            if "rope_theta" in parameters
            else self.number(base_key)
        )
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        for value in (parameters.get("partial_rotary_factor"), self.get("partial_rotary_factor")):
            if value not in (None, 1):
                raise self.unsupported(f"partial_rotary_factor {value}")
        if kind == "default":
            return Rope(base)
        if kind not in ("linear", "llama3"):
            raise self.unsupported(f"rope_type {kind!r}")
        factor = self._number("factor", parameters.get("factor"))
        if kind == "linear":
            return Rope(base, (factor,) * (head_dim // 2))
        low = self._number("low_freq_factor", parameters.get("low_freq_factor"))
        high = self._number("high_freq_factor", parameters.get("high_freq_factor"))
        if high <= low:
            raise CheckpointError(f"{self.path}: high_freq_factor must be greater than low_freq_factor")
        original = self.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        context = self._number("context", original or self.get("max_position_embeddings"))
        # Rotations of each pair over the original context: below `low` the frequency is divided by `factor`, above
        # `high` it is unchanged, and in between it is interpolated.
        turns = context / (2 * pi) * base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return Rope(base, tuple((1 / ((1 - smooth) / factor + smooth)).tolist()))


def read_config(path: Path, num_tensors: int) -> ModelConfig:
    """The model that a config.json describes; it cannot have more layers than `num_tensors`.

    Raises:
        UnsupportedArchitecture: another family, RoPE type or variant. CheckpointError: bad values.
    """
    outer = read_json(path)
    kind, values = str(outer.get("model_type")), outer
    family = BY_MODEL_TYPE.get(kind)
    if family is None:
        known = ", ".join(BY_MODEL_TYPE)
        raise UnsupportedArchitecture(f"{path}: model_type {kind[:40]!r} is not supported, only {known}")
    if "text_config" in outer:  # a model with vision: this is the text model's config
        inner = outer["text_config"]
        if not isinstance(inner, dict):
            raise CheckpointError(f"{path}: text_config must be an object")
        values = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer} | inner
    source = HuggingFaceSource(values, family, path, num_tensors)
    for key in UNSUPPORTED_KEYS:
        if source.get(key) or outer.get(key):
            raise source.unsupported(key)
    return family.describe(source)
