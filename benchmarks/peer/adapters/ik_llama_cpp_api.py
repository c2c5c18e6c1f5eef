"""ik_llama.cpp with the settings that its users name as fastest on CPUs: tensors repacked as they are loaded, flash
attention, and fused operations, which are its defaults."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.peer.adapters.llama_batches import LlamaBatches
from benchmarks.peer.protocol import Options

package = find_spec("ik_llama_cpp")
if package is not None and package.origin is not None:  # its library does not say where the other one is
    ctypes.CDLL(str(Path(package.origin).parent / "lib" / "libggml.so"), ctypes.RTLD_GLOBAL)
from ik_llama_cpp import _ctypes_api as api  # noqa: E402  # pyright: ignore[reportMissingImports]

BATCH = 2048  # rows, as its programs take


class IkLlamaCpp(LlamaBatches):
    def __init__(self, options: Options) -> None:
        self.version = version("ik-llama-cpp-python")
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.repack_tensors = params.flash_attn = True
        model = api.llama_model_load_from_file(options.model.encode(), params)
        if not model:
            raise RuntimeError("it loaded no model")
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = options.context * options.sequences, options.sequences
        settings.n_batch, settings.flash_attn = BATCH, True
        settings.n_threads = settings.n_threads_batch = options.threads
        super().__init__(api, api.llama_init_from_model(model, settings), BATCH)
        self._vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))

    def sample(self, row: int) -> int:
        return int(np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), (self._vocab,)).argmax())

    def clear(self) -> None:
        api.llama_kv_cache_clear(self._context)


def load(options: Options) -> IkLlamaCpp:
    return IkLlamaCpp(options)
