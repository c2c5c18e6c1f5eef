"""Mixers of tokens that keep a state of fixed size in place of K and V.

Snapshots of states are kept at multiples of `chunk` positions. Between them a layer keeps entries as attention does:
rows, which say how each token changes the state, and the last inputs of its convolution.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


class RecurrentMixer(ABC):
    """What all kinds of states have in common. Their records of sizes are dataclasses."""

    conv_width: int  # inputs that a causal convolution sees, the token's own included
    chunk: int  # positions between two snapshots of the state
    num_k_heads: int  # heads of q and k; num_v_heads: heads of v, of which as many share a head of k
    num_v_heads: int
    # k_dim, v_dim: their sizes
    k_dim: int
    v_dim: int
    # which heads of v share a head of k: every `num_k_heads`-th one (llama.cpp's files), not neighbours
    tiled: bool = False

    @property
    def k_size(self) -> int:
        """Numbers of all heads of q, and of k."""
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        """Numbers of all heads of v, and of what the output projection is given."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_size(self) -> int:
        """Numbers of a token that the convolution sees: q, k and v."""
        return 2 * self.k_size + self.v_size

    @property
    def row_values(self) -> int:
        """Numbers of a token's row: k, u, and for each head of v the sum of log decays since the chunk's start, as
        float32 in the room of two numbers. 0 if tokens change nothing but the inputs of the convolution."""
        return self.k_size + self.v_size + 2 * self.num_v_heads

    @property
    def state_values(self) -> int:
        """Numbers of the state, float32: [heads of v, k_dim, v_dim]."""
        return self.num_v_heads * self.k_dim * self.v_dim

    @property
    def snapshot_values(self) -> int:
        """Numbers of a snapshot: the state, and the inputs of the convolution that later tokens see."""
        return self.state_values + (self.conv_width - 1) * self.conv_size

    @property
    def snapshot_row(self) -> int:
        """Numbers of a snapshot that are never cut apart by the end of a page."""
        return self.v_dim

    @property
    @abstractmethod
    def projections(self) -> dict[str, int]:
        """What is computed of a layer's inputs, and its sizes."""

    @property
    @abstractmethod
    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Tensors that no product multiplies, and their shapes."""

    @property
    @abstractmethod
    def pair_flops(self) -> int:
        """FLOPs of a row and one before it in its chunk."""

    @property
    @abstractmethod
    def row_flops(self) -> int:
        """FLOPs of a row with the state, and of its convolution."""


@dataclass(frozen=True)
class LinearAttention(RecurrentMixer):
    """A state that is a matrix a head, and the row of each token."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    chunk: int = 64
    # whether a row has beside each head of k what the heads of v that share it have written, as kernels read it. Values
    # of older versions, whose rows have all of k first, are refused as of another geometry.
    by_head: bool = True

    @cached_property
    def row_order(self) -> np.ndarray:
        """The columns of k and u, all of k first, in the order of a row: [k_size + v_size]."""
        count, heads = self.num_v_heads // self.num_k_heads, np.arange(self.num_v_heads)
        shared = heads.reshape(count, -1).T if self.tiled else heads.reshape(-1, count)
        keys = np.arange(self.k_size).reshape(self.num_k_heads, -1)
        written = self.k_size + np.arange(self.v_size).reshape(self.num_v_heads, -1)[shared]
        return np.concatenate([keys, written.reshape(self.num_k_heads, -1)], 1).reshape(-1)


@dataclass(frozen=True)
class GatedDeltaNet(LinearAttention):
    """Linear attention whose state is a matrix a head (Yang et al. 2024, arXiv:2412.06464), as in Qwen3.5.

    With decay g in (0, 1), write strength b, key k, value v and query q of a token, and the state S [k_dim, v_dim]:

        u = b (v - g S^T k)        S <- g S + k u^T        out = S^T q

    Unrolled from a position c at which the state is known, the rows k, u and log g of the tokens since c take the place
    of the steps between, so nothing depends on how many tokens came at once.
    """

    tiled: bool = False

    @property
    def projections(self) -> dict[str, int]:
        """What is computed of a layer's inputs, and its sizes: z gates the output, b and a make b and g."""
        sizes = dict.fromkeys("qk", self.k_size) | dict.fromkeys("vz", self.v_size)
        return {f"state_{name}": size for name, size in (sizes | dict.fromkeys("ba", self.num_v_heads)).items()}

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        heads = (self.num_v_heads,)
        own = {"decay": heads, "dt_bias": heads, "state_norm": (self.v_dim,)}
        return {"conv": (self.conv_size, self.conv_width)} | own

    @property
    def pair_flops(self) -> int:
        """A row meets the others with its key and with its query."""
        return 4 * (self.k_size + self.v_size)

    @property
    def row_flops(self) -> int:
        """A row meets the state with its key, its query, and as a part of the next state."""
        return 6 * self.state_values + 2 * self.conv_width * self.conv_size


@dataclass(frozen=True)
class Mamba2(LinearAttention):
    """A state space whose state is a matrix a head (Dao and Gu 2024, arXiv:2405.21060), as in Granite 4.

    With a step d > 0 and what a head has learned, A > 0 and D, of a token's key k, value v and query q:

        u = d v        S <- exp(-A d) S + k u^T        out = S^T q + D v

    The papers' B is k, their C is q, and their x is v. Outputs times silu(z) pass a norm over all heads of v that share
    one of k, if there is one (`normed`). Between snapshots there are rows as for `GatedDeltaNet`, whose u needs no
    correction.
    """

    normed: bool = field(default=True, repr=False)

    @property
    def projections(self) -> dict[str, int]:
        """What is computed of a layer's inputs, and its sizes: z gates the output, a makes d."""
        sizes = {"q": self.k_size, "k": self.k_size, "v": self.v_size, "z": self.v_size, "a": self.num_v_heads}
        return {f"state_{name}": size for name, size in sizes.items()}

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        convolution = {"conv": (self.conv_size, self.conv_width), "conv_bias": (self.conv_size,)}
        heads = dict.fromkeys(("decay", "dt_bias", "skip"), (self.num_v_heads,))
        return convolution | heads | ({"state_norm": (self.v_size,)} if self.normed else {})

    @property
    def pair_flops(self) -> int:
        """A row meets the others with its query."""
        return 2 * (self.k_size + self.v_size)

    @property
    def row_flops(self) -> int:
        """A row meets the state with its query, and as a part of the next state."""
        return 4 * self.state_values + 2 * self.conv_width * self.conv_size


@dataclass(frozen=True)
class ShortConvolution(RecurrentMixer):
    """A convolution by channel between two gates (Liquid AI 2025, LFM2, arXiv:2511.23404).

    With b, c and x made of a token's inputs, and the convolution's weights w:

        out_t = c_t sum_i w_i b_{t-i} x_{t-i}

    A state is what the convolution still sees of b x: a channel is a head of v, and there are no keys.
    """

    num_v_heads: int  # number of channels
    conv_width: int
    chunk: int = 64
    num_k_heads: int = field(default=1, init=False, repr=False)
    k_dim: int = field(default=0, init=False, repr=False)
    v_dim: int = field(default=1, init=False, repr=False)

    @property
    def row_values(self) -> int:
        return 0

    @property
    def snapshot_row(self) -> int:
        return 32

    @property
    def projections(self) -> dict[str, int]:
        return dict.fromkeys(("state_b", "state_c", "state_x"), self.num_v_heads)

    @property
    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.num_v_heads, self.conv_width)}

    @property
    def pair_flops(self) -> int:
        return 0

    @property
    def row_flops(self) -> int:
        """The convolution and the two gates."""
        return 2 * (self.conv_width + 1) * self.num_v_heads


STATE_VECTORS = ("conv", "decay", "dt_bias", "state_norm", "conv_bias", "skip")  # the names of `vectors` of all kinds
