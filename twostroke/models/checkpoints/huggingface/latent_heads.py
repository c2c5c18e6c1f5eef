"""The matrices of heads with latent entries (MLA), which are one in directories: k and v of each head in turn."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.config import ModelConfig
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor


def split_heads(tensors: Mapping[str, RawTensor], config: ModelConfig) -> dict[str, RawTensor]:
    """The tensors of a directory, with `X.3.k.weight` [rank, plain] and `X.3.v.weight` [value, rank] of each head.

    Raises CheckpointError for a matrix of another size.
    """
    found, layers = dict(tensors), dict(config.attention_layers)
    layers[config.num_layers] = layers[max(layers)]  # which may guess further tokens
    for layer, attention in layers.items():
        name = next((one for one in tensors if one.endswith(f"layers.{layer}.self_attn.kv_b_proj.weight")), None)
        if (latent := attention.latent) is None or name is None:
            continue
        whole, both = found.pop(name), latent.plain + latent.value
        if whole.shape != (attention.num_heads * both, latent.rank):
            raise CheckpointError(
                f"{whole.source}: shape {whole.shape} where {(attention.num_heads * both, latent.rank)} is needed"
            )
        if not isinstance(whole, PackedTensor):
            whole = RawTensor.from_bytes(whole.name, whole.format, whole.shape, whole.data.reshape(-1), whole.source)
        prefix = name.removesuffix(".weight")
        for head in range(attention.num_heads):
            start = head * both
            found[f"{prefix}.{head}.k.weight"] = _transposed(whole, start, start + latent.plain)
            found[f"{prefix}.{head}.v.weight"] = whole.rows(start + latent.plain, start + both)
    return found


def _transposed(whole: RawTensor, start: int, stop: int) -> RawTensor:
    rows = whole.rows(start, stop)
    kept: dict[str, Any] = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}

    def make() -> np.ndarray:
        made = rows.unpack()
        numbers = made.data.view(kept[made.format]) if made.format in kept else made.dequantize().view(np.uint32)
        return np.ascontiguousarray(numbers.reshape(made.shape).T).view(np.uint8)

    format = rows.format if rows.format in kept else "F32"
    method = whole.method if isinstance(whole, PackedTensor) else format
    share = (stop - start) / whole.shape[0]
    return PackedTensor.of((rows.shape[1], stop - start), format, whole.source, method, (whole,), make, share)
