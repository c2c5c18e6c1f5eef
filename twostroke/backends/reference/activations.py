"""Functions between matrix products: of feed-forward layers, and the bound of scores."""

import torch
import torch.nn.functional as F

from twostroke.models.feed_forward import UNGATED, Activation


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up; see `Activation` for gpt-oss's. Where there is no gate, it is `up`."""
    if activation == "swiglu_oai":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    if activation == UNGATED:
        return F.relu(gate) * up
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Scores or logits between -cap and cap."""
    return torch.tanh(x / cap) * cap
