"""The expert that every token passes beside those that a router has chosen (`models.config.Experts.shared_size`)."""

import torch

from twostroke.backends.triton.kernels import experts as kernels
from twostroke.backends.triton.linear import GatedLinear, Linear
from twostroke.backends.triton.pass_plan import power_of_two
from twostroke.backends.triton.tile_shapes import FEW_TOKENS


class SharedExpert:
    """A gated MLP whose output, times the sigmoid of a product if it has a gate, is added to that of a mixture."""

    def __init__(self, gated: GatedLinear, down: Linear, gate: torch.Tensor | None) -> None:
        """`gate`: [hidden] float32."""
        self.gated, self.down, self.gate = gated, down, gate

    def __call__(self, h: torch.Tensor, gated: torch.Tensor, parts: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        """Add to out, float32 [rows, hidden], what it makes of h [padded rows, hidden].

        `gated`, `parts`: room for what lies between.
        """
        hidden = self.down.features
        between = gated.view(-1)[: len(gated) * self.gated.rows].view(len(gated), self.gated.rows)
        self.gated(h, between, rows)
        self.down(between, parts, rows)
        kernels.shared_expert_kernel[(rows,)](
            parts, FEW_TOKENS * hidden, h, self.gate, out, hidden, self.down.parts(rows), self.gate is not None,
            power_of_two(hidden), num_warps=8 if hidden <= 1024 else 16, enable_fp_fusion=False,
        )  # fmt: skip
