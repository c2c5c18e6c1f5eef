"""Our linear kernels beside torch.matmul (cuBLAS), by replay of a CUDA graph, in the shapes of real models.

    python3 -m benchmarks.gpu.products --models llama-3.1-8b --out products.json

Ours are the products of twostroke.backends.triton.linear, with weights as the backend stores them; gate and up are one
product with their activation. torch.matmul has bf16 weights whatever the format. Copies of a weight take turns, so
that the second-level cache does not hold them.
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
from twostroke.models.config import Experts, ModelConfig
from twostroke.models.formats.tensor import RawTensor

TOKENS = (1, 16, 64, 128, 2048, 4096)
CACHE_BYTES = 60 << 20  # of the largest second-level cache
HEAD_TOKENS = 128  # more rows never go through the head at once
DEFINITIONS = {
    "us": "median time of one product: a graph of products with each copy of the weight, replayed, / copies",
    "bytes": "weight, input and output, once each, as stored; ours writes float32, in parts for few tokens",
    "parts": "of our product's output, which whoever reads it adds up",
    "flops": "2 x tokens x N x K",
    "error": "largest |ours - product in float32| / largest |product in float32|, over the first 16 rows",
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


def dense(tensor: RawTensor, device: str) -> torch.Tensor:
    """A stored matrix as bf16 [N, K]."""
    if tensor.format == "BF16":
        bits = torch.from_numpy(tensor.data.reshape(-1).view(np.int16).copy())
        return bits.view(torch.bfloat16).view(tensor.shape).to(device)
    return torch.from_numpy(tensor.dequantize()).to(device).to(torch.bfloat16)


Product = Callable[[torch.Tensor], torch.Tensor]  # x [tokens, K] bf16 -> [tokens, N] in any dtype


def torch_product(weight: torch.Tensor, gated: bool) -> Product:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.t())

    def with_activation(x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.mm(x, weight.t()).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return with_activation if gated else plain


class Ours:
    """The backend's products: input and output buffers are padded and made once, as in a pass."""

    def __init__(self, device: str) -> None:
        self.module: Any = import_module("twostroke.backends.triton.linear")
        self.device = device

    def product(self, parts: Sequence[RawTensor], gated: bool) -> Any:
        """The backend's object for one copy of the weights."""
        placed, scratch = [self.module.place(part, self.device) for part in parts], self.module.Scratch(self.device)
        return self.module.Gated(*placed, False, scratch) if gated else self.module.Linear(placed, scratch)

    def buffers(self, product: Any, x: torch.Tensor, gated: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(padded x, output [parts, padded, N], bytes of the output that are written)."""
        tokens, padded = len(x), -(-len(x) // self.module.PADDING) * self.module.PADDING
        wide = torch.zeros(padded, x.shape[1], dtype=x.dtype, device=self.device)
        wide[:tokens] = x
        parts, columns = (1, product.rows) if gated else (product.parts(tokens), product.features)
        dtype = torch.bfloat16 if gated else torch.float32
        out = torch.empty(parts, padded, columns, dtype=dtype, device=self.device)
        return wide, out, parts * tokens * columns * out.element_size()


def error(ours: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> float:
    """The largest relative error of the first rows."""
    exact = torch_product(weight.float(), gated)(x[:16].float())
    return float((ours[:16].float() - exact).abs().max() / exact.abs().max())


class Weight:
    """Copies of one weight, for torch and for ours."""

    def __init__(self, card: Card, device: str, parts: Sequence[RawTensor], gated: bool, ours: Ours | None) -> None:
        self.card, self.gated, self.ours = card, gated, ours
        self.n, self.k = sum(part.shape[0] for part in parts), parts[0].shape[1]
        stored = sum(part.nbytes for part in parts)
        count = 2 if card.on_cpu else min(64, max(2, -(-4 * CACHE_BYTES // stored)))
        self.matrix = torch.cat([dense(part, device) for part in parts])
        theirs = [self.matrix, *(self.matrix.clone() for _ in range(count - 1))]
        self.theirs = [torch_product(one, gated) for one in theirs]
        self.copies = [] if ours is None else [ours.product(parts, gated) for _ in range(count)]

    def case(self, tokens: int, repeats: int) -> dict[str, Any]:
        """Both products of `tokens` rows."""
        x = torch.randn(tokens, self.k, device=self.matrix.device).to(torch.bfloat16)

        def figures(runs: Sequence[Callable[[], object]], size: int) -> dict[str, float]:
            seconds, flops = self.card.replayed(runs, repeats), 2 * tokens * self.n * self.k
            return {"us": 1e6 * seconds, "bytes": size, "bytes_per_second": size / seconds,
                    "flops_per_second": flops / seconds}  # fmt: skip

        written = 2 * tokens * (self.n // 2 if self.gated else self.n)
        size = 2 * self.n * self.k + x.nbytes + written
        case: dict[str, Any] = {"cuBLAS": figures([partial(one, x) for one in self.theirs], size)}
        if self.ours is not None:
            first = self.copies[0]
            wide, out, written = self.ours.buffers(first, x, self.gated)
            case["ours"] = figures(
                [partial(one, wide, out, tokens) for one in self.copies], first.nbytes + x.nbytes + written
            )
            case["ratio"] = case["cuBLAS"]["us"] / case["ours"]["us"]
            out.fill_(float("nan"))
            first(wide, out, tokens)
            made = out[:, :tokens] if self.gated else first.made(out, tokens)
            case["parts"], case["error"] = len(made), error(made.float().sum(0), x, self.matrix, self.gated)
        return case


def measure(bench: Bench, card: Card, options: Any, model: str, weights: RandomWeights) -> None:
    """All products of one model."""
    ours = None if options.cublas_only else Ours(options.device)
    for name, tensors in shapes(weights.config).items():
        if bench.over:
            return
        bench.say(f"{model}: {name}")
        parts = [weights(one) for one in tensors]
        weight = Weight(card, options.device, parts, name.endswith("gate_up"), ours)
        for tokens in options.tokens:
            if bench.over or (name == "head" and tokens > HEAD_TOKENS):
                break
            case = {"model": model, "product": name, "n": weight.n, "k": weight.k, "format": parts[0].format,
                    "tokens": tokens}  # fmt: skip
            with bench.guarded(**case):
                bench.add(**case, **weight.case(tokens, 5 if options.quick else 15))


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    rows: list[tuple[object, ...]] = []
    for one in found:
        if "failure" in one:
            continue
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
    made.add_argument("--cublas-only", action="store_true", help="torch.matmul alone")
    made.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = made.parse_args()
    bench, card = Bench("products", options, DEFINITIONS), Card(options.device)
    for model in options.models:
        with bench.guarded(model=model):
            measure(bench, card, options, model, RandomWeights(MODELS[model], options.weights))
    bench.show(*table(bench.cases))


if __name__ == "__main__":
    main()
