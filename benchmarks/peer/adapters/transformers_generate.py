"""transformers' `generate`, bfloat16, its default attention."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peer.protocol import Generated, Job, Options


class Stamps:
    """A streamer. `generate` passes it the prompts, then in every step one token of each sequence."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Any) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, options: Options) -> None:
        self.version = version("transformers")
        torch.set_num_threads(options.threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self._model.generation_config.eos_token_id = None  # ignore EOS

    def answer(self, job: Job) -> Generated:
        stamps, n = Stamps(), job.output_tokens
        began = time.perf_counter()
        prompts = torch.tensor(job.prompts)
        mask = torch.ones_like(prompts)
        rows = self._model.generate(
            prompts, attention_mask=mask, max_new_tokens=n, do_sample=False, streamer=stamps, pad_token_id=0
        )
        times = [at - began for at in stamps.at[1:]]
        return Generated(rows[:, prompts.shape[1] :].tolist(), [times] * len(job.prompts))


def load(options: Options) -> Transformers:
    return Transformers(options)
