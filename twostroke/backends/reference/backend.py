"""The reference backend, in PyTorch, on any of its devices."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from twostroke.backends.hidden_inputs import ONE_PROCESS
from twostroke.backends.interface import (
    NO_CODES,
    NO_RANKS,
    ONE_RANK,
    CompiledModel,
    ForwardOutput,
    LazyLogits,
    RaggedBatch,
    Weights,
)
from twostroke.backends.lazy_logits import HiddenRows, KnownTokens, resolved, sample_rows
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.ranks.collectives import Collectives
from twostroke.backends.reference.arrays import as_array, as_tensor, padded
from twostroke.backends.reference.decoder import ReferenceDecoder
from twostroke.backends.reference.memory import device_kv_room, new_memory
from twostroke.backends.reference.operations import Operations
from twostroke.backends.reference.sharded import ShardedOperations
from twostroke.backends.sharded_memory import ShardedMemory
from twostroke.backends.torch_follower import FollowerParts
from twostroke.backends.torch_ranks import TorchRanks
from twostroke.errors import RankLost
from twostroke.models.config import ModelConfig
from twostroke.models.formats.blocks import numpy_dtype
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.kv_formats import CODED
from twostroke.models.layer_groups import PageShape
from twostroke.sampling import statistics
from twostroke.sampling.draw import Draw, Noise
from twostroke.sampling.statistics import Statistics


class ReferenceBackend:
    """Implements `Backend`. Every other backend is tested against it.

    Different schedules agree only up to rounding: the bits of PyTorch's matrix products depend on the number of rows.
    """

    name = label = "reference"
    exact = False
    asynchronous = False
    formats: Collection[str] | None = None

    def __init__(
        self,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int | None = None,
        tp: int = 1,
        kv_dtype: str | None = None,
    ) -> None:
        """Start other processes if there are to be several ranks.

        `device`: any PyTorch device; "cpu" or "cuda" with ranks. `kv_dtype`: None is that of activations. Raises
        RuntimeError or AssertionError if the device is not available.
        """
        kv_dtype = kv_dtype or dtype
        options = dtype, threads or 1, kv_dtype
        self.ranks = TorchRanks("reference", tp, device, new_memory, options) if tp > 1 else None
        ranked = self.ranks and ShardedOperations(self.ranks.links, *options)
        self.operations = ranked or Operations(device, dtype, threads, kv_dtype)
        self.device, self.threads = self.operations.device, self.operations.threads
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.arithmetic = self.operations.arithmetic

    @property
    def takes_bias(self) -> bool:
        return self.ranks is None

    @property
    def failure(self) -> RankLost | None:
        return None if self.ranks is None else self.ranks.group.failure

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        """The reference runs every model, in one process."""
        return unsupported(config, 1 if self.ranks is None else 2, self.kv_dtype)

    def weight_bytes(self, tensor: RawTensor) -> int:
        return tensor.num_elements * numpy_dtype(self.dtype).itemsize

    def kv_room(self, weights: int) -> int:
        return device_kv_room(self.device, weights) if self.ranks is None else self.ranks.kv_room(weights)

    def memory(self, num_pages: int, shape: PageShape) -> PageMemory:
        if self.ranks is not None:
            return self.ranks.memory(num_pages, shape)
        return new_memory(num_pages, shape, self.device)

    def compile(self, config: ModelConfig, weights: Weights, beside: CompiledModel | None = None) -> "ReferenceModel":
        if self.ranks is None:
            decoder = beside.decoder if isinstance(beside, ReferenceModel) else None
            return ReferenceModel(ReferenceDecoder(config, self.operations, weights, decoder))
        with self.ranks.compiling(config, weights) as (number, parts):
            return ShardedReferenceModel(
                ReferenceDecoder(config, self.operations, parts), self.ranks.links, (self.ranks, number)
            )


def unavailable(device: str) -> str | None:
    """None: PyTorch computes on any of its devices."""
    return None


def rank_of(links: Collectives, dtype: str, threads: int, kv_dtype: str) -> FollowerParts:
    """What a rank other than 0 makes."""
    operations = ShardedOperations(links, dtype, threads, kv_dtype)
    return new_memory, lambda config, parts: ShardedReferenceModel(ReferenceDecoder(config, operations, parts), links)


def unsupported(config: ModelConfig, tp: int, kv_dtype: str) -> str | None:
    """Say why the backend cannot run a model in `tp` ranks; None if it can."""
    if config.latent and kv_dtype in CODED:
        return NO_CODES
    if tp > 1 and config.latent:
        return NO_RANKS
    if tp > 1 and config.takes_hidden:
        return ONE_PROCESS
    return ONE_RANK if tp > 1 and config.state_layers else None


class ReferenceModel:
    """Implements `CompiledModel` and `LogitsHead`. Hidden states are tensors, [R, hidden]."""

    statistics: Statistics = statistics

    def __init__(self, decoder: ReferenceDecoder) -> None:
        self.decoder, self.config, self.operations = decoder, decoder.config, decoder.operations

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        storages = (*memory.storages, memory.state_storage)
        *kv, snapshots = (one if isinstance(one, torch.Tensor) else as_tensor(one) for one in storages)
        there = self.operations.enter(replace(batch, token_ids=resolved(batch)))
        with self.operations.running():
            hidden, queries, states = self.decoder.forward(there, kv, snapshots)
            asked = None if there.query_rows is None else as_array(torch.stack(padded(queries)))
            seen = None if there.state_rows is None else as_array(torch.stack(states))
        return ForwardOutput(HiddenRows.of(self, hidden), asked, seen)

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> KnownTokens:
        return sample_rows(self, rows, draws)

    def rows_of(self, states: np.ndarray) -> HiddenRows:
        there = torch.from_numpy(states.astype(np.float32)).to(self.operations.device)
        return HiddenRows.of(self, there.to(getattr(torch, self.operations.dtype)))

    def logits(self, hidden: torch.Tensor) -> tuple[np.ndarray, None]:
        with self.operations.running():
            # A copy: whoever drops the array frees no tensor then, which waits for the interpreter. PyTorch ends the
            # process if a daemon thread does so while Python ends.
            return as_array(self.decoder.logits(hidden)).copy(), None

    def search(self, hidden: torch.Tensor, noises: Sequence[Noise]) -> list[int]:
        logits = self.logits(hidden)[0]
        return statistics.sound(logits, statistics.draw(logits, noises))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def copy(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def to_host(self, hidden: torch.Tensor) -> np.ndarray:
        return as_array(hidden.float()).copy()


class ShardedReferenceModel(ReferenceModel):
    """A rank's part of a model in several ranks."""

    def __init__(
        self, decoder: ReferenceDecoder, links: Collectives, lead: tuple[TorchRanks, int] | None = None
    ) -> None:
        """`lead`: all ranks and the model's number, at rank 0; None at the other ranks."""
        super().__init__(decoder)
        self.links, self.lead = links, lead

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        assert self.lead is not None
        assert isinstance(memory, ShardedMemory)
        (ranks, number), batch = self.lead, replace(batch, token_ids=resolved(batch), drawn=None)
        with ranks.together("forward", number, memory.number, batch):
            return super().forward(batch, memory)

    def logits(self, hidden: torch.Tensor) -> tuple[np.ndarray, None]:
        assert self.lead is not None
        ranks, number = self.lead
        with ranks.together("head", number, len(hidden)):
            self.links.broadcast(hidden.contiguous())
            return super().logits(hidden)

    def follow(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> None:
        """Compute this rank's part of a pass. Rank 0 calls `forward` meanwhile."""
        super().forward(batch, memory)

    def follow_head(self, rows: int) -> None:
        """Compute this rank's part of the logits of rank 0's rows."""
        dtype = getattr(torch, self.operations.dtype)
        hidden = torch.empty(rows, self.config.hidden_size, dtype=dtype, device=self.operations.device)
        self.links.broadcast(hidden)
        super().logits(hidden)
