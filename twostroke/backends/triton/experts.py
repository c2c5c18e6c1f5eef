"""Layers with a mixture of experts: their weights on the device, and the launches of their kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twostroke.backends.interface import Weights
from twostroke.backends.triton.kernels import experts as kernels
from twostroke.backends.triton.kernels import packed_experts as quantized
from twostroke.backends.triton.linear import ACTIVATIONS, GatedLinear, Linear, bfloat16
from twostroke.backends.triton.packed import PACKED_FORMATS, ROWS, RepackedMatrix, joined, pack
from twostroke.backends.triton.pass_plan import power_of_two
from twostroke.backends.triton.tile_shapes import FEW_TOKENS, TileShape, packed_stages
from twostroke.models.config import Experts
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import FACTORS, SELECTION_BIAS

# For so many pairs of an expert, on average. Features are first in a product, so all of these add in the same order.
TILES = {
    16: TileShape(64, 16, 128, 4, 4),
    32: TileShape(64, 32, 128, 4, 4),
    64: TileShape(64, 64, 64, 4, 4),
    128: TileShape(128, 128, 64, 8, 4),
}
PACKED_TILE = 64  # the most pairs of a tile beside two packed matrices: more do not fit the registers
MAX_TOKENS_AT_ONCE = 4096  # that are computed at once: a longer step takes turns, and a row's bits are the same
ROUTER = (4, 4, 512)  # tokens, experts and columns of the router's tiles
MAX_CHUNK_PAIRS = 4096  # pairs that a program which orders them looks at at once
SUMMED = 1024  # features that a program adds
GATED_STAGES = 3  # of two matrices of 64 features, so that two programs fit a multiprocessor


@dataclass(frozen=True, eq=False)
class ExpertBuffers:
    """Intermediate results of a mixture, for MAX_TOKENS_AT_ONCE tokens, at fixed addresses: graphs point to them."""

    logits: torch.Tensor  # [tokens, experts] float32, of the router
    # ids, weights: [tokens, chosen] int32 and float32, by ascending id
    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor  # [pairs] int32, pairs in the order of their experts
    blocks: torch.Tensor  # [blocks, 3] int32
    gated: torch.Tensor  # [pairs, width] bfloat16, in the order of experts
    made: torch.Tensor  # [pairs, features] float32, by the pairs' numbers


class ExpertBufferPool:
    """The rooms of one model, shared by its layers, whose passes must not overlap."""

    def __init__(self, device: str, tokens: int = MAX_TOKENS_AT_ONCE) -> None:
        self.device, self.tokens = device, tokens
        self._made: dict[tuple[int, ...], ExpertBuffers] = {}

    def of(self, experts: Experts, width: int, features: int) -> ExpertBuffers:
        """The room for layers of this shape: outputs of a first product, and of a second one."""
        shape = experts.count, experts.chosen, width, features
        if shape not in self._made:
            pairs = self.tokens * experts.chosen

            def room(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.zeros(sizes, dtype=dtype, device=self.device)

            self._made[shape] = ExpertBuffers(
                logits=room(self.tokens, experts.count),
                ids=room(self.tokens, experts.chosen, dtype=torch.int32),
                weights=room(self.tokens, experts.chosen),
                order=room(pairs, dtype=torch.int32),
                blocks=room(experts.count + pairs // min(TILES), 3, dtype=torch.int32),
                gated=room(pairs, width, dtype=torch.bfloat16),
                made=room(pairs, features),
            )
        return self._made[shape]


Whole = Callable[[torch.Tensor, int, int], torch.Tensor]


def alone(gated: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """All columns of gated values [rows.., own], of which there are `width`: a single process has them."""
    return gated


class Mixture:
    """The mixture of one layer. A row's result depends on nothing but the row.

    Attributes:
        width, features: outputs of the first and of the second product that are computed here.
    """

    def __init__(
        self, experts: Experts, prefix: str, weights: Weights, rooms: ExpertBufferPool, whole: Whole = alone
    ) -> None:
        """`prefix` of the names of the layer's tensors: "layers.0."; `whole` joins what several ranks have made.

        Matrices stay in their format if there are kernels for it and all experts have the same, else they are bfloat16.
        Raises torch.OutOfMemoryError if there is no room.
        """
        router = weights(prefix + "router")
        self.experts, self.hidden, self.rooms, self.whole = experts, router.shape[1], rooms, whole
        self.router = torch.from_numpy(router.dequantize()).to(rooms.device, torch.float32)

        def numbers(name: str, there: bool) -> torch.Tensor | None:
            return torch.from_numpy(weights(prefix + name).dequantize()).to(rooms.device) if there else None

        self.selection = numbers(SELECTION_BIAS, experts.selection_bias)
        self.factors = numbers(FACTORS, experts.factors)
        if experts.scale != 1:
            ones = torch.ones(experts.count, device=rooms.device) if self.factors is None else self.factors
            self.factors = ones * experts.scale

        def stack(*names: str) -> tuple[torch.Tensor | RepackedMatrix, int]:
            every = [f"{prefix}experts.{e}.{name}" for e in range(experts.count) for name in names]
            raws = [weights(name) for name in every]
            return _stacked(raws, rooms.device), raws[0].shape[0]

        def biases(*names: str) -> torch.Tensor | None:
            every = [f"{prefix}{name}_bias" for name in names]
            values = np.concatenate([weights(name).dequantize() for name in every]) if experts.bias else None
            return None if values is None else torch.from_numpy(values).to(rooms.device, torch.float32)

        of_all = [f"experts.{e}." for e in range(experts.count)]
        self.router_bias, self.down_bias = biases("router"), biases(*(f"{one}down" for one in of_all))
        self.gate_up_bias = biases(*(f"{one}{part}" for one in of_all for part in ("gate", "up")))
        (self.gate_up, self.width), (self.down, self.features) = stack("gate", "up"), stack("down")
        self.room = rooms.of(experts, self.width, self.features)

    def __call__(self, h: torch.Tensor, out: torch.Tensor, tokens: int, routed: torch.Tensor | None = None) -> None:
        """The first `tokens` rows of h [padded, hidden] bfloat16, into out, float32, as [tokens, features].

        `routed`: what the router reads, as h; None for h.
        It only launches kernels, whose grids depend on `tokens` alone: it can be captured in a graph.
        """
        out, routed = out.view(-1), h if routed is None else routed
        for first in range(0, tokens, self.rooms.tokens):
            count = min(self.rooms.tokens, tokens - first)
            self._route(routed[first:], count)
            self._multiply(h[first:], count)
            self._sum(out[first * self.features :], count)

    def _route(self, h: torch.Tensor, tokens: int) -> None:
        """Each token's experts and their weights."""
        experts, room = self.experts, self.room
        height, wide, deep = ROUTER
        kernels.router_kernel[(-(-tokens // height), -(-experts.count // wide))](
            h, self.router, self.router_bias, room.logits, tokens, experts.count, self.hidden, experts.bias,
            height, wide, deep, num_warps=4,
        )  # fmt: skip
        kernels.choose_kernel[(tokens,)](
            room.logits, self.selection, self.factors, room.ids, room.weights, experts.count, experts.chosen,
            experts.normalized, experts.sigmoid, experts.selection_bias, self.factors is not None,
            power_of_two(experts.count), num_warps=1,
        )  # fmt: skip

    def _multiply(self, h: torch.Tensor, tokens: int) -> None:
        """Compute the outputs of each token's experts."""
        experts, room = self.experts, self.room
        pairs = tokens * experts.chosen
        most = PACKED_TILE if isinstance(self.gate_up, RepackedMatrix) else max(TILES)
        tile = next(TILES[size] for size in TILES if size >= min(most, -(-pairs // experts.count)))
        few = pairs < experts.count + pairs // tile.tokens
        blocks = pairs if few else experts.count + pairs // tile.tokens
        kernels.group_kernel[(experts.count,)](
            room.ids, room.order, room.blocks, pairs, tile.tokens, few,
            min(MAX_CHUNK_PAIRS, max(128, power_of_two(pairs))), num_warps=4,
        )  # fmt: skip
        if self.width:
            self._first(h, tile, blocks)
        gated = self.whole(room.gated, pairs, experts.intermediate_size)
        if self.features:
            self._second(gated, tile, blocks)

    def _first(self, h: torch.Tensor, tile: TileShape, blocks: int) -> None:
        """h -> `room.gated`, of the pairs in so many blocks."""
        chosen, width, hidden, room = self.experts.chosen, self.width, self.hidden, self.room
        activation, biased = ACTIVATIONS.index(self.experts.activation), self.experts.bias
        if isinstance(self.gate_up, RepackedMatrix):
            quantized.packed_experts_gated_kernel[(blocks, -(-width // ROWS))](
                h, *self.gate_up.arrays, self.gate_up_bias, room.order, room.blocks, room.gated, chosen, width, hidden,
                self.gate_up.units, activation, biased, tile.tokens, self.gate_up.form.code,
                num_warps=4, num_stages=packed_stages(tile.tokens),
            )  # fmt: skip
        else:
            kernels.experts_gated_kernel[(blocks, -(-width // tile.features))](
                h, self.gate_up, self.gate_up_bias, room.order, room.blocks, room.gated, chosen, width, hidden,
                activation, biased, tile.features, tile.tokens, tile.columns, num_warps=tile.warps,
                num_stages=GATED_STAGES if tile.features == 64 else tile.stages,
            )  # fmt: skip

    def _second(self, gated: torch.Tensor, tile: TileShape, blocks: int) -> None:
        """All columns of gated values -> `room.made`."""
        features, columns, room, biased = self.features, self.experts.intermediate_size, self.room, self.experts.bias
        if isinstance(self.down, RepackedMatrix):
            quantized.packed_experts_down_kernel[(blocks, -(-features // ROWS))](
                gated, *self.down.arrays, self.down_bias, room.order, room.blocks, room.made, features, columns,
                self.down.units, biased, tile.tokens, self.down.form.code,
                num_warps=4, num_stages=packed_stages(tile.tokens),
            )  # fmt: skip
        else:
            kernels.experts_down_kernel[(blocks, -(-features // tile.features))](
                gated, self.down, self.down_bias, room.order, room.blocks, room.made, features, columns, biased,
                tile.features, tile.tokens, tile.columns, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

    def _sum(self, out: torch.Tensor, tokens: int) -> None:
        room, features = self.room, self.features
        if features:
            kernels.weighted_sum_kernel[(tokens, -(-features // SUMMED))](
                room.made, room.weights, out, self.experts.chosen, features, min(SUMMED, power_of_two(features)),
                num_warps=4,
            )  # fmt: skip


def _stacked(raws: list[RawTensor], device: str) -> torch.Tensor | RepackedMatrix:
    """Matrices of one shape, one after the other: packed, or bfloat16 [count, rows, columns]."""
    rows, columns = raws[0].shape
    if rows and raws[0].format in PACKED_FORMATS and len({raw.format for raw in raws}) == 1:
        packed: list[RepackedMatrix] = []
        for raw in raws:
            packed.append(pack(raw, device))
            raw.release()
        return joined(packed, rows)
    made = torch.empty(len(raws), rows, columns, dtype=torch.bfloat16, device=device)
    for place, raw in zip(made, raws, strict=True):
        place.copy_(bfloat16(raw, device))
        raw.release()
    return made


class SharedExpert:
    """A gated MLP whose output, times the sigmoid of a product if it has a gate, is added to that of a mixture."""

    def __init__(
        self, gated: GatedLinear, down: Linear, gate: torch.Tensor | None, norms: Sequence[torch.Tensor], eps: float
    ) -> None:
        """`gate`: [hidden] float32. `norms`: of its output and of the mixture's, if they have some of their own."""
        self.gated, self.down, self.gate, self.norms, self.eps = gated, down, gate, norms, eps

    def multiply(self, h: torch.Tensor, gated: torch.Tensor, parts: torch.Tensor, rows: int) -> None:
        """Compute the output's parts of h [padded rows, hidden]; `gated`: room for what lies between."""
        between = gated.view(-1)[: len(gated) * self.gated.rows].view(len(gated), self.gated.rows)
        self.gated(h, between, rows)
        self.down(between, parts, rows)

    def add(self, h: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """Add the parts to the mixture's output, float32 [rows, hidden]."""
        hidden = self.down.features
        own, mixture = self.norms or (None, None)
        kernels.shared_expert_kernel[(rows,)](
            parts, FEW_TOKENS * hidden, h, self.gate, own, mixture, self.eps, out, hidden, self.down.parts(rows),
            self.gate is not None, own is not None, power_of_two(hidden), num_warps=8 if hidden <= 1024 else 16,
        )  # fmt: skip
