"""A mixture of experts on the device: values as defined, and rows that do not depend on one another."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from twostroke.backends.ranks.sharding import ColumnSplit
from twostroke.backends.reference.operations import DenseWeight
from twostroke.backends.reference.routing import route
from twostroke.backends.triton.experts import ExpertBufferPool, Mixture
from twostroke.backends.triton.kernels import experts as kernels
from twostroke.backends.triton.packed import RepackedMatrix
from twostroke.models.config import Experts
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor

PLAIN = Experts(count=6, chosen=2, intermediate_size=72)
HIDDEN, PADDED = 136, 256  # no multiples of the tiles' sizes


def matrix(format: str, rows: int, columns: int, seed: int) -> RawTensor:
    """Random values; of packed formats random codes with float16 scales that fit them."""
    fmt, random = FORMATS[format], np.random.default_rng(seed)
    if format == "BF16":
        values = torch.from_numpy(random.normal(0, columns**-0.5, (rows, columns))).bfloat16()
        data = values.view(torch.uint8).numpy()
    else:
        data = random.integers(0, 256, (rows * columns // fmt.block_size, fmt.block_bytes), np.uint8)
        scale = {"Q8_0": 1.0, "Q4_K": 0.02, "Q6_K": 0.002}[format] * columns**-0.5 / (100 if format == "Q8_0" else 1)
        at = 208 if format == "Q6_K" else 0
        data[:, at : at + 2] = random.uniform(0.5 * scale, scale, len(data)).astype("<f2")[:, None].view(np.uint8)
        if format == "Q4_K":
            data[:, 2:4] = data[:, :2]
    return RawTensor.from_bytes("w", format, (rows, columns), data.reshape(-1), "random")


class Layer:
    """Random weights of one layer, in one format after another. `arrays` have their values, rounded to bfloat16."""

    def __init__(self, experts: Experts, hidden: int = HIDDEN, formats: Sequence[str] = ("BF16",)) -> None:
        self.experts, self.hidden, width = experts, hidden, experts.intermediate_size
        router = np.random.default_rng(0).normal(0, hidden**-0.5, (experts.count, hidden)).astype(np.float32)
        self.arrays, self.raw = {"layers.0.router": router}, dict[str, RawTensor]()
        for e in range(experts.count):
            for i, (rows, columns) in enumerate(((width, hidden), (width, hidden), (hidden, width))):
                name = f"layers.0.experts.{e}.{('gate', 'up', 'down')[i]}"
                raw = self.raw[name] = matrix(formats[(3 * e + i) % len(formats)], rows, columns, 3 * e + i)
                self.arrays[name] = torch.from_numpy(raw.dequantize()).bfloat16().float().numpy()

    def weights(self, name: str) -> RawTensor:
        if name in self.raw:
            return self.raw[name]
        array = self.arrays[name]
        return RawTensor.from_bytes(name, "F32", array.shape, array.reshape(-1).view(np.uint8), "test")

    def mixture(self, device: torch.device, tokens: int = 64) -> Mixture:
        return Mixture(self.experts, "layers.0.", self.weights, ExpertBufferPool(str(device), tokens))

    def expected(self, h: torch.Tensor) -> torch.Tensor:
        """In float32, but for the rounding of what enters the second product."""
        x, experts = h.float().cpu(), self.experts
        router = torch.from_numpy(self.arrays["layers.0.router"])
        gate = DenseWeight(router, None, ColumnSplit((0, len(router))))
        ids, weights = route(x, gate, None, None, experts)
        total = torch.zeros_like(x)
        for e in range(experts.count):
            own = [torch.from_numpy(self.arrays[f"layers.0.experts.{e}.{name}"]) for name in ("gate", "up", "down")]
            gate = x @ own[0].T
            if experts.activation == "silu":
                gate = torch.nn.functional.silu(gate)
            else:
                gate = torch.nn.functional.gelu(gate, approximate="tanh")
            made = (gate * (x @ own[1].T)).bfloat16().float() @ own[2].T
            for slot in range(experts.chosen):
                mine = ids[:, slot] == e
                total[mine] += weights[mine, slot, None] * made[mine]
        return total


def rows(device: torch.device, hidden: int = HIDDEN, seed: int = 1) -> torch.Tensor:
    random = np.random.default_rng(seed).normal(0, 1, (PADDED, hidden)).astype(np.float32)
    return torch.from_numpy(random).to(device).bfloat16()


def run(mixture: Mixture, h: torch.Tensor, tokens: int) -> torch.Tensor:
    out = torch.full((len(h) * mixture.hidden,), 7.0, device=h.device)
    mixture(h, out, tokens)
    assert (out[tokens * mixture.hidden :] == 7).all()
    return out[: tokens * mixture.hidden].view(tokens, -1).clone()


@pytest.mark.parametrize(
    "experts",
    [
        PLAIN,
        replace(PLAIN, normalized=False, activation="gelu_tanh"),
        replace(PLAIN, count=4, chosen=4),
        replace(PLAIN, count=1, chosen=1),
    ],
    ids=["plain", "gelu, not normalized", "all chosen", "one expert"],
)
@pytest.mark.parametrize("tokens", [1, 20])
def test_values(experts: Experts, tokens: int, device: torch.device) -> None:
    layer, h = Layer(experts), rows(device)
    made = run(layer.mixture(device), h, tokens)
    torch.testing.assert_close(made.cpu(), layer.expected(h[:tokens]), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("formats", [("Q8_0",), ("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_K", "BF16")], ids="+".join)
def test_values_of_packed_experts(formats: Sequence[str], device: torch.device) -> None:
    """In their own bits where all experts have one format, also a height that is no multiple of a tile's."""
    shape = {"hidden": 96, "width": 160} if formats == ("Q8_0",) else {"hidden": 256, "width": 256}
    layer = Layer(replace(PLAIN, count=3, intermediate_size=shape["width"]), shape["hidden"], formats)
    mixture, h = layer.mixture(device), rows(device, shape["hidden"])
    assert isinstance(mixture.gate_up, RepackedMatrix) == (len(set(formats[:2])) == 1)
    assert isinstance(mixture.down, RepackedMatrix) == (len(formats) < 3 or formats[2] == "Q6_K")
    made = run(mixture, h, 3)
    torch.testing.assert_close(made.cpu(), layer.expected(h[:3]), rtol=2e-3, atol=2e-3)
    assert made.abs().mean() > 0.02
    assert torch.equal(run(mixture, h[2:], 1)[0], made[2])


@pytest.mark.parametrize("formats", [("BF16",), ("Q8_0",)], ids="+".join)
def test_a_row_does_not_depend_on_others(formats: Sequence[str], device: torch.device) -> None:
    """One by one, together, in turns, and beside a row of NaN: the same bits."""
    layer, h = Layer(replace(PLAIN, count=4, intermediate_size=64), 64, formats), rows(device, 64)
    mixture, count = layer.mixture(device), 11
    together = run(mixture, h, count)
    assert torch.equal(run(layer.mixture(device, tokens=6), h, count), together)
    for row in (0, 10):
        assert torch.equal(run(mixture, h[row:], 1)[0], together[row])
    h[2] = torch.nan
    beside = run(mixture, h, count)
    assert beside[2].isnan().all()
    others = [row for row in range(count) if row != 2]
    assert torch.equal(beside[others], together[others])


def test_equal_chances_go_to_the_lower_id(device: torch.device) -> None:
    layer = Layer(replace(PLAIN, chosen=3))
    router = layer.arrays["layers.0.router"]
    router[2:] = router[1]
    mixture = layer.mixture(device)
    run(mixture, rows(device), 16)
    router_wins = mixture.room.ids[:16].tolist()
    assert {tuple(ids) for ids in router_wins} <= {(0, 1, 2), (1, 2, 3)}
    assert len({tuple(ids) for ids in router_wins}) == 2


@pytest.mark.parametrize("few", [True, False])
def test_blocks_hold_every_pair_once(few: bool, device: torch.device) -> None:
    random = np.random.default_rng(3)
    count, tile = 9, 16
    for pairs in (1, 17, 150):
        ids = random.choice([0, 3, 4, 7], pairs).astype(np.int32) if pairs > 1 else np.array([8], np.int32)
        order = torch.full((pairs,), -1, dtype=torch.int32, device=device)
        number = pairs if few else count + pairs // tile
        blocks = torch.full((number + 1, 3), -9, dtype=torch.int32, device=device)
        kernels.group_kernel[(count,)](torch.from_numpy(ids).to(device), order, blocks, pairs, tile, few, 64)
        assert order.tolist() == np.argsort(ids, kind="stable").tolist()
        assert (blocks[-1] == -9).all()
        covered = list[int]()
        for expert, start, size in blocks[:-1].tolist():
            assert 0 <= size <= tile
            mine = order[start : start + size].tolist()
            assert all(ids[pair] == expert for pair in mine)
            covered += mine
        assert sorted(covered) == list(range(pairs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("formats", [("BF16",), ("Q8_0",), ("Q4_K",)], ids="+".join)
def test_bits_at_real_sizes_and_in_a_graph(formats: Sequence[str], device: torch.device) -> None:
    layer = Layer(Experts(count=16, chosen=4, intermediate_size=768), 2048, formats)
    mixture = layer.mixture(device, tokens=512)
    h = torch.randn(2048, 2048, device=device).bfloat16()
    whole = run(mixture, h, 2048)
    for tokens in (1, 2, 8, 64, 100, 300, 512):
        assert torch.equal(run(mixture, h, tokens), whole[:tokens]), tokens
        assert torch.equal(run(mixture, h[2048 - tokens :], tokens), whole[2048 - tokens :]), tokens
    out, graph = torch.zeros(8, 2048, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixture(h, out, 8)
    out.zero_()
    graph.replay()
    assert torch.equal(out, whole[:8])
