"""What a backend must offer: the operations one step of a decoder is made of.

A step works on a *ragged batch*: N rows, each one token of one of S sequences, decode rows and prefill
chunks side by side. Keys and values live in pages; each sequence brings a table of spans. Operations are
coarse and their epilogues fused (bias, residual, gate), so that a backend can run each as one kernel over
weights it packed itself, or record the calls of one forward pass and replay them.

What comes and goes is numpy's. PyTorch takes a second and 190 MiB to import, so only who computes with it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from twostroke.formats.tensor import RawTensor
from twostroke.models.rope import Rope
from twostroke.sampling.noise import Noise
from twostroke.sampling.statistics import Statistics

if TYPE_CHECKING:
    import torch

# Columns of a span table, one row per page that a sequence reads, in the order of its entries.
PAGE, START, STOP, POSITION = range(4)  # page id; first and past-the-last slot; position of the entry at START


Array = TypeVar("Array")  # numpy's, or a tensor


@dataclass
class RaggedBatch(Generic[Array]):
    """The rows of one step: numpy's arrays, or what `Operations.enter` makes of them.

    Sequence s owns rows row_starts[s] to row_starts[s + 1]; they are the last entries of its table.

    Attributes:
        token_ids: [N] int64.
        positions: [N] int64, what RoPE turns by.
        pages, slots: [N] int64, where each row's K and V go.
        row_starts: S + 1 ints.
        tables: S int32 arrays [P_s, 4] of spans (PAGE, START, STOP, POSITION), this step's rows included.
        wanted: [W] int64, rising, the rows whose result is; the others enter K and V, and no more.
        query_rows: [R] int64, the distinct rows whose queries are handed out; None for none.
        queries: theirs, [layers, R, Hq, D] float32, which the pass fills: turned, and times the attention scale.
        dropout: [layers, N, hidden] float32, what the normed inputs of MLPs are multiplied by (`kernels.dropout`).
        scratch: room for what a backend derives once per step (RoPE tables, masks).
    """

    token_ids: Array
    positions: Array
    pages: Array
    slots: Array
    row_starts: list[int]
    tables: list[np.ndarray]
    wanted: Array
    query_rows: Array | None = None
    queries: np.ndarray | None = None
    dropout: Array | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]


class Pass(Protocol):
    """A decoder's forward pass as one call, and its head; what `Decoder`'s methods of these names do otherwise."""

    def forward(self, batch: RaggedBatch[np.ndarray], kv: Any) -> Any: ...

    def logits(self, hidden: Any) -> np.ndarray: ...

    def draw(self, hidden: Any, noises: Sequence[Noise]) -> list[int]: ...


class Kernels(Statistics, Protocol):
    """One backend. Weights are opaque: whatever `pack` returned is what the backend's operations take.

    So are hidden states, which only the backend that made them reads. Logits leave it as numpy's arrays.

    `exact` says whether a row's result is bit for bit the same in any batch, chunk and thread count;
    `kv_in_pairs` whether its pages hold K and V in pairs (backends/memory.py).
    """

    name: str
    label: str  # the name with the variant of it that runs, for reports
    arithmetic: str  # names whatever the bits of a result depend on, beside weights and what is computed from
    exact: bool
    kv_in_pairs: bool
    device: str  # "cpu", or another of PyTorch's
    threads: int  # of the CPU
    dtype: str  # of activations: "float32", "bfloat16"
    kv_dtype: str

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> Any:
        """A linear layer whose outputs are those of `parts` one after another; or an embedding, or a norm."""
        ...

    def table(self, rows: RawTensor) -> Any:
        """An embedding that is not the head too: its rows are looked up, and never multiplied."""
        ...

    def whole_pass(self, decoder: Any) -> Pass | None:
        """The decoder's forward pass as one call; None where the decoder calls `Operations` one by one."""
        ...


class Operations(Kernels, Protocol):
    """The operations of a pass, for a backend that is called one by one, on PyTorch's tensors."""

    def enter(self, batch: RaggedBatch[np.ndarray], kv: Any) -> tuple[RaggedBatch[torch.Tensor], torch.Tensor]:
        """A batch whose arrays are tensors, and a pool's storage as one, both where the operations compute."""
        ...

    def running(self) -> AbstractContextManager[Any]:
        """Within which they are called."""
        ...

    def leave(self, x: torch.Tensor) -> np.ndarray:
        """What they made, as an array."""
        ...

    def embed(self, weight: Any, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """[N] ids -> [N, hidden], times `scale`."""
        ...

    def norm(self, x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension, computed in float32."""
        ...

    def linear(self, x: torch.Tensor, weight: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[N, in] -> [N, out], plus bias if packed with one, plus `residual`."""
        ...

    def gated_linear(self, x: torch.Tensor, weight: Any, activation: str) -> torch.Tensor:
        """`weight` packs (gate, up): [N, in] -> [N, intermediate] = activation(gate x) * (up x)."""
        ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        batch: RaggedBatch[torch.Tensor],
        rope: Rope,
        norms: tuple[Any, Any, float] | None,
    ) -> torch.Tensor:
        """Split [N, (Hq + 2 Hkv) * D], norm q and k if asked, turn them, write K and V to their pages.

        `kv` is one layer of the pool, [2, pages, Hkv, page_size, D]. Returns q, [N, Hq, D].
        """
        ...

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch[torch.Tensor], scale: float, window: int | None
    ) -> torch.Tensor:
        """Each row over its sequence's entries up to its own (at positions > own - window): [N, Hq * D]."""
        ...

    def head(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """[R, hidden], normed, -> logits [R, vocab], float32."""
        ...
