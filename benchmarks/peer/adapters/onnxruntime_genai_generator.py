"""ONNX Runtime's `onnxruntime_genai` on the CPU, int4 weights with int8 activations."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import onnxruntime_genai as genai  # pyright: ignore[reportMissingImports]

from benchmarks.peer.protocol import Generated, Job, Options


class OnnxRuntimeGenAi:
    def __init__(self, options: Options) -> None:
        self.version = version("onnxruntime-genai")
        config: Any = genai.Config(options.model)
        session = {"intra_op_num_threads": options.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model: Any = genai.Model(config)

    def answer(self, job: Job) -> Generated:
        prompts = np.array(job.prompts, dtype=np.int32)
        length = prompts.shape[1] + job.output_tokens
        params: Any = genai.GeneratorParams(self._model)
        # An end of text before min_length is not drawn.
        params.set_search_options(
            do_sample=False,
            batch_size=len(prompts),
            min_length=length,
            max_length=length,
            past_present_share_buffer=True,
        )
        generator: Any = genai.Generator(self._model, params)
        tokens: list[list[int]] = [[] for _ in job.prompts]
        times: list[float] = []
        began = time.perf_counter()
        generator.append_tokens(prompts)
        for _ in range(job.output_tokens):
            generator.generate_next_token()
            for row, token in zip(tokens, generator.get_next_tokens(), strict=True):
                row.append(int(token))
            times.append(time.perf_counter() - began)
        return Generated(tokens, [times] * len(tokens))


def load(options: Options) -> OnnxRuntimeGenAi:
    return OnnxRuntimeGenAi(options)
