"""llama.cpp, through the C API that its Python package exposes.

The package's `Llama` class is not used: it copies every row of logits into Python arrays and holds one sequence, so
that it would measure the binding. This is the loop of llama.cpp's own programs, including its greedy sampler.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import llama_cpp as api  # pyright: ignore[reportMissingImports]

from benchmarks.peer.protocol import Generated, Job, Options

# A row of a batch: token, position, sequence, and whether its logits are computed.
Row = tuple[int, int, int, bool]


class LlamaCpp:
    def __init__(self, options: Options) -> None:
        self.version = version("llama-cpp-python")
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(options.model.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = options.context * options.sequences, options.sequences
        params.n_threads = params.n_threads_batch = options.threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._rows = int(api.llama_n_batch(self._context))
        self._batch = api.llama_batch_init(self._rows, 0, 1)
        self._sampler = api.llama_sampler_init_greedy()

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
        api.llama_memory_clear(api.llama_get_memory(self._context), False)  # no cache for the next round
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
            if status := api.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            found += [(row[2], self._sample(i)) for i, row in enumerate(part) if row[3]]
        return found

    def _sample(self, row: int) -> Any:
        return api.llama_sampler_sample(self._sampler, self._context, row)


def load(options: Options) -> LlamaCpp:
    return LlamaCpp(options)
