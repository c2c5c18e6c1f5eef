"""A model on the GPU: passes, eager or captured, and sampling that stays on the device."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from twostroke.backends.interface import DrawnTokens, ForwardOutput, LazyLogits, RaggedBatch, Weights
from twostroke.backends.lazy_logits import HiddenRows, KnownTokens, hidden_of, sample_rows
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.reference.arrays import padded
from twostroke.backends.triton.cuda_graphs import MAX_GRAPH_ENTRIES, MAX_GRAPH_ROWS, CudaGraphs, bucket
from twostroke.backends.triton.decoder import TritonDecoder
from twostroke.backends.triton.linear import PADDING
from twostroke.backends.triton.pass_buffers import PassBuffers, PassExtras, PlanTensors
from twostroke.backends.triton.pass_plan import PassPlan, flat_biases, plan
from twostroke.backends.triton.sampling import DeviceSampler, supports, supports_report
from twostroke.backends.triton.state_plan import plan_states
from twostroke.errors import OutOfPages
from twostroke.models.config import ModelConfig
from twostroke.sampling import statistics
from twostroke.sampling.draw import Draw, Noise, Sampled
from twostroke.sampling.statistics import Statistics

DRAWN = 1024  # tokens of a step in flight, to begin with
HEAD_ROWS = PADDING  # rows that go through the head at once
NONE = PassExtras()


class LaunchedTokens:
    """Tokens that the device draws; implements `DrawnTokens`. They come to pinned memory while the host goes on."""

    def __init__(self, ids: torch.Tensor, check: Callable[[], object] = lambda: None) -> None:
        """Args:
        ids: int32 [rows], in a buffer that nobody writes again.
        check: called when they are there; raises if they mean nothing.
        """
        self.ids, self._host, self._check = ids, ids, check
        self._read: list[Sampled] | None = None
        self._done: torch.cuda.Event | None = None
        if ids.is_cuda:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def __len__(self) -> int:
        return len(self.ids)

    def read(self) -> list[Sampled]:
        if self._read is None:
            if self._done is not None:
                self._done.synchronize()
            self._check()
            self._read = [Sampled(token) for token in self._host.tolist()]
        return self._read


class DeviceStatistics:
    """`sampling.statistics` whose draws have the same noise and bits as draws that stay on the device."""

    summarize = staticmethod(statistics.summarize)
    weigh = staticmethod(statistics.weigh)
    likeliest = staticmethod(statistics.likeliest)

    def __init__(self, sampler: DeviceSampler) -> None:
        self.sampler = sampler

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        there = torch.from_numpy(np.ascontiguousarray(logits)).to(self.sampler.device)
        with torch.cuda.device_of(there):
            return self.sampler.search(there, self.sampler.send(noises)).tolist()


class TritonModel:
    """Implements `CompiledModel` and `LogitsHead`. Hidden states are float32 tensors, [R, hidden]."""

    CAPTURES = True  # passes on a GPU as graphs

    def __init__(self, config: ModelConfig, device: str, weights: Weights, kv_dtype: str) -> None:
        self.config, self.device, self.pins = config, device, device.startswith("cuda")
        self.captures = self.pins and self.CAPTURES
        self._lock = threading.Lock()
        self._drawn = torch.zeros(DRAWN, dtype=torch.int32, device=device)
        with self._own():
            self.decoder = self._decoder(weights, kv_dtype)
            self.sampler, self.graphs = DeviceSampler(device), CudaGraphs(device)
            self.statistics: Statistics = DeviceStatistics(self.sampler)
            self._memory: PageMemory | None = None  # that graphs write to
            self._buffers = self.decoder.buffers(MAX_GRAPH_ROWS, MAX_GRAPH_ENTRIES) if self.captures else None
            self._eager: PassBuffers | None = None
            # The head's input, the same after its norm, and the logits.
            self._x = torch.zeros(HEAD_ROWS, config.hidden_size, dtype=torch.float32, device=device)
            self._h = torch.zeros(HEAD_ROWS, config.hidden_size, dtype=torch.bfloat16, device=device)
            self._out = torch.zeros(HEAD_ROWS, self.decoder.head.features, dtype=torch.float32, device=device)

    def _decoder(self, weights: Weights, kv_dtype: str) -> TritonDecoder:
        return TritonDecoder(self.config, self.device, weights, kv_dtype)

    @contextmanager
    def _own(self) -> Generator[None]:
        """One call at a time, on the model's device. Raises OutOfPages if the device has no memory for it."""
        with self._lock, torch.cuda.device_of(self._drawn):
            try:
                yield
            except torch.OutOfMemoryError as error:
                line = str(error).partition(". GPU")[0]
                raise OutOfPages(
                    f"the GPU has no room beside the KV pool ({line}): give the pool less (kv_bytes)"
                ) from None

    # A step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        kv = memory.storages
        work = plan(batch, kv[0].shape[4], self.decoder.shapes)
        with self._own():
            extras = NONE
            given = (batch.dropout, batch.query_rows, batch.state_rows, flat_biases(batch))
            if any(array is not None for array in given):
                dropout, queries, hidden, biases = (None if one is None else self._there(one) for one in given)
                extras = PassExtras(dropout, queries, hidden, biases)
            if batch.states:
                chunk = next(iter(self.config.state_layers.values())).chunk
                extras = replace(extras, states=plan_states(batch, chunk, memory, self._there))
            if self.decoder.reach(int(batch.positions.max()) + 1):
                self.graphs.clear()
            if batch.drawn is not None:
                self._take(batch.drawn)
            if (
                self.captures
                and extras is NONE
                and batch.num_rows <= MAX_GRAPH_ROWS
                and work.entries <= MAX_GRAPH_ENTRIES
            ):
                hidden, queries, states = self._replay(work, memory), [], []
            else:
                hidden, queries, states = self._launch(work, kv, extras)
            wanted = batch.wanted
            first, count = int(wanted[0]) if len(wanted) else 0, len(wanted)
            if count and int(wanted[-1]) - first == count - 1:
                taken = hidden[first : first + count].clone()
            else:
                taken = hidden[self._there(wanted)]
            stacked = [torch.stack(some).cpu().numpy() if some else None for some in (padded(queries), states)]
        return ForwardOutput(HiddenRows.of(self, taken), *stacked)

    def _replay(self, work: PassPlan, memory: PageMemory) -> torch.Tensor:
        """Run a captured pass; the hidden states are valid until the next one."""
        assert self._buffers is not None
        if memory is not self._memory:
            self.graphs.clear()
            self._memory = memory
        shape, to, kv = work.shape.padded(bucket(work.shape.rows)), self._buffers, memory.storages
        packed = torch.from_numpy(work.packed(shape)).pin_memory()
        integers = self.graphs.input(shape, packed)
        views = PlanTensors.of(integers, shape)
        self.graphs.replay(shape, lambda: self.decoder.launch(views, shape, self._drawn, to, kv, NONE))
        return to.x

    def _launch(
        self, work: PassPlan, kv: Sequence[torch.Tensor], extras: PassExtras
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run a pass kernel by kernel; the hidden states are valid until the next one."""
        to = self._eager
        if to is None or to.rows < work.shape.rows or to.entries < work.entries:
            most = (0, 0) if to is None else (to.rows, to.entries)
            self._eager = to = None
            to = self.decoder.buffers(max(most[0], work.shape.rows), max(most[1], 2 * work.entries, 1 << 16))
            self._eager = to
        views = PlanTensors.of(self._there(work.packed(work.shape)), work.shape)
        return to.x, *self.decoder.launch(views, work.shape, self._drawn, to, kv, extras)

    def _take(self, drawn: DrawnTokens) -> None:
        """Put the tokens that placeholders stand for where the pass reads them."""
        if isinstance(drawn, LaunchedTokens):
            ids = drawn.ids
        else:
            ids = torch.tensor([sampled.id for sampled in drawn.read()], dtype=torch.int32)
        self._drawn_room(len(ids)).copy_(ids, non_blocking=True)

    def _drawn_room(self, count: int) -> torch.Tensor:
        """The buffer from which a pass reads so many tokens that were drawn."""
        if count > len(self._drawn):
            self._drawn = self._drawn.new_zeros(2 * count)
            self.graphs.clear()
        return self._drawn[:count]

    def _there(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.pins else tensor.clone()

    # Sampling --------------------------------------------------------------------------------------------------

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> LaunchedTokens | KnownTokens:
        """The device draws whatever it can, whatever else is asked of the step: a row's token depends on its draw."""
        if not rows:  # its `read` waits for the pass
            with self._own():
                return self._flying(torch.empty(0, dtype=torch.int32, device=self.device))
        if all(map(supports, draws)):
            with self._own():
                return self._flying(self._ids(rows, draws))
        made: dict[int, Sampled] = {}
        there = [i for i, draw in enumerate(draws) if supports_report(draw)]
        with self._own():
            for some, logits in self._parts([rows[i] for i in there]):
                places = [there[i] for i in some]
                made |= zip(places, self.sampler.report(logits, [draws[i] for i in places]), strict=True)
        if here := [i for i in range(len(rows)) if i not in made]:
            made |= zip(here, sample_rows(self, [rows[i] for i in here], [draws[i] for i in here]), strict=True)
        return KnownTokens(made[i] for i in range(len(rows)))

    def _flying(self, ids: torch.Tensor) -> LaunchedTokens:
        return LaunchedTokens(ids)

    def _ids(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> torch.Tensor:
        """Tokens of draws that report nothing: int32 [rows]."""
        ids = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        for some, logits in self._parts(rows):
            drawn = self.sampler.draw(logits, [draws[i] for i in some])
            if len(some) == len(rows):
                return drawn
            ids[self._there(np.array(some))] = drawn
        return ids

    def _parts(self, rows: Sequence[LazyLogits]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Places of some rows and their logits on the device, which are valid until the next."""
        live = {i: row for i, row in enumerate(rows) if isinstance(row, HiddenRows)}
        order = list(live)
        for first in range(0, len(order), HEAD_ROWS):
            some = order[first : first + HEAD_ROWS]
            yield some, self._logits(hidden_of(self, [live[i] for i in some]))
        for i, row in enumerate(rows):
            if i not in live:
                yield [i], torch.from_numpy(np.ascontiguousarray(row.read())).to(self.device)

    def rows_of(self, states: np.ndarray) -> HiddenRows:
        with self._own():
            return HiddenRows.of(self, self._there(states.astype(np.float32)))

    # Its head --------------------------------------------------------------------------------------------------

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits of at most HEAD_ROWS rows, [R, vocab] float32 on the device, valid until the next call."""
        rows = len(hidden)
        self._x[:rows].copy_(hidden)
        if self.captures:
            size = bucket(rows)
            self.graphs.replay(("head", size), lambda: self.decoder.launch_head(self._x, self._h, self._out, size))
        else:
            self.decoder.launch_head(self._x, self._h, self._out, rows)
        return self._out[:rows]

    def logits(self, hidden: torch.Tensor) -> tuple[np.ndarray, None]:
        with self._own():
            parts = [self._logits(part).to("cpu", copy=True).numpy() for part in hidden.split(HEAD_ROWS)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts), None

    def search(self, hidden: torch.Tensor, noises: Sequence[Noise]) -> list[int]:
        made: list[int] = []
        with self._own():
            for part in hidden.split(HEAD_ROWS):
                words = self.sampler.send(noises[len(made) : len(made) + len(part)])
                made += self.sampler.search(self._logits(part), words).tolist()
        return made

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def copy(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def to_host(self, hidden: torch.Tensor) -> np.ndarray:
        with self._own():
            return hidden.to("cpu", copy=True).float().numpy()
