"""How decode bears a crowd: its speed beside one process that is busy on every core, at equal priority.

    python -m benchmarks.crowded --model smollm2-135m

Quiet and crowded turns alternate. The other process multiplies matrices that fit in cache, on as many threads as the
model runs on: it takes cores and no memory bandwidth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.record import Others, doubt, save
from twostroke.benchmark.latency import Prompts, Workload
from twostroke.llm import LLM

DEFINITIONS = {
    "quiet_tok_s": "output tokens - 1 / (last token - first token), batch 1, nothing else running",
    "crowded_tok_s": "the same beside the busy process",
    "kept": "median of crowded / median of quiet",
    "others_cpu": "processor time of everything else on the machine during the quiet turns / wall time",
}
BUSY = "import torch, sys; torch.set_num_threads(int(sys.argv[1])); x = torch.randn(256, 256)\nwhile True: x @ x"


def decode_speed(llm: LLM, prompt: list[int], count: int) -> float:
    """Tokens per second of one answer."""
    times = [time.perf_counter() for _ in llm.stream(prompt, max_tokens=count, ignore_eos=True, temperature=0.0)]
    return (len(times) - 1) / (times[-1] - times[0])


@dataclass(frozen=True)
class Crowded:
    """As in `DEFINITIONS`."""

    threads: int
    quiet_tok_s: list[float]
    crowded_tok_s: list[float]
    others_cpu: list[float]

    @property
    def kept(self) -> float:
        return median(self.crowded_tok_s) / median(self.quiet_tok_s)


def measure(llm: LLM, rounds: int, workload: Workload) -> Crowded:
    (prompt,) = Prompts().make(llm, workload, 0)
    found = Crowded(llm.decoder.kernels.threads, [], [], [])
    decode_speed(llm, prompt, workload.output_tokens)
    for _ in range(rounds):
        watch = Others()
        found.quiet_tok_s.append(decode_speed(llm, prompt, workload.output_tokens))
        found.others_cpu.append(watch.cpu)
        busy = subprocess.Popen([sys.executable, "-c", BUSY, str(found.threads)])
        try:
            time.sleep(3)  # until it has imported torch
            found.crowded_tok_s.append(decode_speed(llm, prompt, workload.output_tokens))
        finally:
            busy.kill()
            busy.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode beside a busy process.")
    parser.add_argument("--model", action="append", help="may be repeated (default smollm2-135m)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    options = parser.parse_args()
    print("| model | quiet tok/s | crowded tok/s | kept |\n| --- | ---: | ---: | ---: |")
    cpus: list[float] = []
    for name in options.model or ["smollm2-135m"]:
        llm = LLM(name, threads=options.threads, prefix_index="off", kv_bytes=1 << 28)
        found = measure(llm, options.rounds, Workload(options.prompt, options.output, 1))
        quiet, crowded = median(found.quiet_tok_s), median(found.crowded_tok_s)
        print(f"| {name} | {quiet:.1f} | {crowded:.1f} | {found.kept:.0%} |")
        cpus += found.others_cpu
        save("crowded", DEFINITIONS, name, asdict(found) | {"kept": found.kept})
    print(*doubt(cpus), sep="\n")


if __name__ == "__main__":
    main()
