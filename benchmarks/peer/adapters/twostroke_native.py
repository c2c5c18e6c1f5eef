"""Twostroke: the native backend, without a prefix index."""

from __future__ import annotations

import json
import os
import time
from importlib.metadata import version

from benchmarks.peer.protocol import PROPERTIES, Generated, Job, Options
from twostroke import LLM, SamplingParams
from twostroke.backends.native.library import variants


class Twostroke:
    def __init__(self, options: Options) -> None:
        self.version = version("twostroke")
        other = next((name for name in variants() if name != "amx"), "avx2")  # avx2: raises an error
        backend = "native" if options.amx else f"native-{other}"
        more = json.loads(os.environ.get(PROPERTIES, "{}"))
        self._llm = LLM(options.model, backend=backend, threads=options.threads, prefix_index="off", **more)

    def answer(self, job: Job) -> Generated:
        params = SamplingParams(max_tokens=job.output_tokens, ignore_eos=True)  # greedy by default
        began = time.perf_counter()
        done = self._llm.generate(job.prompts, params)
        return Generated(
            [[token.id for token in one.tokens] for one in done],
            [[at - began for at in one.timings.tokens] for one in done],
        )


def load(options: Options) -> Twostroke:
    return Twostroke(options)
