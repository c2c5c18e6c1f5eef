"""What a pass reads and writes on the device: its plan, optional inputs, and activations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostroke.backends.triton.layers import LayerWeights, TritonLayer
from twostroke.backends.triton.linear import FEW_TOKENS, PADDING, Linear
from twostroke.backends.triton.pass_plan import PassShape
from twostroke.backends.triton.state_plan import StatePass
from twostroke.models.config import GatedMLP


@dataclass(frozen=True)
class PlanTensors:
    """Views of the device's copy of `Work.packed`. `work` and `joined`: for each shape of heads."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    spans: torch.Tensor
    starts: torch.Tensor
    work: list[torch.Tensor]
    joined: list[torch.Tensor]

    @classmethod
    def of(cls, packed: torch.Tensor, shape: PassShape) -> "PlanTensors":
        ids, positions, cells, spans, starts, *work = torch.split(packed, shape.sizes)
        return cls(ids, positions, cells, spans, starts, work[::2], work[1::2])


@dataclass(frozen=True)
class PassExtras:
    """Optional inputs of a pass.

    Factors of dropout [layers, N, hidden], rows that return queries, and hidden states, what is added to scores
    [layers, KV heads, entries of all sequences], in logarithms to base 2, and states of recurrent layers.
    """

    dropout: torch.Tensor | None = None
    query_rows: torch.Tensor | None = None
    state_rows: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    states: StatePass | None = None


class PassBuffers:
    """Activations of a pass of up to `rows` rows, and its sequences' cells and positions.

    Rows are padded, so that tiles of tokens need no masks.
    """

    def __init__(
        self,
        model: LayerWeights,
        layers: Sequence[TritonLayer],
        linears: Sequence[Linear],
        groups: int,
        rows: int,
        entries: int,
    ) -> None:
        """`linears`: whose outputs are parts. `groups` of layers whose entries share pages."""
        config, device = model.config, model.device
        own, size = model.own.attentions, config.token_inputs
        self.rows, self.entries = -(-rows // PADDING) * PADDING, entries
        tall = self.rows

        def room(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.x = room(tall, config.hidden_size, dtype=torch.float32)
        self.h = room(tall, config.hidden_size)
        self.routed = room(tall if any(one.expert_norms for one in layers) else 0, config.hidden_size)
        self.parts = room(_parts(linears, config.hidden_size, tall), dtype=torch.float32)
        self.shared = room(len(self.parts) if any(one.shared is not None for one in layers) else 1, dtype=torch.float32)
        width = max(one.num_heads * one.head_dim for one in own)
        self.q, self.attended = room(tall, width), room(tall, width)
        squared = tall * max(one.num_heads * one.whole_norm for one in own)
        self.squares = [room(squared, dtype=torch.float32) for _ in range(2)]  # of heads of q, and of k
        self.inputs = room(tall if size else 0, config.num_layers * size, dtype=torch.float32)
        mlps = [one.feed_forward for one in layers]
        widths = (mlp.intermediate_size if isinstance(mlp, GatedMLP) else mlp.shared_size for mlp in mlps)
        self.gated = room(tall, max((1, size, *widths)))
        self.ids = room(tall, dtype=torch.int32)
        self.cells, self.positions = room(groups, entries, dtype=torch.int32), room(entries, dtype=torch.int32)


def _parts(linears: Sequence[Linear], hidden: int, rows: int) -> int:
    """Floats of the largest product: in segments for few tokens, as `rows` rows for many."""
    few = FEW_TOKENS * max((0, *(linear.features * linear.segments for linear in linears)))
    return max(few, rows * max((hidden, *(linear.features for linear in linears))))
