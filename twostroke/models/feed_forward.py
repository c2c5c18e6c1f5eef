"""The descriptions of feed-forward layers: an MLP, or a mixture of experts."""

from dataclasses import dataclass, field
from typing import Literal

from twostroke.models.stable_repr import LATER, StableRepr

# "swiglu_oai" is gpt-oss's: clamp(gate, max=7) * sigmoid(1.702 gate) * (clamp(up, -7, 7) + 1) (OpenAI 2025,
# arXiv:2508.10925). "relu2" has no gate: the square of max(up, 0) (So et al. 2021, arXiv:2109.08668).
Activation = Literal["silu", "gelu_tanh", "swiglu_oai", "relu2"]
UNGATED: Activation = "relu2"


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate x) * (up x)), as in SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202).

    `intermediate_size`: 0 for none, in a layer that is a mixer alone. `bias`: whether gate, up and down have biases
    (Llama with `mlp_bias`).
    """

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = field(default=False, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices that a row is multiplied by first."""
        return ("up",) if self.activation == UNGATED else ("gate", "up")


@dataclass(frozen=True, repr=False)
class Experts(StableRepr):
    """A mixture of gated MLPs: a router chooses a few of them for each token (Fedus et al. 2021, arXiv:2101.03961).

    The router's softmax runs over all experts in float32, or it takes the sigmoid of each. The experts with the highest
    values are chosen; ties go to the lower id. Their outputs, weighted by these, are summed in the order of their ids.
    """

    count: int  # number of experts in the layer
    chosen: int  # number of experts that each token passes through
    intermediate_size: int  # intermediate size of each expert
    activation: Activation = "silu"
    normalized: bool = True  # whether the weights of the chosen experts are divided by their sum
    # intermediate size of an expert that every token passes too, whose output is weighted by a sigmoid (Qwen2-MoE, Yang
    # et al. 2024, arXiv:2407.10671); 0 for none.
    shared_size: int = field(default=0, repr=False, metadata=LATER)
    # whether the router and all matrices of the experts have biases (gpt-oss)
    bias: bool = field(default=False, repr=False, metadata=LATER)
    # whether it is; Granite 4 adds that output as it is
    shared_gated: bool = field(default=True, repr=False, metadata=LATER)
    # whether the router's values are sigmoids (DeepSeek-V3, arXiv:2412.19437, LFM2)
    sigmoid: bool = field(default=False, repr=False, metadata=LATER)
    # whether each expert has a number that is added to its value for the choice alone (the same)
    selection_bias: bool = field(default=False, repr=False, metadata=LATER)
    # whether the router, the others and the shared expert each read the residual stream after a norm of their own, and
    # both sums pass one before they are added (Gemma 4). The layer's norm is the shared expert's.
    own_norms: bool = field(default=False, repr=False, metadata=LATER)
    # whether each expert has a number by which its weight is multiplied at the end (Gemma 4)
    factors: bool = field(default=False, repr=False, metadata=LATER)
    # factor of the weights of the chosen experts (DeepSeek)
    scale: float = field(default=1.0, repr=False, metadata=LATER)
    # groups of neighbours, of which a token's experts are in `groups_chosen`: those with the largest sums of their two
    # highest values, `selection_bias` included (DeepSeek-V3)
    groups: int = field(default=1, repr=False, metadata=LATER)
    groups_chosen: int = field(default=1, repr=False, metadata=LATER)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The matrices of an expert that a row is multiplied by first."""
        return GatedMLP(self.intermediate_size, self.activation).inputs
