"""Layers with a mixture of experts: their weights on the device, and the launches of their kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.backends.interface import Weights
from twostroke.backends.triton.kernels import experts as kernels
from twostroke.backends.triton.linear import TILES, bfloat16, tiles
from twostroke.models.config import Experts

MOST_TOKENS = 2048  # that are computed at once: a longer step takes turns, and a row's bits are the same
ROUTER = (4, 8, 256)  # tokens, experts and columns of the router's tiles
MOST_CHUNK = 4096  # pairs that a program which orders them looks at at once
SUMMED = 1024  # features that a program adds


@dataclass(frozen=True, eq=False)
class Room:
    """What a mixture computes on the way, for MOST_TOKENS tokens. It never moves, so captured graphs may point to it.

    Attributes:
        logits: [tokens, experts] float32, of the router.
        ids, weights: [tokens, chosen] int32 and float32, by ascending id.
        order: [pairs] int32, pairs in the order of their experts.
        blocks: [blocks, 3] int32.
        gated: [pairs, intermediate] bfloat16, in the order of experts.
        made: [pairs, hidden] float32, by the pairs' numbers.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    blocks: torch.Tensor
    gated: torch.Tensor
    made: torch.Tensor


class Rooms:
    """The rooms of one model, shared by its layers, whose passes must not overlap."""

    def __init__(self, device: str, tokens: int = MOST_TOKENS) -> None:
        self.device, self.tokens = device, tokens
        self._made: dict[tuple[int, ...], Room] = {}

    def of(self, experts: Experts, hidden: int) -> Room:
        """The room for layers of this shape."""
        shape = experts.count, experts.chosen, experts.intermediate_size, hidden
        if shape not in self._made:
            pairs = self.tokens * experts.chosen

            def room(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
                return torch.zeros(sizes, dtype=dtype, device=self.device)

            self._made[shape] = Room(
                logits=room(self.tokens, experts.count),
                ids=room(self.tokens, experts.chosen, dtype=torch.int32),
                weights=room(self.tokens, experts.chosen),
                order=room(pairs, dtype=torch.int32),
                blocks=room(experts.count + pairs // min(TILES), 3, dtype=torch.int32),
                gated=room(pairs, experts.intermediate_size, dtype=torch.bfloat16),
                made=room(pairs, hidden),
            )
        return self._made[shape]


class Mixture:
    """The mixture of one layer. A row's result depends on nothing but the row."""

    def __init__(self, experts: Experts, prefix: str, weights: Weights, rooms: Rooms) -> None:
        """`prefix`: of the layer's tensors, such as "layers.0.". Experts are held in bfloat16, whatever their format.

        Raises torch.OutOfMemoryError if there is no room.
        """
        device, count, width = rooms.device, experts.count, experts.intermediate_size
        router = weights(prefix + "router")
        self.experts, self.hidden, self.rooms = experts, router.shape[1], rooms
        self.router = torch.from_numpy(router.dequantize()).to(device, torch.float32).reshape(count, self.hidden)
        self.gate_up = torch.empty(count, 2, width, self.hidden, dtype=torch.bfloat16, device=device)
        self.down = torch.empty(count, self.hidden, width, dtype=torch.bfloat16, device=device)
        for e in range(count):
            own = self.gate_up[e, 0], self.gate_up[e, 1], self.down[e]
            for name, place in zip(("gate", "up", "down"), own, strict=True):
                raw = weights(f"{prefix}experts.{e}.{name}")
                place.copy_(bfloat16(raw, device))
                raw.release()
        self.room = rooms.of(experts, self.hidden)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes

    def __call__(self, h: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        """The first `tokens` rows of h [padded, hidden] bfloat16, into out, float32, as [tokens, hidden].

        It only launches kernels, whose grids depend on `tokens` alone: it can be captured in a graph.
        """
        out = out.view(-1)
        for first in range(0, tokens, self.rooms.tokens):
            count = min(self.rooms.tokens, tokens - first)
            self._some(h[first:], out[first * self.hidden :], count)

    def _some(self, h: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        experts, hidden, room = self.experts, self.hidden, self.room
        count, chosen, width = experts.count, experts.chosen, experts.intermediate_size
        height, wide, deep = ROUTER
        kernels.router_kernel[(-(-tokens // height), -(-count // wide))](
            h, self.router, room.logits, tokens, count, hidden, height, wide, deep, num_warps=4
        )
        kernels.choose_kernel[(tokens,)](
            room.logits, room.ids, room.weights, count, chosen, experts.normalized, power_of_two(count), num_warps=1
        )
        pairs = tokens * chosen
        tile = tiles(min(max(TILES), -(-pairs // count)))  # as many as an expert has on average
        few = pairs < count + pairs // tile.tokens
        blocks = pairs if few else count + pairs // tile.tokens
        kernels.group_kernel[(count,)](
            room.ids, room.order, room.blocks, pairs, tile.tokens, few,
            min(MOST_CHUNK, max(128, power_of_two(pairs))), num_warps=4,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        kernels.experts_gated_kernel[(blocks, -(-width // tile.features))](
            h, self.gate_up, room.order, room.blocks, room.gated, chosen, width, hidden,
            experts.activation == "gelu_tanh", tile.features, tile.tokens, tile.columns, **options,
        )  # fmt: skip
        kernels.experts_down_kernel[(blocks, -(-hidden // tile.features))](
            room.gated, self.down, room.order, room.blocks, room.made, hidden, width,
            tile.features, tile.tokens, tile.columns, **options,
        )  # fmt: skip
        kernels.weighted_sum_kernel[(tokens, -(-hidden // SUMMED))](
            room.made, room.weights, out, chosen, hidden, min(SUMMED, power_of_two(hidden)), num_warps=4
        )


def power_of_two(count: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, count - 1).bit_length()
