"""Layers with a state on a GPU: the launches of their kernels (`models.recurrent`, `kernels/linear_attention.py`).

The chunks of a sequence go one after another through a program for each head and each block of columns of v, since a
state is known when the chunk before it is. A pass with states is launched kernel by kernel: no graph holds it yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from twostroke.backends.triton.kernels import linear_attention, recurrent
from twostroke.backends.triton.linear import FEW_TOKENS, PADDING, Linear
from twostroke.backends.triton.pass_plan import power_of_two
from twostroke.backends.triton.state_plan import ITEM_FIELDS, StatePass
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import StatePages, entry_places
from twostroke.models.recurrent import GatedDeltaNet, LinearAttention, RecurrentMixer

COLUMNS = 256  # of a row that a program takes
ROWS = 16  # of a chunk that are computed at once
VALUES = 32  # columns of v, of which a program keeps the state


class StateBuffers:
    """Intermediate results of one layer, in room that the layers of a model share. It grows, so no graph may use it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._rooms: dict[str, torch.Tensor] = {}

    def of(self, name: str, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[padded rows, columns]; the next call with this name may overwrite them."""
        count = -(-rows // PADDING) * PADDING * columns
        if name not in self._rooms or len(self._rooms[name]) < count:
            self._rooms[name] = torch.zeros(count, dtype=dtype, device=self.device)
        return self._rooms[name][:count].view(-1, columns)


class RecurrentLayer:
    """A layer's mixer with a state."""

    def __init__(
        self, config: ModelConfig, index: int, kv_dtype: str, inputs: Linear, vectors: Mapping[str, torch.Tensor]
    ) -> None:
        self.states, self.index, self.eps = config.state_layers, index, config.norm_eps
        self.shape = self.states[index]
        # inputs: the product of all projections
        self.inputs, self.vectors = inputs, vectors
        self.inputs_place = entry_places(config, kv_dtype, "inputs")[index]
        self.rows_place = entry_places(config, kv_dtype, "rows").get(index)

    @property
    def linears(self) -> Sequence[Linear]:
        """The products of a layer's inputs."""
        return (self.inputs,)

    def __call__(
        self,
        h: torch.Tensor,
        parts: torch.Tensor,  # room for the parts of the projections
        rows: int,
        new_cells: torch.Tensor,  # [groups, rows] int32, where entries of the rows go; below 0 nowhere
        cells: torch.Tensor,  # [groups, entries] int32, where the entries of all sequences are
        states: StatePass,
        rooms: StateBuffers,  # intermediate results
    ) -> torch.Tensor:
        """h [padded rows, hidden] -> [padded rows, heads of v * v_dim], bfloat16."""
        shape, linear = self.shape, self.inputs
        linear(h, parts, rows)
        made = parts, FEW_TOKENS * linear.features
        split = linear.parts(rows)
        group, place = self.inputs_place
        kept = states.storages[group]
        page, blocks = kept.shape[4], -(-shape.conv_size // COLUMNS)
        short = not isinstance(shape, LinearAttention)
        mixed = rooms.of("inputs", rows, shape.conv_size)
        tiles = -(-rows // ROWS)
        recurrent.state_inputs_kernel[(tiles, blocks)](
            *made, new_cells[group], mixed, kept, kept.stride(2), place, rows,
            FEATURES=linear.features, CONV=shape.conv_size, PARTS=split, PRODUCT=short, PAGE=page,
            ROWS=ROWS, BLOCK=COLUMNS,
        )  # fmt: skip
        pages = StatePages(self.states, 4 * states.snapshots.shape[1])
        size = pages.rows_in_page(self.index) * shape.snapshot_row
        there = states.frames, pages.starts[self.index], states.snapshots, states.snapshots.shape[1]
        seen = states.rows, mixed, cells[group], kept, kept.stride(2), place, *there
        if isinstance(shape, LinearAttention):
            out = self._attended(shape, rows, made, split, new_cells, cells, states, rooms, seen, there, size)
        else:
            out = rooms.of("out", rows, shape.v_size)
            recurrent.short_convolution_kernel[(tiles, blocks)](
                *seen, rows, self.vectors["conv"], *made, out,
                CONV=shape.conv_size, WIDTH=shape.conv_width, SIZE=size, PAGE=page, PARTS=split,
                ROWS=ROWS, BLOCK=COLUMNS,
            )  # fmt: skip
        if len(states.targets) and shape.conv_width > 1:
            recurrent.keep_inputs_kernel[(len(states.targets), shape.conv_width - 1, blocks)](
                *seen, states.targets,
                CONV=shape.conv_size, WIDTH=shape.conv_width, STATE=shape.state_values, SIZE=size, PAGE=page,
                BLOCK=COLUMNS,
            )  # fmt: skip
        return out

    def _attended(
        self,
        shape: LinearAttention,
        rows: int,
        made: tuple[torch.Tensor, int],
        split: int,
        new_cells: torch.Tensor,
        cells: torch.Tensor,
        states: StatePass,
        rooms: StateBuffers,
        seen: tuple[Any, ...],
        there: tuple[Any, ...],
        size: int,
    ) -> torch.Tensor:
        assert self.rows_place is not None, "linear attention has rows"
        (group, place), vectors, delta = self.rows_place, self.vectors, isinstance(shape, GatedDeltaNet)
        kept = states.storages[group]
        stride, page, sums_at = kept.stride(2), kept.shape[4], kept.view(torch.float32)
        features, heads = self.inputs.features, shape.num_v_heads
        sizes = {"HK": shape.num_k_heads, "HV": heads, "K": shape.k_dim, "V": shape.v_dim}
        values = rooms.of("values", rows, shape.conv_size)
        tiles = -(-rows // ROWS)
        recurrent.convolve_kernel[(tiles, 2 * shape.num_k_heads + heads)](
            *seen, rows, vectors["conv"], vectors.get("conv_bias"), shape.k_dim**-0.5,
            new_cells[group], kept, stride, place, values, **sizes,
            WIDTH=shape.conv_width, SIZE=size, PAGE=page, BIAS="conv_bias" in vectors, NORMS=delta,
            ROWS=ROWS, BLOCK=power_of_two(max(shape.k_dim, shape.v_dim)), num_warps=4,
        )  # fmt: skip
        sums, write = (rooms.of(name, rows, heads, torch.float32) for name in ("sums", "write"))
        recurrent.decays_kernel[(len(states.items), heads)](
            states.items, *made, vectors["decay"], vectors["dt_bias"], cells[group], new_cells[group],
            sums_at, stride // 2, place, sums, write,
            FEATURES=features, HV=heads, FIRST=shape.conv_size + shape.v_size, PARTS=split, PAGE=page,
            WIDTH=shape.row_values // 2, DELTA=delta, CHUNK=shape.chunk, FIELDS=ITEM_FIELDS, num_warps=1,
        )  # fmt: skip
        attended = rooms.of("attended", rows, shape.v_size, torch.float32)
        linear_attention.linear_attention_kernel[(len(states.sequences), heads, -(-shape.v_dim // VALUES))](
            states.sequences, states.items, values, sums, write, vectors.get("skip"), cells[group], new_cells[group],
            kept, sums_at, stride, place, *there, attended, **sizes,
            TILED=shape.tiled, DELTA=delta, PAGE=page, SIZE=size, CHUNK=shape.chunk, BLOCK=ROWS,
            BLOCK_K=max(16, power_of_two(shape.k_dim)), BLOCK_V=VALUES, FIELDS=ITEM_FIELDS,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        width = shape.v_dim if delta else shape.v_size // shape.num_k_heads
        out = rooms.of("out", rows, shape.v_size)
        gated = ROWS if width <= COLUMNS else 1  # rows of a tile
        recurrent.state_gate_kernel[(-(-rows // gated), shape.v_size // width)](
            attended, *made, vectors["state_norm"], out, self.eps, rows,
            FEATURES=features, FIRST=shape.conv_size, SIZE=shape.v_size, WIDTH=width, PARTS=split,
            GATED_FIRST=not delta, ROWS=gated, BLOCK=power_of_two(width), num_warps=4,
        )  # fmt: skip
        return out


def lacking(mixers: Sequence[RecurrentMixer]) -> str | None:
    """What kernels lack for these mixers, in words; None if nothing."""
    if any(one.chunk % ROWS or one.chunk != power_of_two(one.chunk) for one in mixers):
        return "chunks of states that are no power of two"
    return None
