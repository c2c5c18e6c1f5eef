"""Which experts a row has."""

import torch
import torch.nn.functional as F

from twostroke.backends.reference.operations import DenseWeight
from twostroke.models.config import Experts


def route(
    x: torch.Tensor, router: DenseWeight, selection: torch.Tensor | None, factors: torch.Tensor | None, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row: [N, chosen] ids and float32 weights; the most probable first, ties by id.

    Softmax over all experts, or each one's sigmoid, then the largest (transformers' Qwen3MoeTopKRouter and
    Lfm2MoeTopKRouter), with `selection` added for the choice, and `factors` of the weights. With groups the experts of
    those that are not chosen are left out first (DeepseekV3TopkRouter).
    """
    bias = None if router.bias is None else router.bias.float()
    logits = F.linear(x.float(), router.matrix.float(), bias)
    chances = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    values = chances if selection is None else chances + selection
    if experts.groups > 1:
        grouped = values.unflatten(-1, (experts.groups, -1))
        best = _largest(grouped.topk(2).values.sum(-1), experts.groups_chosen)
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, value=False)
        values = grouped.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
    ids = _largest(values, experts.chosen)
    weights = chances.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if experts.normalized else weights
    weights = weights if experts.scale == 1 else weights * experts.scale
    return ids, weights if factors is None else weights * factors[ids]


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the largest values, [N, count]; of equal ones the first."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]
