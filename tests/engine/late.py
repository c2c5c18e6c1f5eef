"""A device that computes late: in another thread, one call after another, each some time after it was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from twostroke.api.llm import LLM
from twostroke.backends.interface import CompiledModel, ForwardOutput, LazyLogits, RaggedBatch
from twostroke.backends.lazy_logits import KnownTokens
from twostroke.backends.page_memory import PageMemory
from twostroke.sampling.draw import Draw, Sampled
from twostroke.sampling.scores import TokenScore

LATE_S = 5e-4
FACTS = ("page_bytes", "layout")  # of a memory, which nobody has to wait for


class Device:
    """One stream of work, and what was asked of it.

    Attributes:
        log: ("forward", rows, placeholders), ("sample", rows, number of the call) and ("read", rows, number), in order.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []
        self._stream = ThreadPoolExecutor(1)

    def submit(self, action: Callable[[], Any]) -> Future[Any]:
        def late() -> Any:
            time.sleep(LATE_S)
            return action()

        return self._stream.submit(late)

    def wait(self) -> None:
        """For all that was asked."""
        self._stream.submit(int).result()

    def close(self) -> None:
        self._stream.shutdown()


class LateMemory:
    """A memory whose calls wait for the steps before."""

    def __init__(self, device: Device, memory: PageMemory) -> None:
        self.device, self.memory = device, memory

    def __getattr__(self, name: str) -> Any:
        if name not in FACTS:
            self.device.wait()
        return getattr(self.memory, name)


class LateRows:
    """Implements `LazyLogits`."""

    def __init__(self, future: Future[ForwardOutput], rows: range) -> None:
        self._future, self._rows = future, rows

    @property
    def real(self) -> LazyLogits:
        return self._future.result().logits[self._rows.start : self._rows.stop]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> LateRows:
        return LateRows(self._future, self._rows[rows])

    def kept(self) -> LateRows:
        return self

    def read(self) -> np.ndarray:
        return self.real.read()

    def hidden_states(self) -> np.ndarray:
        return self.real.hidden_states()

    def scores(self, ids: Sequence[int], count: int) -> list[TokenScore]:
        return self.real.scores(ids, count)

    @property
    def nbytes(self) -> int:
        return self.real.nbytes


class LateDrawn:
    """Implements `Drawn`."""

    def __init__(self, device: Device, future: Future[list[Sampled]], rows: int, number: int) -> None:
        self._device, self.future, self._rows, self._number = device, future, rows, number

    def __len__(self) -> int:
        return self._rows

    def read(self) -> list[Sampled]:
        self._device.log.append(("read", self._rows, self._number))
        return self.future.result()


class LateModel:
    """Implements `CompiledModel` by another one, on a device."""

    def __init__(self, device: Device, compiled: CompiledModel) -> None:
        self.device, self.compiled, self.config = device, compiled, compiled.config
        self._samples = 0

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        real: Any = memory.memory if isinstance(memory, LateMemory) else memory
        drawn = batch.drawn
        self.device.log.append(("forward", batch.num_rows, int((batch.token_ids < 0).sum())))

        def forward() -> ForwardOutput:
            known = KnownTokens(drawn.future.result()) if isinstance(drawn, LateDrawn) else None
            return self.compiled.forward(replace(batch, drawn=known), real)

        future = self.device.submit(forward)
        asked = batch.query_rows is not None or batch.state_rows is not None
        more = future.result()[1:] if asked else (None, None)
        return ForwardOutput(LateRows(future, range(len(batch.wanted))), *more)

    def rows_of(self, states: np.ndarray) -> LazyLogits:
        return self.compiled.rows_of(states)

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> LateDrawn:
        mine = [replace(draw, output=tuple(draw.output)) for draw in draws]
        real = list(rows)

        def sample() -> list[Sampled]:
            found = [row.real if isinstance(row, LateRows) else row for row in real]
            return self.compiled.sample(found, mine).read()

        self._samples += 1
        self.device.log.append(("sample", len(real), self._samples))
        return LateDrawn(self.device, self.device.submit(sample), len(real), self._samples)


def late(llm: LLM) -> Device:
    """Let all models of an LLM compute late."""
    device = Device()
    for model in dict.fromkeys(llm.engine.models.values()):
        object.__setattr__(model, "compiled", LateModel(device, model.compiled))
        if not isinstance(model.pool.memory, LateMemory):
            model.pool.memory = LateMemory(device, model.pool.memory)  # pyright: ignore[reportAttributeAccessIssue]
    return device
