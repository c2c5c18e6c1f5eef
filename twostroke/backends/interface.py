"""The interface of a backend. To write a backend, this page and `models/config.py` are enough.

A *backend* computes on one kind of device. It creates the memory for KV pages (`backends.page_memory`), and turns a
model's description and weights into a `CompiledModel`, whose two calls make a step:

    forward    run the rows of a step through all layers; K and V are written to pages
    sample     sample tokens from the wanted rows: greedy, drawn, filtered, penalized, constrained

A step works on a *ragged batch*: N rows, each one token of one of S sequences, decode rows and prefill chunks side by
side. Keys and values are in pages, and each sequence has a table of spans.

**Arrays.** Arguments and results are numpy arrays in host memory. A backend copies them to its device, or into static
buffers of a captured graph, inside the call. PyTorch takes a second and 190 MiB to import, so only a backend that
computes with it imports it. All arguments belong to the caller, who may change them once the call has returned; a
backend that still computes then must keep copies. Weights are read only while `compile` runs, unless the backend holds
the `RawTensor` (an embedding table that stays in its file).

**Logits stay on the device.** `forward` returns `LazyLogits`: hidden states of the wanted rows, in the backend's
private form. Only `read` makes them an array. `sample` takes such rows and returns tokens, so a device sends logits to
the host only if log-probabilities of all ids are requested.

**One step in flight.** A step need not wait for the tokens of the previous step. `sample` returns `DrawnTokens`, which
may still be computing, and `RaggedBatch.drawn` passes it to the next `forward`: a row whose token id is `-1 - i` takes
its i-th token, on the device. If the backend is `asynchronous`, the engine plans step t + 1 while step t computes: each
decoding lane enters the placeholder of its pending token, `DrawnTokens.read` of step t comes after `forward` of step
t + 1 was launched, and `sample` of step t + 1 after that, when every draw knows all tokens before it
(`engine/step_in_flight.py`). A lane that ended with its token (end token, stop string, grammar) has one row too many:
the writer truncates it, and its K and V have not been read. The placeholder of a token that proves to be NO_TOKEN
stands for any id: its lane fails. Lanes with guesses, and those whose queries are returned, enter no placeholders.

**Same bits.** A backend is `exact` if a row's result depends only on its prefix: batch, chunks, page numbers and
threads must not change a bit. Different schedules are tested for equality if the backend is exact, and within tolerance
otherwise.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.page_memory import PageMemory
from twostroke.errors import EngineFailed
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.layer_groups import PageShape
from twostroke.sampling.draw import Draw, Sampled
from twostroke.sampling.scores import TokenScore

# Columns of a span table, which has a row for each run of entries in a page, in the order of the entries.
START, STOP, POSITION, PAGE = range(4)  # first and past-the-last slot; position of the entry at START; page ids,
# one column for each group of layers (`models.layer_groups`), whose entries lie in the same slots of their own pages.


@dataclass(frozen=True)
class StateStep:
    """What a sequence's rows read and write of states (`models.recurrent`)."""

    rows: int  # number of entries before the step's that came since the snapshot
    source: np.ndarray  # [M] int32, the snapshot's frames (`models.layer_groups.StatePages`); none for zeros
    # snapshots to write: the number of the step's rows before each, rising, and its frames
    targets: Sequence[tuple[int, np.ndarray]]


NO_RANKS = "ranks have no latent attention (MLA): leave out tp"
NO_CODES = "latent entries (MLA) are stored as numbers: leave out kv_dtype"
ONE_RANK = "ranks share recurrent layers only by the native backend, and without torchrun: leave out tp"

Array = TypeVar("Array")  # a numpy array or a tensor
Weights = Callable[[str], RawTensor]  # a checkpoint's tensor by its Twostroke name (`models.tensor_shapes`)


@dataclass
class RaggedBatch(Generic[Array]):
    """The rows of one step.

    Sequence s has rows [row_starts[s], row_starts[s + 1]); they are the last entries of its table.
    """

    token_ids: Array  # [N] int64; -1 - i stands for the i-th token of `drawn`
    positions: Array  # [N] int64, positions for RoPE
    # [groups, N] int64, the pages in which each row's entries are written; slots: [N] int64. A page is -1 in a group
    # that keeps nothing of the row, since a snapshot of states comes behind it.
    pages: Array
    slots: Array
    row_starts: list[int]  # S + 1 ints
    # S int32 arrays [P_s, 3 + groups] of spans (START, STOP, POSITION, PAGE...), including this step's rows. Pages are
    # frames of the memory that `forward` is given. A windowed group may have given a span's page back, since no row
    # sees its entries; another of its pages stands there.
    tables: list[np.ndarray]
    # [W] int64, ascending: rows whose hidden states are returned; for the others only K and V are written
    wanted: Array
    query_rows: Array | None = None  # [R] int64, distinct rows whose queries are returned; None for none
    # [T] int64, distinct rows whose hidden states before and after every layer are returned; or None
    state_rows: Array | None = None
    # [layers, N, hidden] float32, factors for the normalized inputs of MLPs (`models.dropout`)
    dropout: Array | None = None
    # for each sequence what is added to scores of its first entries, [layers, KV heads, n] float32, or None for 0; -inf
    # hides an entry; empty if no sequence has any. Then all layers are one group.
    biases: Sequence[np.ndarray | None] = ()
    drawn: "DrawnTokens | None" = None  # tokens of the previous step, which the host may not know yet
    states: Sequence[StateStep] = ()  # for a model with states, what each sequence reads and writes of them
    hidden: HiddenInputs | None = None  # for a model that takes hidden states, those of the rows
    # holds what a backend derives once per step (RoPE tables, masks)
    scratch: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]


class LazyLogits(Protocol):
    """Logits of some rows, computed when they are read. Valid for as long as the object is held."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> "LazyLogits":
        """Some of the rows. Rows of one `forward` share computed logits: the head is computed once for all of them."""
        ...

    def kept(self) -> "LazyLogits":
        """A copy of the rows' hidden states, which a KV value keeps."""
        ...

    def read(self) -> np.ndarray:
        """[rows, vocab] float32, before temperature and penalties. Read-only. Waits for the device."""
        ...

    def scores(self, ids: Sequence[int], count: int) -> list[TokenScore]:
        """The log-probability of one given id under each row, and the `count` most likely ids of each row.

        A few rows at a time go through the head, so a long prompt never needs [rows, vocab] logits at once.
        """
        ...

    def hidden_states(self) -> np.ndarray:
        """[rows, hidden] float32, a copy: the residual stream behind the last layer, before the last norm.

        Waits for the device. Raises KVError for logits of a file or of another process.
        """
        ...

    @property
    def nbytes(self) -> int:
        """The number of bytes that the object holds."""
        ...


class DrawnTokens(Protocol):
    """Tokens drawn by `sample`, which may still be computing."""

    def __len__(self) -> int: ...

    def read(self) -> list[Sampled]:
        """One token for each row. Waits for the device."""
        ...


class ForwardOutput(NamedTuple):
    """The result of a forward pass."""

    logits: LazyLogits  # logits of the W wanted rows
    # queries of `query_rows`, [layers, R, Hq, D] float32, after RoPE and times the attention scale; or None
    queries: np.ndarray | None
    # hidden states of `state_rows`, [layers + 1, T, hidden] float32: the embedding, then what each layer has made of it
    # (the residual stream, before the last norm); or None
    states: np.ndarray | None = None


class CompiledModel(Protocol):
    """A model with its weights in the backend's form. The backend serializes calls from several threads."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        """Run the rows through all layers, and write their K and V to `memory` at (pages, slots).

        `memory` was made by this backend. The step may use the pages in its tables until the next call to the same
        memory, `DrawnTokens.read` or `LazyLogits.read` of this step has returned, whichever comes first.
        """
        ...

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> DrawnTokens:
        """Draw a token from each row.

        Args:
            rows: one row each, from any forward pass of this model, or stored logits from another process.
            draws: how to sample each row. The token depends only on the row's logits and its draw (`sampling.noise`).

        There may be no rows: reading the tokens then only waits for all passes of this model before.
        """
        ...

    def rows_of(self, states: np.ndarray) -> LazyLogits:
        """The logits that the head makes of hidden states [R, hidden] float32, of any layer, as of a pass's last."""
        ...


class Backend(Protocol):
    """Computes on one kind of device.

    Attributes:
        name: "native", "reference".
        label: the name with its variant, for reports.
        arithmetic: identifies everything in the backend that the bits of K, V and logits depend on, also its build.
        exact: whether a row's result has the same bits for any batch, chunk and thread count.
        asynchronous: whether `forward` and `sample` return before the results are there, so that it gains something to
            keep a step in flight.
        device: "cpu", or another PyTorch device name.
        threads: number of CPU threads.
        formats: the formats of weight matrices that it computes with; None for all. Others are re-encoded on load.
        takes_bias: whether attention adds `RaggedBatch.biases`.
        failure: why it computes nothing any more, since a rank is lost; None while it does.
        dtype, kv_dtype: dtypes of activations, and of K and V: "float32", "bfloat16".
    """

    name: str
    exact: bool
    asynchronous: bool
    device: str
    threads: int
    formats: Collection[str] | None
    dtype: str

    @property
    def label(self) -> str: ...

    @property
    def arithmetic(self) -> str: ...

    @property
    def takes_bias(self) -> bool: ...

    @property
    def failure(self) -> EngineFailed | None: ...

    @property
    def kv_dtype(self) -> str: ...

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        """Say why the backend cannot run a model; None if it can. Only formats and shapes of `matrices` are read."""
        ...

    def weight_bytes(self, tensor: RawTensor) -> int:
        """Bytes of a weight matrix in the backend's form."""
        ...

    def kv_room(self, weights: int) -> int:
        """The default bytes of a pool; `weights` are bytes that will be loaded beside it."""
        ...

    def memory(self, num_pages: int, shape: PageShape) -> PageMemory:
        """Zeroed memory for `num_pages` pages. Raises OutOfPages if there is no room."""
        ...

    def compile(self, config: ModelConfig, weights: Weights, beside: CompiledModel | None = None) -> CompiledModel:
        """Pack the weights; the head's matrix is that of `beside`, if given. Raises MemoryError if there is no room."""
        ...
