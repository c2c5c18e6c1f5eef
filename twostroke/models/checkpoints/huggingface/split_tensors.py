"""Tensors that hold several of our matrices: all experts of a layer, or k and v of each head in turn (MLA).

Of gpt-oss's experts rows of gate and up alternate; they are bfloat16, stored as (inputs, outputs), or MXFP4. Of
Granite's and Qwen3.5's, as rows, those of gate come first.

MXFP4 (OCP Microscaling Formats 1.0, 2023) is stored as `X_blocks` and `X_scales`: 16 bytes for 32 numbers, two
neighbours in a byte, and the exponent of their scale.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.config import ModelConfig
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor

HALVES = re.compile(
    r"(.*\.block_sparse_moe)\.(input|output)_linear\.weight|(.*\.experts)\.(gate_up|down)_proj(?:\.weight)?"
)
STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_bias|_blocks|)")
BLOCK = 32  # numbers of a block of MXFP4, in 16 bytes
Part = Callable[[slice, float], RawTensor]  # some outputs of an expert, with this share of its bytes


def split_experts(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors of a directory, with a matrix and a bias for each expert: `X.3.gate_proj.weight`.

    Raises CheckpointError for stacks of the wrong shape.
    """
    found = dict(tensors)
    for name, stack in tensors.items():
        match = HALVES.fullmatch(name)
        if match is not None and f"{match[3]}.gate_up_proj_bias" not in tensors:  # which gpt-oss has
            del found[name]
            found |= _halves(stack, match[1] or match[3], match[2] or match[4])
            continue
        match = STACK.fullmatch(name)
        if match is None:
            continue
        prefix, parts, kind = match.groups()
        del found[name]
        scales = found.pop(f"{prefix}.{parts}_proj_scales", None) if kind == "_blocks" else None
        rows = {"down": slice(None)} if parts == "down" else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        experts = _biases(stack) if kind == "_bias" else _blocks(stack, scales) if kind else _matrices(stack)
        for (e, expert), (part, some) in product(enumerate(experts), rows.items()):
            made = expert(some, 1 / len(rows))
            found[f"{prefix}.{e}.{part}_proj.{'bias' if kind == '_bias' else 'weight'}"] = made
    return found


def _halves(stack: RawTensor, prefix: str, side: str) -> dict[str, RawTensor]:
    """Gate and up are the halves of an expert's rows."""
    both = side in ("input", "gate_up")
    if len(stack.shape) != 3 or (both and stack.shape[1] % 2):
        raise CheckpointError(f"{stack.source}: {stack.format} {stack.shape} is not a stack of experts")
    count, rows, _ = stack.shape
    halves = {"gate": (0, rows // 2), "up": (rows // 2, rows)} if both else {"down": (0, rows)}
    _number_bytes(stack)
    whole = RawTensor.from_bytes(stack.name, stack.format, stack.shape, stack.data.reshape(-1), stack.source)
    experts = product(range(count), halves.items())
    return {f"{prefix}.{e}.{part}_proj.weight": whole.part(e).rows(*some) for e, (part, some) in experts}


def _checked(stack: RawTensor, axes: int, size: int) -> np.ndarray:
    """The bytes of a stack, by the first axis. Raises CheckpointError."""
    if len(stack.shape) != axes or 0 in stack.shape or stack.data.size != prod(stack.shape) * size:
        raise CheckpointError(f"{stack.source}: {stack.format} {stack.shape} is not a stack of experts")
    return stack.data.reshape(stack.shape[0], -1)


def _number_bytes(stack: RawTensor) -> int:
    if stack.format not in ("F32", "F16", "BF16"):
        raise CheckpointError(f"{stack.source}: {stack.format} {stack.shape}; only F32, F16 and BF16 are supported")
    return FORMATS[stack.format].block_bytes


def _biases(stack: RawTensor) -> Iterator[Part]:
    size = _number_bytes(stack)
    for data in _checked(stack, 2, size):

        def part(rows: slice, share: float, data: np.ndarray = data) -> RawTensor:
            some = np.ascontiguousarray(data.reshape(-1, size)[rows])
            return RawTensor(stack.name, stack.format, (len(some),), some.reshape(1, -1), stack.source)

        yield part


def _matrices(stack: RawTensor) -> Iterator[Part]:
    size = _number_bytes(stack)
    columns, rows = stack.shape[1:] if len(stack.shape) == 3 else (0, 0)
    for data in _checked(stack, 3, size):
        stored = RawTensor(stack.name, stack.format, (columns, rows), data.reshape(columns, -1), stack.source)

        def part(some: slice, share: float, stored: RawTensor = stored) -> RawTensor:
            def make() -> np.ndarray:
                numbers = stored.data.reshape(columns, rows, size)[:, some]
                return np.ascontiguousarray(numbers.swapaxes(0, 1)).reshape(-1, columns * size)

            shape = len(range(rows)[some]), columns
            return PackedTensor.of(shape, stack.format, stack.source, stack.format, (stored,), make, share)

        yield part


def _blocks(stack: RawTensor, scales: RawTensor | None) -> Iterator[Part]:
    data = _checked(stack, 4, 1)
    if scales is None or stack.format != "U8" or (*scales.shape, BLOCK // 2) != stack.shape:
        raise CheckpointError(f"{stack.source}: {stack.format} {stack.shape} does not fit scales of MXFP4")
    rows, blocks = stack.shape[1:3]
    for codes, exponents in zip(data, _checked(scales, 3, 1), strict=True):
        stored = tuple(
            RawTensor(one.name, "U8", (rows, blocks), part.reshape(rows, -1), one.source)
            for one, part in ((stack, codes), (scales, exponents))
        )

        def part(some: slice, share: float, stored: tuple[RawTensor, ...] = stored) -> RawTensor:
            def make() -> np.ndarray:
                pairs = stored[0].data[some].reshape(-1, blocks, BLOCK // 2)
                codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(-1, blocks, BLOCK)
                halves = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4  # as ggml has them
                return np.concatenate((stored[1].data[some][..., None], halves), axis=-1).reshape(len(codes), -1)

            shape = len(range(rows)[some]), blocks * BLOCK
            return PackedTensor.of(shape, "MXFP4", stack.source, "MXFP4", stored, make, share)

        yield part


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
