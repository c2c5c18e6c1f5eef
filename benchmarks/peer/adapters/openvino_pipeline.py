"""OpenVINO GenAI's `LLMPipeline` on the CPU, int4 weights, prefix caching off."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

from benchmarks.peer.protocol import PROPERTIES, Generated, Job, Options


class OpenVino:
    def __init__(self, options: Options) -> None:
        self.version = version("openvino-genai")
        # The pipeline's default for one caller, a whole prompt in a step, but without prefix caching: the cache would
        # keep every round's prompt, and no other engine uses memory for that.
        schedule = genai.SchedulerConfig()
        schedule.enable_prefix_caching = False
        schedule.max_num_batched_tokens = options.context * options.sequences
        properties: dict[str, str] = json.loads(os.environ.get(PROPERTIES, "{}"))
        self._pipeline: Any = genai.LLMPipeline(
            options.model, "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=options.threads, **properties
        )

    def answer(self, job: Job) -> Generated:
        config = genai.GenerationConfig(max_new_tokens=job.output_tokens, ignore_eos=True, do_sample=False)
        prompts = np.array(job.prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(prompts), openvino.Tensor(np.ones_like(prompts)))
        done = self._pipeline.generate(inputs, config)
        # Times are the pipeline's own, in microseconds, as only a single sequence can be streamed. A step's time is
        # divided among its n sequences and listed once for each, so every n-th sum ends a step. The worker compares the
        # last one with our clock.
        raw, count = done.perf_metrics.raw_metrics, len(job.prompts)
        sums = list(accumulate([raw.m_times_to_first_token[0], *raw.m_durations]))
        times = [at / 1e6 for at in sums[::count]]
        return Generated([list(tokens) for tokens in done.tokens], [times] * count)


def load(options: Options) -> OpenVino:
    return OpenVino(options)
