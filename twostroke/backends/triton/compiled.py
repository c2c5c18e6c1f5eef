"""A model on the GPU: passes, eager or captured, and sampling that stays on the device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from twostroke.backends.interface import LazyLogits, Output, RaggedBatch, Weights
from twostroke.backends.memory import Memory
from twostroke.backends.rows import Ready, Rows, sample_rows
from twostroke.backends.triton.decoder import Buffers, Decoder, Extras, Integers
from twostroke.backends.triton.graphs import ENTRIES, MOST_ROWS, Graphs, bucket
from twostroke.backends.triton.linear import PADDING
from twostroke.backends.triton.sampling import DeviceSampler, supports
from twostroke.backends.triton.work import Work, plan
from twostroke.models.config import ModelConfig
from twostroke.sampling import statistics
from twostroke.sampling.draw import Draw, Sampled
from twostroke.sampling.noise import Noise
from twostroke.sampling.statistics import Statistics

MOST_DRAWN = 4096  # tokens of a step in flight
NONE = Extras()


class Flying:
    """Tokens that the device draws; implements `Drawn`. They come to pinned memory while the host goes on."""

    def __init__(self, ids: torch.Tensor) -> None:
        """`ids`: int32 [rows], in a buffer that nobody writes again."""
        self.ids, self._host = ids, ids
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
            self._read = [Sampled(id) for id in self._host.tolist()]
        return self._read


class DeviceStatistics:
    """`sampling.statistics`, whose draws have the noise and the bits of those that stay on the device."""

    summarize = staticmethod(statistics.summarize)
    weigh = staticmethod(statistics.weigh)
    likeliest = staticmethod(statistics.likeliest)

    def __init__(self, sampler: DeviceSampler) -> None:
        self.sampler = sampler

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        there = torch.from_numpy(np.ascontiguousarray(logits)).to(self.sampler.device)
        return self.sampler.search(there, self.sampler.send(noises)).tolist()


class TritonModel:
    """Implements `CompiledModel` and `backends.rows.Head`. Hidden states are float32 tensors, [R, hidden]."""

    def __init__(self, config: ModelConfig, device: str, weights: Weights) -> None:
        self.config, self.device, self.captures = config, device, device.startswith("cuda")
        self.decoder = Decoder(config, device, weights)
        self.sampler = DeviceSampler(device)
        self.statistics: Statistics = DeviceStatistics(self.sampler)
        self.graphs, self._turn = Graphs(device), threading.Lock()
        self._memory: Memory | None = None  # that graphs write to
        self._drawn = torch.zeros(MOST_DRAWN, dtype=torch.int32, device=device)
        self._integers: dict[object, torch.Tensor] = {}
        self._captured = Buffers(self.decoder, MOST_ROWS, ENTRIES) if self.captures else None
        self._eager: Buffers | None = None
        self._head: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    # A step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch[np.ndarray], memory: Memory) -> Output:
        kv = memory.storage
        work = plan(batch, kv.shape[4], self.config, self.decoder.windows)
        extras = NONE
        if batch.dropout is not None or batch.query_rows is not None:
            given = (batch.dropout, batch.query_rows)
            extras = Extras(*(None if array is None else self._there(array) for array in given))
        with self._turn:
            if self.decoder.reach(int(batch.positions.max()) + 1):
                self.graphs.clear()
            if batch.drawn is not None:
                self._take(batch.drawn)
            if self.captures and extras is NONE and batch.num_rows <= MOST_ROWS and work.entries <= ENTRIES:
                hidden, queries = self._replay(work, memory), []
            else:
                hidden, queries = self._launch(work, kv, extras)
            wanted = batch.wanted
            first, count = int(wanted[0]) if len(wanted) else 0, len(wanted)
            if count and int(wanted[-1]) - first == count - 1:
                taken = hidden[first : first + count].clone()
            else:
                taken = hidden[self._there(wanted)]
        stacked = torch.stack(queries).cpu().numpy() if queries else None
        return Output(Rows.of(self, taken), stacked)

    def _replay(self, work: Work, memory: Memory) -> torch.Tensor:
        """Run a captured pass; the hidden states are valid until the next one."""
        assert self._captured is not None
        if memory is not self._memory:
            self.graphs.clear()
            self._memory = memory
        shape, to, kv = work.shape.padded(bucket(work.shape.rows)), self._captured, memory.storage
        packed = work.packed(shape)
        integers = self._integers.get(shape)
        if integers is None:
            integers = self._integers[shape] = torch.zeros(len(packed), dtype=torch.int32, device=self.device)
        integers.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        views = Integers.of(integers, shape)
        self.graphs.replay(shape, lambda: self.decoder.launch(views, shape, self._drawn, to, kv, NONE))
        return to.x

    def _launch(self, work: Work, kv: torch.Tensor, extras: Extras) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run a pass kernel by kernel; the hidden states are valid until the next one."""
        to = self._eager
        if to is None or to.rows < work.shape.rows or to.entries < work.entries:
            most = (0, 0) if to is None else (to.rows, to.entries)
            self._eager = to = None
            to = Buffers(self.decoder, max(most[0], work.shape.rows), max(most[1], 2 * work.entries, 1 << 16))
            self._eager = to
        integers = self._there(work.packed(work.shape))
        views = Integers.of(integers, work.shape)
        return to.x, self.decoder.launch(views, work.shape, self._drawn, to, kv, extras)

    def _take(self, drawn: object) -> None:
        """Put the tokens that placeholders stand for where the pass reads them."""
        if isinstance(drawn, Flying):
            ids = drawn.ids
        else:
            ids = torch.tensor([sampled.id for sampled in drawn.read()], dtype=torch.int32)  # type: ignore[attr-defined]
        self._drawn[: len(ids)].copy_(ids, non_blocking=True)

    def _there(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.captures else tensor.clone()

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> Flying | Ready:
        """The device draws whatever it can, whatever else is asked of the step: a row's token depends on its draw."""
        here = [i for i, draw in enumerate(draws) if not supports(draw)]
        there = [i for i, draw in enumerate(draws) if supports(draw)]
        if not rows:  # its `read` waits for the pass
            return Flying(torch.empty(0, dtype=torch.int32, device=self.device))
        if not there:
            return sample_rows(self, rows, draws)
        flying = Flying(self._draw([rows[i] for i in there], [draws[i] for i in there]))
        if not here:
            return flying
        made = dict(zip(here, sample_rows(self, [rows[i] for i in here], [draws[i] for i in here]), strict=True))
        made |= zip(there, flying.read(), strict=True)
        return Ready(made[i] for i in range(len(rows)))

    def _draw(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> torch.Tensor:
        """Ids int32 [rows]."""
        mine = [row for row in rows if isinstance(row, Rows)]
        with self._turn:
            if len(mine) == len(rows):
                return self.sampler.draw(self._logits(self._joined(mine)), draws)
            found = [self._logits(row.hidden) if isinstance(row, Rows) else self._stored(row) for row in rows]
            return torch.cat([self.sampler.draw(one, [draw]) for one, draw in zip(found, draws, strict=True)])

    def _stored(self, row: LazyLogits) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(row.read())).to(self.device)

    def _joined(self, rows: Sequence[Rows]) -> torch.Tensor:
        """Hidden states of single rows: a view if they follow one another in one step, as those of a decode do."""
        computed, first = rows[0].computed, rows[0].rows.start
        if all(row.computed is computed and row.rows.start == first + i for i, row in enumerate(rows)):
            return computed.hidden[first : first + len(rows)]
        return torch.cat([row.hidden for row in rows])

    # Its head --------------------------------------------------------------------------------------------------

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32 on the device, valid until the next call."""
        rows = len(hidden)
        padded = -(-rows // PADDING) * PADDING
        if self._head is None or len(self._head[0]) < padded:
            sizes = (self.config.hidden_size, torch.float32), (self.config.hidden_size, torch.bfloat16)
            made = [torch.zeros(padded, size, dtype=dtype, device=self.device) for size, dtype in sizes]
            logits = torch.empty(padded, self.decoder.head.features, dtype=torch.float32, device=self.device)
            self._head = made[0], made[1], logits
            self._forget_heads()
        x, h, logits = self._head
        x[:rows].copy_(hidden)
        if self.captures and rows <= MOST_ROWS:
            size = bucket(rows)
            self.graphs.replay(("head", size), lambda: self.decoder.launch_head(x, h, logits, size))
        else:
            self.decoder.launch_head(x, h, logits, rows)
        return logits[:rows]

    def _forget_heads(self) -> None:
        self.graphs.clear()

    def logits(self, hidden: torch.Tensor) -> tuple[np.ndarray, None]:
        with self._turn:
            return self._logits(hidden).cpu().numpy(), None

    def search(self, hidden: torch.Tensor, noises: Sequence[Noise]) -> list[int]:
        with self._turn:
            return self.sampler.search(self._logits(hidden), self.sampler.send(noises)).tolist()

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def copy(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()
