"""llama.cpp, with its own greedy sampler."""

from __future__ import annotations

from importlib.metadata import version

import llama_cpp as api  # pyright: ignore[reportMissingImports]

from benchmarks.peer.adapters.llama_batches import LlamaBatches
from benchmarks.peer.protocol import Options


class LlamaCpp(LlamaBatches):
    def __init__(self, options: Options) -> None:
        self.version = version("llama-cpp-python")
        api.llama_backend_init()
        model = api.llama_model_load_from_file(options.model.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = options.context * options.sequences, options.sequences
        params.n_threads = params.n_threads_batch = options.threads
        context = api.llama_init_from_model(model, params)
        super().__init__(api, context, int(api.llama_n_batch(context)) if context else 0)
        self._sampler = api.llama_sampler_init_greedy()

    def sample(self, row: int) -> int:
        return int(api.llama_sampler_sample(self._sampler, self._context, row))

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), False)


def load(options: Options) -> LlamaCpp:
    return LlamaCpp(options)
