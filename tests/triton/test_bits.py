"""Nothing changes a bit: products by any tile, attention by any division, passes by any schedule. Needs a GPU."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from twostroke.backends.interface import RaggedBatch
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.triton import pass_plan
from twostroke.backends.triton.backend import TritonBackend
from twostroke.backends.triton.linear import DenseMatrix, Linear, UnpackBuffer
from twostroke.backends.triton.model import TritonModel
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.layer_groups import PageShape, layer_groups
from twostroke.models.rope import Rope
from twostroke.models.tensor_shapes import tensor_shapes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="bits are those of a GPU")
PAGE, LENGTH, KV_DTYPE = 16, 700, "bfloat16"


@pytest.mark.parametrize(("features", "columns"), [(512, 576), (4096, 4096), (640, 2048), (100, 1024)])
def test_a_row_of_a_product(features: int, columns: int) -> None:
    """From 1 to 700 tokens: parts by several programs, sums in one, any tile, any operand first. Repeated for races."""
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(features, columns, generator=generator, device="cuda").to(torch.bfloat16) * 0.02
    x = torch.randn(768, columns, generator=generator, device="cuda").to(torch.bfloat16)
    linear = Linear([DenseMatrix(features, columns, w)], UnpackBuffer("cuda"))
    rows: list[torch.Tensor] = []
    for tokens in (1, 2, 17, 33, 64, 65, 128, 300, 700, *[700] * 20):
        out = torch.full((linear.segments * len(x) * features,), torch.nan, device="cuda")
        linear(x, out, tokens)
        parts = linear.made(out, tokens)
        total = parts[0, :1].clone()
        for part in parts[1:]:
            total += part[:1]
        rows.append(total)
    assert not rows[0].isnan().any()
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert torch.allclose(rows[0], x[:1].float() @ w.float().T, atol=1e-2)


def config(window: int | None, heads: int = 8, kv_heads: int = 2, dim: int = 64, hidden: int = 256) -> ModelConfig:
    attention = Attention(heads, kv_heads, dim, dim**-0.5, Rope(10000.0), window=window)
    full = Attention(heads, kv_heads, dim, dim**-0.5, Rope(10000.0))
    layers = tuple(Layer(one, GatedMLP(512)) for one in (attention, full))
    return ModelConfig("llama", 1024, hidden, 8192, 1e-5, layers)


def large(gelu: bool = False, post_norms: bool = False, qk_norm: bool = False, bias: bool = False) -> ModelConfig:
    """Products of two and of four segments, and what else is computed row by row."""
    attention = Attention(16, 4, 128, 128**-0.5, Rope(10000.0), qk_norm=qk_norm, bias=bias)
    layer = Layer(attention, GatedMLP(4096, "gelu_tanh" if gelu else "silu"), post_norms)
    return ModelConfig("llama", 1024, 2048, 8192, 1e-5, (layer, layer))


CONFIGS = {
    "full": config(None),
    "window": config(100),
    "segments": large(),
    "gemma": large(gelu=True, post_norms=True, qk_norm=True),
    "qwen": large(bias=True),
}


OPENED = [*((name, KV_DTYPE) for name in CONFIGS), ("full", "int8"), ("window", "k8v4"), ("segments", "k8v4")]


@pytest.fixture(params=OPENED, ids="-".join)
def opened(request: pytest.FixtureRequest) -> tuple[TritonModel, PageMemory]:
    name, kv_dtype = request.param
    return open_model(CONFIGS[name], kv_dtype)


def open_model(described: ModelConfig, kv_dtype: str = KV_DTYPE) -> tuple[TritonModel, PageMemory]:
    random, shapes = np.random.default_rng(0), tensor_shapes(described)

    def weights(name: str) -> RawTensor:
        shape = shapes[name]
        values = random.standard_normal(shape).astype(np.float32) * np.float32(shape[-1] ** -0.5)
        if len(shape) == 1:
            values = np.abs(values) + np.float32(0.5)
        return RawTensor.from_bytes(name, "F32", shape, values.view(np.uint8).reshape(-1), name)

    backend = TritonBackend("cuda", kv_dtype=kv_dtype)
    memory = backend.memory(400, PageShape(layer_groups(described, kv_dtype), PAGE, kv_dtype))
    return backend.compile(described, weights), memory


def batch(parts: list[tuple[int, int, int]], spread: bool = False) -> RaggedBatch[np.ndarray]:
    """Sequences (entries, rows in this pass, first page); `spread`: pages of 9 entries, from the 100th page down."""
    tables, rows = [], []
    size = 9 if spread else PAGE
    for entries, count, page in parts:
        pages = -(-entries // size)
        table = np.zeros((pages, 4), np.int32)
        order = np.arange(pages)
        table[:, 3] = page + (99 - order if spread else order)
        table[:, 0], table[:, 1] = (3, 3 + size) if spread else (0, size)
        table[-1, 1] -= pages * size - entries
        table[:, 2] = order * size
        tables.append(table)
        at = np.arange(entries - count, entries)
        slots = table[at // size, 0] + at % size
        rows.append(np.stack([at * 7919 % 1000, at, table[at // size, 3], slots]))
    ids, positions, frames, slots = np.concatenate(rows, 1).astype(np.int64)
    starts = np.concatenate(([0], np.cumsum([count for _, count, _ in parts]))).tolist()
    return RaggedBatch(ids, positions, frames[None], slots, starts, tables, np.array(starts[1:], np.int64) - 1)


def test_any_schedule(opened: tuple[TritonModel, PageMemory]) -> None:
    """Logits of a row: its prompt whole or in chunks, as a decode, beside others, over pages that lie otherwise."""
    model, memory = opened
    expected = model.forward(batch([(LENGTH, LENGTH, 0)]), memory).logits.read()[0]
    for chunk in (7, 64, 250, 640):
        for spread in (False, True):
            for start in range(0, LENGTH, chunk):
                rows = min(chunk, LENGTH - start)
                logits = model.forward(batch([(start + rows, rows, 0)], spread), memory).logits.read()
                assert start + rows < LENGTH or np.array_equal(logits[0], expected), (chunk, spread)
    model.forward(batch([(LENGTH - 1, LENGTH - 1, 0)]), memory)
    for others in ([], [(300, 1, 100)], [(200 + i, 1, 100 + 15 * i) for i in range(19)], [(900, 900, 100)]):
        made = model.forward(batch([(LENGTH, 1, 0), *others]), memory).logits.read()[0]
        assert np.array_equal(made, expected), len(others)


@pytest.mark.parametrize("shape", [(8, 8, 128, 256), (14, 2, 64, 896), (4, 1, 256, 640), (6, 3, 96, 384)])
def test_attention_by_any_division(shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program or by many and a second kernel, in tiles of 16 and of 128 rows, captured or not."""
    heads, kv_heads, dim, hidden = shape
    model, memory = open_model(config(None, heads, kv_heads, dim, hidden))
    whole = batch([(LENGTH, LENGTH, 0)])
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: monkeypatch.setattr(pass_plan, "PROGRAMS", 0),  # never divided
        lambda: monkeypatch.setattr(pass_plan, "tall_of", lambda dim: 16),
        lambda: monkeypatch.setattr(pass_plan, "PROGRAMS", 10**9),  # always divided
        lambda: monkeypatch.setattr(pass_plan, "MAX_PARTS", 4000),
    ]
    found = []
    for change in changes:
        change()
        model.forward(batch([(LENGTH - 60, LENGTH - 60, 0)]), memory)
        model.forward(batch([(LENGTH - 1, 59, 0)]), memory)
        found.append(model.forward(batch([(LENGTH, 1, 0)]), memory).logits.read()[0])
        found.append(model.forward(whole, memory).logits.read()[0])
    assert all(np.array_equal(one, found[0]) for one in found)
