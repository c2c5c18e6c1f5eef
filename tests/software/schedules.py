"""A program for any processor, without PyTorch: prints digests of tiny models' answers under several schedules.

With libraries of kernels as arguments, named by their variants, it takes the best that the processor can run, else
AVX2's. It first prints that variant, and the name of its bits.
"""

import hashlib
import sys
from pathlib import Path

from tests import watching
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.sampling.params import SamplingParams

PROMPTS = [[3 + (i * 7 + n) % 90 for i in range(n)] for n in (1, 17, 70)]
SCHEDULES = {"alone": (1, 4096, "off"), "batched": (2, 4096, "off"), "chunked": (1, 7, "radix")}
KV = {"bfloat16": "int8", "int8": "bf16", "k8v4": "int4"}  # of keys and values; and of weights


def digest(directory: Path, variant: str, kv_dtype: str, schedule: str) -> str:
    """Of tokens, log-probabilities, and the bits of all keys and values."""
    threads, chunk, index = SCHEDULES[schedule]
    llm = LLM(
        str(directory), backend=f"native-{variant}", weights=KV[kv_dtype], kv_dtype=kv_dtype, threads=threads,
        kv_bytes=4 << 20, prefix_index=index,
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, logprobs=2, ignore_eos=True)
    requests = [llm.request(prompt, params) for prompt in PROMPTS]
    config, together = SchedulerConfig(max_step_tokens=chunk), schedule != "alone"
    groups = [requests] if together else [[one] for one in requests]
    found = [repr(answer) for group in groups for answer in watching.answers(llm, group, config)]
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


if __name__ == "__main__":
    folder, *built = map(Path, sys.argv[1:])
    for path in built:
        library.use(path.stem, path)
    variant = library.variants()[0] if built else "avx2"
    print(variant, NativeBackend(1, variant).arithmetic)
    for directory in sorted(folder.iterdir()):
        for kv_dtype in KV:
            for schedule in SCHEDULES:
                print(directory.name, kv_dtype, schedule, digest(directory, variant, kv_dtype, schedule), flush=True)
