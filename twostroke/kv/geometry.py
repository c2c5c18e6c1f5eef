"""The properties that must agree to join two KV values, or to use a value with a model."""

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from twostroke.errors import GeometryMismatch
from twostroke.models.config import ModelConfig
from twostroke.models.formats.blocks import numpy_dtype
from twostroke.models.rope import Rope


@dataclass(frozen=True)
class Geometry:
    """The shape and meaning of an entry. It does not include the weights: models of one geometry may share values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[Rope, ...]
    kv_dtype: str  # "float32", "bfloat16", ...
    tokenizer: str  # the tokenizer's fingerprint

    @classmethod
    def of(cls, config: ModelConfig, kv_dtype: str, tokenizer: str) -> "Geometry":
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, config.ropes, kv_dtype, tokenizer)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry: layers x 2 x KV heads x head_dim x element size."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        """numpy dtype of K and V."""
        return numpy_dtype(self.kv_dtype)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    def require(self, other: "Geometry", what: str) -> None:
        """Raise GeometryMismatch if `other` differs; the message names every differing field."""
        if self is other or self == other:
            return
        differing = [
            f"{f.name} {_short(getattr(other, f.name))} is not {_short(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        raise GeometryMismatch(f"{what}: the KV geometry differs: {'; '.join(differing)}")


def _short(value: object) -> str:
    if isinstance(value, tuple):
        kinds = sorted({f"base {rope.base:g}{' scaled' if rope.scaled else ''}" for rope in value})
        return f"[{len(value)} layers: {', '.join(kinds)}]"
    return str(value)[:16]
