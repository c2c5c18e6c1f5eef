"""Numbers of each token for each layer, besides the residual stream (`models.config.ModelConfig.token_inputs`)."""

from collections.abc import Callable

import torch

from twostroke.backends.triton.kernels import token_inputs as kernels
from twostroke.backends.triton.linear import FEW_TOKENS, Linear, Matrix
from twostroke.backends.triton.pass_plan import power_of_two

LookUp = Callable[[Matrix, float, torch.Tensor, torch.Tensor, int], None]


class TokenInputs:
    """What makes the numbers of all layers: a table, and a projection of the token's embedding."""

    def __init__(self, table: Matrix, projection: Linear, norm: torch.Tensor, eps: float) -> None:
        """`norm`: [size] float32, of the projection for each layer."""
        self.table, self.projection, self.norm, self.eps = table, projection, norm, eps

    def __call__(
        self, look_up: LookUp, ids: torch.Tensor, h: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, rows: int
    ) -> None:
        """Tokens [rows] int32 and their embeddings h [padded rows, hidden] -> out [rows, layers * size] float32."""
        size, linear = len(self.norm), self.projection
        look_up(self.table, size**0.5, ids, out, rows)
        linear(h, parts, rows)
        kernels.token_inputs_kernel[(rows, linear.features // size)](
            parts, FEW_TOKENS * linear.features, self.norm, out, linear.columns**-0.5, self.eps,
            linear.features // size, size, linear.parts(rows), power_of_two(size), num_warps=1,
        )  # fmt: skip


class LayerInputs:
    """What a layer adds to the residual stream at its end: norm(projection(activation(gate x) * numbers))."""

    def __init__(self, gate: Linear, projection: Linear, norm: torch.Tensor, activation: int) -> None:
        """`activation`: its place in `linear.ACTIVATIONS`."""
        # norm: [hidden] float32
        self.gate, self.projection, self.norm, self.activation = gate, projection, norm, activation

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The products whose outputs are parts."""
        return self.gate, self.projection

    def __call__(
        self, layer: int, h: torch.Tensor, gated: torch.Tensor, parts: torch.Tensor, inputs: torch.Tensor, rows: int
    ) -> int:
        """h [padded rows, hidden] -> parts of the projection, whose number is returned.

        `gated`: room for [padded rows, size] bfloat16; `inputs`: what `TokenInputs` has made.
        """
        size = self.gate.features
        self.gate(h, parts, rows)
        kernels.input_gate_kernel[(rows,)](
            parts, FEW_TOKENS * size, inputs, gated, layer,
            inputs.shape[1] // size, size, self.gate.parts(rows), self.activation, power_of_two(size), num_warps=1,
        )  # fmt: skip
        self.projection(gated, parts, rows)
        return self.projection.parts(rows)
