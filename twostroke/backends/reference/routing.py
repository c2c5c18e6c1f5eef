"""Which experts a row has."""

import torch
import torch.nn.functional as F

from twostroke.backends.reference.operations import DenseWeight
from twostroke.models.config import Experts


def route(
    x: torch.Tensor,
    router: DenseWeight,
    selection: torch.Tensor | None,
    factors: torch.Tensor | None,
    experts: Experts,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row: [N, chosen] ids and float32 weights; the most probable first, ties by id.

    Softmax over all experts, or each one's sigmoid, then the largest (transformers' Qwen3MoeTopKRouter and
    Lfm2MoeTopKRouter), with `selection` added for the choice, and `factors` of the weights.
    """
    bias = None if router.bias is None else router.bias.float()
    logits = F.linear(x.float(), router.matrix.float(), bias)
    chances = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
    ids = torch.sort(
        chances if selection is None else chances + selection, dim=-1, descending=True, stable=True
    ).indices[:, : experts.chosen]
    weights = chances.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) if experts.normalized else weights
    weights = weights if experts.scale == 1 else weights * experts.scale
    return ids, weights if factors is None else weights * factors[ids]
