"""Speed of engines beside another process that is busy on every core, at equal priority.

    python -m benchmarks.crowded --model smollm2-135m --engines twostroke,openvino

Engines run in turn, as in `benchmarks.peers`, each first without and then with the other process. That process
multiplies matrices that fit in cache, on as many threads as the engines have: it uses cores but no memory bandwidth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import typer

from benchmarks.peer.__main__ import WORK, names
from benchmarks.peer.client import Worker, WorkerFailed
from benchmarks.peer.engines import ENGINES, OURS
from benchmarks.peer.turns import SETTLE_S, Measured, PromptSource, Turn, Workload, load, take_turn
from benchmarks.quiet import doubt
from benchmarks.results_file import save
from twostroke.errors import TwostrokeError

DEFINITIONS = {
    "prefill": "prompt tokens / time to first token, batch 1, tokens per second",
    "decode": "output tokens - 1 / (last token - first token)",
    "quiet": "with nothing else running, by round",
    "crowded": "the same beside the busy process",
    "kept": "median of crowded / median of quiet",
    "others_cpu": "processor time of everything else on the machine during the quiet turns / wall time",
}
BUSY = "import torch, sys; torch.set_num_threads(int(sys.argv[1])); x = torch.randn(256, 256)\nwhile True: x @ x"


@dataclass
class Bearing:
    """All turns of one engine."""

    version: str
    quiet: list[Turn] = field(default_factory=list[Turn])
    crowded: list[Turn] = field(default_factory=list[Turn])

    def facts(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "prefill": {"quiet": rates(self.quiet, "prefill"), "crowded": rates(self.crowded, "prefill")},
            "decode": {"quiet": rates(self.quiet, "decode"), "crowded": rates(self.crowded, "decode")},
            "kept": {stroke: self.kept(stroke) for stroke in ("prefill", "decode")},
            "others_cpu": [turn.others_cpu for turn in self.quiet],
        }

    def kept(self, stroke: str) -> float:
        return median(rates(self.crowded, stroke)) / median(rates(self.quiet, stroke))

    def row(self, engine: str) -> str:
        def cell(stroke: str) -> str:
            quiet, crowded = (median(rates(turns, stroke)) for turns in (self.quiet, self.crowded))
            return f"{quiet:.1f} to {crowded:.1f}, {crowded / quiet:.0%}"

        return f"| {engine} | {cell('prefill')} | {cell('decode')} |"


def rates(turns: list[Turn], stroke: str) -> list[float]:
    return [getattr(turn.rates, stroke) for turn in turns]


@contextmanager
def busy(threads: int) -> Generator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(threads)])
    try:
        time.sleep(3)  # time for it to import torch
        yield
    finally:
        process.kill()
        process.wait()


def measure(model: str, engines: list[str], rounds: int, threads: int, workload: Workload) -> dict[str, Bearing]:
    """The turns of all engines that could be loaded. Raises WorkerFailed if one ends."""
    prompts, found = PromptSource(model), dict[str, Bearing]()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in engines:
            measured = Measured(name)
            context = workload.prompt_tokens + workload.output_tokens
            if (worker := load(measured, model, context, workload.batch, threads, WORK, say)) is not None:
                workers[name], found[name] = stack.enter_context(worker), Bearing(measured.version)
        for round_number in range(rounds + 1):  # round 0 warms up
            for name, worker in workers.items():
                say(f"{model}: round {round_number} of {rounds}, {name}")
                asked = prompts.make(workload, round_number)
                quiet = take_turn(worker, asked, workload, round_number)
                time.sleep(SETTLE_S)
                if round_number:
                    found[name].quiet.append(quiet)
                    with busy(threads):
                        found[name].crowded.append(take_turn(worker, asked, workload, round_number))
                    time.sleep(SETTLE_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Engines beside a busy process.")
    parser.add_argument("--model", action="append", help="may be repeated (default smollm2-135m)")
    parser.add_argument("--engines", default=OURS, help="names separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    try:
        engines = names(options.engines, ENGINES)
    except typer.BadParameter as error:
        parser.error(f"--engines {error.message}")
    workload = Workload("single", options.prompt, options.output)
    cpus: list[float] = []
    for model in options.model or ["smollm2-135m"]:
        try:
            found = measure(model, engines, options.rounds, options.threads, workload)
        except (WorkerFailed, TwostrokeError) as error:
            sys.exit(f"{model}: {error}")
        print(f"| {model}, tokens/s | prefill | decode |\n| --- | ---: | ---: |")
        for name, bearing in found.items():
            print(bearing.row(name))
            cpus += [turn.others_cpu for turn in bearing.quiet]
        facts = {name: bearing.facts() for name, bearing in found.items()}
        save("crowded", DEFINITIONS, model, {"threads": options.threads, "engines": facts})
    print(*doubt(cpus), sep="\n")


if __name__ == "__main__":
    main()
