"""GGUF files with random weights, in the shapes of random_shapes.py.

The tokenizer is that of Qwen2.5-Coder. Random logits have no clear winner, which is hard for a head that searches.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peer.random_shapes import POSITIONS, VOCAB, Shape
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.fetch import fetch

Type = gguf.GGMLQuantizationType


def write_random(shape: Shape, path: Path) -> None:
    """Write a file of the shape, a tensor at a time."""
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value in metadata(shape).items():
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind is gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(f"{shape.arch}.{key}", value, kind)
    copy_tokenizer(writer)
    for name, size, named in shape.tensors():
        kind = Type[named]
        stored = gguf.quant_shape_to_byte_shape(size, kind) if kind is not Type.F32 else size
        dtype = np.dtype(np.float32 if kind is Type.F32 else np.uint8)
        writer.add_tensor_info(name, stored, dtype, prod(stored) * dtype.itemsize, None if kind is Type.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, size, kind in shape.tensors():
        writer.write_tensor_data(values(random, name, size, Type[kind]))
    writer.close()


def metadata(shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block_count": shape.layers, "context_length": POSITIONS, "embedding_length": shape.hidden,
        "feed_forward_length": shape.mlp, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.head_dim, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": VOCAB,
    }  # fmt: skip
    if shape.experts:
        found |= {"expert_count": shape.experts, "expert_used_count": shape.used_experts}
    return found | shape.more


def copy_tokenizer(writer: gguf.GGUFWriter) -> None:
    for key, one in gguf.GGUFReader(fetch(CATALOG["qwen2.5-coder-0.5b"])).fields.items():
        if key.startswith("tokenizer."):
            inner = one.types[-1] if one.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, one.contents(), one.types[0], sub_type=inner)


def values(random: np.random.Generator, name: str, shape: tuple[int, ...], kind: Type) -> np.ndarray[Any, Any]:
    """Norms are 1, vectors and routers small; matrices are blocks of random codes with deviation 1 / sqrt(columns)."""
    if kind is Type.F32:
        if "norm" in name:
            return np.ones(shape, np.float32)
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    data = np.frombuffer(bytearray(random.bytes(prod(stored))), np.uint8)
    block = data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    deviation = shape[-1] ** -0.5
    if kind is Type.Q4_K:  # d * 32 * code - dmin * 32, codes 0 to 15
        step = deviation / (32 * 4.6)
        block[:, 0:4] = np.array([step, 7.5 * step], np.float16).view(np.uint8)
        block[:, 4:16] = [160] * 8 + [0] * 4  # eight scales and eight minima of 32, in six bits each
    elif kind is Type.Q6_K:  # d * 32 * (code - 32), codes 0 to 63
        block[:, 192:208] = 32
        block[:, 208:210] = np.array([deviation / (32 * 18.5)], np.float16).view(np.uint8)
    elif kind is Type.Q8_0:
        block[:, 0:2] = np.array([deviation / 74], np.float16).view(np.uint8)
    else:  # MXFP4: a power of two, values up to 6 with a deviation near 3
        block[:, 0] = 127 + round(np.log2(deviation / 3))
    return data.reshape(stored)
