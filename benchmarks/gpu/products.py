"""Our linear kernel beside torch.matmul (cuBLAS), by replay of a CUDA graph, in the shapes of real models.

    python3 -m benchmarks.gpu.products --models llama-3.1-8b --out products.json

The kernel is `linear(x, weight)` of twostroke.backends.triton.linear, x [T, K] bf16, or what --linear names. A weight
is what --pack makes of a stored tensor: `pack(tensor: RawTensor, device)`. Copies of a weight take turns, so that the
second-level cache does not hold them. torch.matmul always has bf16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, markdown, parser
from benchmarks.gpu.card import Card
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.weights import RandomWeights
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import Experts, ModelConfig

TOKENS = (1, 16, 64, 128, 2048, 4096)
CACHE_BYTES = 60 << 20  # of the largest second-level cache
HEAD_TOKENS = 128  # more rows never go through the head at once
DEFINITIONS = {
    "us": "median time of one product: a graph of products with each copy of the weight, replayed, / copies",
    "bytes": "weight, input and output, once each, in the form that is multiplied; bytes_per_second = bytes / time",
    "flops": "2 x tokens x N x K",
    "error": "largest |ours - matmul in float32| / largest |matmul in float32|, over 16 of the rows",
    "ratio": "cuBLAS's time / ours: above 1, ours is quicker",
}


def shapes(config: ModelConfig) -> dict[str, list[str]]:
    """The products of a layer and of the head by name, each with the tensors whose outputs are concatenated."""
    layer = "layers.0."
    found = {"qkv": [layer + name for name in ("q", "k", "v")], "o": [layer + "o"]}
    if isinstance(config.layers[0].feed_forward, Experts):
        found |= {"expert gate_up": [layer + "experts.0.gate", layer + "experts.0.up"]}
        found |= {"expert down": [layer + "experts.0.down"]}
    else:
        found |= {"gate_up": [layer + "gate", layer + "up"], "down": [layer + "down"]}
    return found | {"head": [config.head_tensor]}


def joined(weights: RandomWeights, names: Sequence[str]) -> RawTensor:
    """One matrix with the rows of several of one format."""
    parts = [weights(name) for name in names]
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    data = np.concatenate([part.data for part in parts])
    return RawTensor(names[0], parts[0].format, shape, data, f"random {'+'.join(names)}")


def dense(tensor: RawTensor, device: str) -> torch.Tensor:
    """A stored matrix as bf16 [N, K]."""
    if tensor.format == "BF16":
        bits = torch.from_numpy(tensor.data.reshape(-1).view(np.int16).copy())
        return bits.view(torch.bfloat16).view(tensor.shape).to(device)
    return torch.from_numpy(tensor.dequantize()).to(device).to(torch.bfloat16)


def find(name: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


class Contender:
    """A way to multiply, with its copies of one weight."""

    def __init__(self, linear: Callable[[torch.Tensor, Any], torch.Tensor], copies: Sequence[Any], size: int) -> None:
        """`size`: bytes of one copy."""
        self.linear, self.copies, self.size = linear, copies, size

    def us(self, card: Card, x: torch.Tensor, repeats: int) -> float:
        return 1e6 * card.replayed([partial(self.linear, x, copy) for copy in self.copies], repeats)


def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


def error(ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest relative error of the first rows."""
    exact = x[:16].float() @ weight.float().t()
    return float((ours[:16].float() - exact).abs().max() / exact.abs().max())


def measure(bench: Bench, card: Card, options: Any, model: str, name: str, tensor: RawTensor) -> None:
    """All numbers of tokens for one matrix."""
    n, k = tensor.shape
    own = tensor.nbytes
    count = max(2, -(-4 * CACHE_BYTES // own)) if not card.on_cpu else 2
    count, theirs = min(count, 64), dense(tensor, options.device)
    linear = find(options.linear) if options.linear else None
    contenders = {"cuBLAS": Contender(matmul, [theirs, *(theirs.clone() for _ in range(count - 1))], 2 * n * k)}
    if linear is not None:
        pack = find(options.pack) if options.pack else dense
        contenders["ours"] = Contender(linear, [pack(tensor, options.device) for _ in range(count)], own)
    for tokens in options.tokens:
        if bench.over:
            return
        if name == "head" and tokens > HEAD_TOKENS:
            continue
        x = torch.randn(tokens, k, device=options.device).to(torch.bfloat16)
        case: dict[str, Any] = {
            "model": model,
            "product": name,
            "n": n,
            "k": k,
            "format": tensor.format,
            "tokens": tokens,
        }
        for label, one in contenders.items():
            us = one.us(card, x, 5 if options.quick else 15)
            size = one.size + 2 * tokens * (n + k)
            case[label] = {"us": us, "bytes": size, "bytes_per_second": 1e6 * size / us,
                           "flops_per_second": 2e6 * tokens * n * k / us}  # fmt: skip
        if linear is not None:
            case["error"] = error(linear(x, contenders["ours"].copies[0]), x, theirs)
            case["ratio"] = case["cuBLAS"]["us"] / case["ours"]["us"]
        bench.add(**case)


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for one in found:
        row: list[object] = [one["model"], one["product"], f"{one['n']} x {one['k']}", one["tokens"]]
        for label in ("cuBLAS", "ours"):
            figures = one.get(label)
            row += [None] * 3 if figures is None else [
                figures["us"], figures["bytes_per_second"] / 1e9, figures["flops_per_second"] / 1e12
            ]  # fmt: skip
        rows.append((*row, one.get("ratio"), one.get("error")))
    head = ("model", "product", "N x K", "tokens", "cuBLAS us", "GB/s", "TFLOP/s", "ours us", "GB/s", "TFLOP/s", "x",
            "error")  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    made = parser("products", __doc__ or "", ["qwen2.5-0.5b", "llama-3.1-8b"])
    made.add_argument("--linear", default="twostroke.backends.triton.linear:linear", metavar="MODULE:FUNCTION",
                      help="linear(x, weight); empty for cuBLAS alone")  # fmt: skip
    made.add_argument("--pack", default="", metavar="MODULE:FUNCTION",
                      help="pack(tensor, device) -> weight; empty: a bf16 tensor [N, K]")  # fmt: skip
    made.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = made.parse_args()
    bench, card = Bench("products", options, DEFINITIONS), Card(options.device)
    for model in options.models:
        weights = RandomWeights(MODELS[model], options.weights)
        for name, names in shapes(MODELS[model]).items():
            if bench.over:
                break
            bench.say(f"{model}: {name}")
            measure(bench, card, options, model, name, joined(weights, names))
    bench.show(*table(bench.cases))


if __name__ == "__main__":
    main()
