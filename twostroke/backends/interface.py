"""What a backend is. Whoever writes one needs this page and `models/config.py`.

A *backend* computes on one kind of device. It makes the memory that KV pages lie in (`backends.memory`), and turns a
model's description and weights into a `CompiledModel`, whose two calls are a step:

    forward    the rows of a step through all layers; K and V go to pages
    sample     tokens from the rows whose result is wanted: greedy, drawn, filtered, penalized, constrained

A step works on a *ragged batch*: N rows, each one token of one of S sequences, decode rows and prefill chunks side by
side. Keys and values live in pages, and each sequence brings a table of spans.

**Arrays** that come and go are numpy's, in host memory; a backend copies them to its device, or into static buffers of
a captured graph, inside the call. PyTorch takes a second and 190 MiB to import, so only a backend that computes with it
imports it. Everything that a call is given belongs to the caller, who may change it once the call has returned; so a
backend that goes on computing keeps copies. Weights are read while `compile` runs and not afterwards, unless the
backend holds the `RawTensor` (a table of embeddings that stays in its file).

**Logits stay where they are.** `forward` returns `LazyLogits`: hidden states of the wanted rows, in the backend's own
form. Only `read` makes them an array. `sample` takes such rows and hands out tokens, so a device never sends logits to
the host unless somebody asks for log-probabilities of all ids.

**One step in flight.** A step need not wait for the tokens of the step before it. `sample` returns a `Drawn`, which may
still be computing, and `RaggedBatch.drawn` hands it to the next `forward`: a row whose token id is `-1 - i` takes the
i-th token of it, on the device. An engine that keeps a step in flight plans step t + 1 while step t computes: each
decoding lane enters the placeholder of its pending token, and `Drawn.read` of step t comes after `forward` of step
t + 1 was launched. A lane that ended with that token (its end, a stop string, a grammar) is one row too far: the writer
truncates it, and nobody has read its K and V. Lanes whose next draw depends on the token itself (penalties, a grammar,
a condition) are left out of the step in flight. The engine of today reads at once; both CPU backends take
placeholders.

**Same bits.** A backend is `exact` if a row's result depends on its own prefix and nothing else: neither batch, chunk,
page numbers nor threads may change a bit. Schedules of an exact backend are tested for equality, of another within
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from twostroke.backends.memory import Memory
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig
from twostroke.sampling.draw import Draw, Sampled

# Columns of a span table, one row per page that a sequence reads, in the order of its entries.
PAGE, START, STOP, POSITION = range(4)  # page id; first and past-the-last slot; position of the entry at START

Array = TypeVar("Array")  # numpy's, or a tensor
Weights = Callable[[str], RawTensor]  # a checkpoint's tensor by its Twostroke name (`models.config.tensor_shapes`)


@dataclass
class RaggedBatch(Generic[Array]):
    """The rows of one step.

    Sequence s owns rows row_starts[s] to row_starts[s + 1]; they are the last entries of its table.

    Attributes:
        token_ids: [N] int64; -1 - i stands for the i-th token of `drawn`.
        positions: [N] int64, what RoPE turns by.
        pages, slots: [N] int64, where each row's K and V go.
        row_starts: S + 1 ints.
        tables: S int32 arrays [P_s, 4] of spans (PAGE, START, STOP, POSITION), this step's rows included. Pages are
            those of the memory that the step is given.
        wanted: [W] int64, rising, the rows whose result is wanted; the others enter K and V, and no more.
        query_rows: [R] int64, the distinct rows whose queries are handed out; None for none.
        dropout: [layers, N, hidden] float32, what the normed inputs of MLPs are multiplied by (`models.dropout`).
        drawn: tokens of the step before, which may not be known to the host yet.
        scratch: room for what a backend derives once a step (RoPE tables, masks).
    """

    token_ids: Array
    positions: Array
    pages: Array
    slots: Array
    row_starts: list[int]
    tables: list[np.ndarray]
    wanted: Array
    query_rows: Array | None = None
    dropout: Array | None = None
    drawn: Drawn | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]


class LazyLogits(Protocol):
    """Logits of some rows, computed when somebody reads them. It stays valid for as long as it is held."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> LazyLogits:
        """Some of them. Rows of one `forward` share what has been computed: the head is read once for all of them."""
        ...

    def kept(self) -> LazyLogits:
        """The same rows in memory of their own, a hidden state each, which is what a KV value keeps."""
        ...

    def read(self) -> np.ndarray:
        """[rows, vocab] float32, before temperature and penalties; not to be written to. Waits for the device."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        ...


class Drawn(Protocol):
    """Tokens that `sample` draws, perhaps still computing."""

    def __len__(self) -> int: ...

    def read(self) -> list[Sampled]:
        """One for each row. Waits for the device."""
        ...


class Output(NamedTuple):
    """What a forward pass returns.

    Attributes:
        logits: of the W wanted rows.
        queries: of `query_rows`, [layers, R, Hq, D] float32, turned by RoPE and times the attention scale; or None.
    """

    logits: LazyLogits
    queries: np.ndarray | None


class CompiledModel(Protocol):
    """A model's weights as a backend computes with them. Calls may come from several threads; they take turns."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: RaggedBatch[np.ndarray], memory: Memory) -> Output:
        """Run the rows through all layers, and write their K and V to `memory` at (pages, slots).

        `memory` was made by this backend. Its pages that tables name are the step's until the next call to the same
        memory, `Drawn.read` or `LazyLogits.read` of this step has returned, whichever comes first.
        """
        ...

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> Drawn:
        """Draw a token from each row.

        Args:
            rows: of one row each, of any forward passes of this model, or stored logits that another process computed.
            draws: how. The token is a function of the row's logits and its draw alone (`sampling.noise`).
        """
        ...


class Backend(Protocol):
    """Computes on one kind of device.

    Attributes:
        name: "native", "reference".
        label: the name with the variant of it that runs, for reports.
        arithmetic: names everything in the backend that bits of K, V and logits depend on, its build included.
        exact: whether a row's result is bit for bit the same in any batch, chunk and thread count.
        device: "cpu", or another as PyTorch calls it.
        threads: of the CPU.
        dtype, kv_dtype: of activations, and of K and V: "float32", "bfloat16".
    """

    @property
    def name(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def kv_dtype(self) -> str: ...

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        """Why it cannot run a model; None where it can. Of `matrices` only formats and shapes are read."""
        ...

    def weight_bytes(self, tensor: RawTensor) -> int:
        """Bytes of a weight matrix as it computes on it."""
        ...

    def memory(self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int) -> Memory:
        """Zeroed memory for so many pages. Raises OutOfPages without room for it."""
        ...

    def compile(self, config: ModelConfig, weights: Weights) -> CompiledModel:
        """Pack the weights. Raises MemoryError without room for them."""
        ...
