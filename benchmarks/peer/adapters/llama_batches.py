"""The loop of llama.cpp's own programs, over the C API that a Python package exposes.

The packages' `Llama` classes are not used: they copy every row of logits into Python arrays and hold one sequence, so
that they would measure the binding.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from benchmarks.peer.protocol import Generated, Job

# A row of a batch: token, position, sequence, and whether its logits are computed.
Row = tuple[int, int, int, bool]


class LlamaBatches(ABC):
    """Answers jobs with a context of one of the packages.

    Attributes:
        version: of the package.
    """

    version: str

    def __init__(self, api: Any, context: Any, rows: int) -> None:
        """`api`: the package's functions; `rows`: the most in one batch. Raises RuntimeError without a context."""
        if not context:
            raise RuntimeError("it made no context")
        self._api, self._context, self._rows = api, context, rows
        self._batch = api.llama_batch_init(rows, 0, 1)

    @abstractmethod
    def sample(self, row: int) -> int:
        """The likeliest token behind a row of the last batch."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all KV: no cache for the next round."""

    def answer(self, job: Job) -> Generated:
        count = len(job.prompts)
        tokens: list[list[int]] = [[] for _ in range(count)]
        times: list[list[float]] = [[] for _ in range(count)]

        def run(rows: list[Row]) -> None:
            for sequence, token in self._decode(rows):
                tokens[sequence].append(token)
                times[sequence].append(time.perf_counter() - began)

        began = time.perf_counter()
        run(
            [
                (token, position, sequence, position == len(prompt) - 1)
                for sequence, prompt in enumerate(job.prompts)
                for position, token in enumerate(prompt)
            ]
        )
        for step in range(job.output_tokens - 1):
            run([(tokens[one][-1], len(job.prompts[one]) + step, one, True) for one in range(count)])
        self.clear()
        return Generated(tokens, times)

    def _decode(self, rows: list[Row]) -> list[tuple[int, int]]:
        """(sequence, next token) of every row with logits."""
        found: list[tuple[int, int]] = []
        for start in range(0, len(rows), self._rows):
            part, batch = rows[start : start + self._rows], self._batch
            for i, row in enumerate(part):
                batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i] = row
                batch.n_seq_id[i] = 1
            batch.n_tokens = len(part)
            if status := self._api.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            found += [(row[2], self.sample(i)) for i, row in enumerate(part) if row[3]]
        return found
