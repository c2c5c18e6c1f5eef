"""Tensor parallelism: two ranks of one thread against one process, what its gathers cost, and what the bits cost.

    python -m benchmarks.tensor_parallel --model smollm2-135m

Three contenders take turns: one process on one core, two ranks on a core each, one process on both cores. Then the
communication alone is timed, in the same processes: the gathers of a layer, and the all-reduces of partial sums that
they stand in for (Shoeybi et al. 2019, arXiv:1909.08053), which would change bits with the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.peer.figures import turn_order
from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from twostroke.api.llm import LLM
from twostroke.backends.native.backend import NativeBackend
from twostroke.backends.native.model import NativeModel
from twostroke.backends.native.shared_memory_ranks import SharedMemoryRanks
from twostroke.models.config import GatedMLP, ModelConfig
from twostroke.models.cost import SequenceRows
from twostroke.sampling.params import SamplingParams
from twostroke.study.bench.latency import BatchShape, PromptSource, summarize
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import find_model
from twostroke.study.plan.roofline import Roofline
from twostroke.study.plan.weights import weight_format

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
PREFILLS = (512, 2000, 4096)
DECODE = BatchShape(512, 65)
DECODES = 4  # of each contender in a round: memory's rate drifts within a minute, where neighbours share it
# Name -> ranks, threads of each, cores.
CONTENDERS = {"one core": (1, 1, 1), "two ranks": (2, 1, 2), "two threads": (1, 2, 2)}
SEED = {1: 780, 2: 410, 4: 215, 8: 120}  # ms by degree: Llama 70B, 4,096 tokens, FP16, A100s, as published
ROUNDS = 400  # of each exchange
SMALL = 4  # rows of an exchange up to which numbers are those of a decode

DEFINITIONS = {
    "prefill": "prompt tokens / time to first token, tokens per second, in chunks of 512",
    "decode": "(n - 1) / (last token - first token) after a prompt of 512 tokens",
    "speedup": "median of two ranks / one core, each pair of turns by itself",
    "against_threads": "median of two ranks / two threads, each pair of turns by itself",
    "meetings": "meetings of rank 0 in a turn, per layer and pass",
    "waited_us": "time that rank 0 waited for the other at them, per layer and pass: communication and imbalance",
    "gather_us": "the gathers of one layer alone: attended rows, inputs of the MLP, gated, inputs of the next layer",
    "all_reduce_us": "two all-reduces of [rows, hidden] float32 partial sums alone, in the same memory",
    "gather_bytes": "bytes that the other rank's parts of these gathers have, int8 with scales",
    "formula_bytes": "2 all-reduces of 2 (n - 1) / n x rows x hidden x 4 bytes (the seed's formula, in float32)",
    "others_cpu": "processor time of everything else on the machine during the turn / wall time; 1 is a whole core",
}


@dataclass(frozen=True)
class Turn:
    """One measurement of a contender; rates in tokens per second, the rest as in `DEFINITIONS`."""

    rate: float
    meetings: float
    waited_us: float


# The processes of contenders ------------------------------------------------------------------------------------------


def serve(model: str, ranks: int, threads: int, cores: int) -> None:
    """Open a model, and answer questions on stdin, one line of JSON each, until it ends."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    llm = LLM(model, backend="native", tp=ranks, threads=threads, prefix_index="off", kv_bytes=1 << 30)
    say({"ready": repr(llm)})
    for line in sys.stdin:
        asked = json.loads(line)
        say(turn_of(llm, **asked["turn"]) if "turn" in asked else exchanges(llm, asked["exchange"]))


def say(facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def turn_of(llm: LLM, prompt: int, output: int, number: int) -> dict[str, Any]:
    """Answer one prompt."""
    backend, shape = llm.backend, BatchShape(prompt, output)
    assert isinstance(backend, NativeBackend)
    ranks, others = backend.ranks, Others()
    if isinstance(ranks, SharedMemoryRanks):
        ranks.account()
    answers = llm.generate(PromptSource().make(llm, shape, number), SamplingParams(max_tokens=output, ignore_eos=True))
    meetings, waited = ranks.account() if isinstance(ranks, SharedMemoryRanks) else (0, 0.0)
    found = summarize(answers)
    rate = found.prefill_tokens_per_second if output == 1 else found.decode_tokens_per_second
    passes = -(-prompt // llm.engine.config.max_step_tokens) + output - 1
    each = passes * llm.config.num_layers * backend.threads
    return asdict(Turn(rate or 0.0, meetings / each, 1e6 * waited / each)) | {"others_cpu": others.cpu}


def exchanges(llm: LLM, rows: int) -> dict[str, float]:
    """Microseconds and bytes of one layer's communication alone, for a pass of so many rows."""
    backend, config = llm.backend, llm.config
    assert isinstance(backend, NativeBackend)
    assert isinstance(backend.ranks, SharedMemoryRanks)
    assert isinstance(llm.model.compiled, NativeModel)
    rounds = ROUNDS if rows <= SMALL else ROUNDS // 10
    widths = gathered(config)
    gathers = sum(backend.ranks.exchange(rows, packed(width), rounds, False) for width in widths)
    reduces = 2 * backend.ranks.exchange(rows, config.hidden_size, rounds, True)
    return {
        "rows": rows,
        "gather_us": 1e6 * gathers,
        "all_reduce_us": 1e6 * reduces,
        "gather_bytes": rows * sum(width * 5 / 4 for width in widths) / 2,
        "formula_bytes": 2 * 2 * (1 / 2) * rows * config.hidden_size * 4,
    }


def gathered(config: ModelConfig) -> tuple[int, int, int, int]:
    """Columns of the four activations that a dense layer gathers."""
    mlp = config.layers[0].feed_forward
    assert isinstance(mlp, GatedMLP), "a layer with experts gathers more, by the choices of its rows"
    return config.num_heads * config.head_dim, config.hidden_size, mlp.intermediate_size, config.hidden_size


def packed(columns: int) -> int:
    """Bytes of a row of int8 with its scales, corrections and sums (native/rows.h), in whole lines of 64."""
    return -(-columns * 5 // 4 // 64) * 64


class Contender:
    """A process that `serve`s."""

    def __init__(self, model: str, name: str) -> None:
        words = ["--serve", *map(str, CONTENDERS[name]), "--model", model]
        command = [sys.executable, "-m", "benchmarks.tensor_parallel", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.label: str = self._read()["ready"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a contender has ended (status {self._process.wait()})")
        return json.loads(line)

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


# The comparison -------------------------------------------------------------------------------------------------------


def measure(model: str, rounds: int, prefills: tuple[int, ...]) -> dict[str, Any]:
    """All turns of all contenders, and the exchanges."""
    shapes = {f"prefill {count}": BatchShape(count, 1) for count in prefills} | {"decode": DECODE}
    found: dict[str, dict[str, list[Any]]] = {shape: {name: [] for name in CONTENDERS} for shape in shapes}
    with ExitStack() as stack:
        open_ones = {name: stack.enter_context(Contender(model, name)) for name in CONTENDERS}
        for number in range(rounds + 1):  # round 0 warms up
            print(f"{model}: round {number} of {rounds}", file=sys.stderr)
            for shape, sizes in shapes.items():
                for again in range(DECODES if sizes is DECODE and number else 1):
                    for name in turn_order(list(CONTENDERS), number + again):
                        asked = {"prompt": sizes.prompt_tokens, "output": sizes.output_tokens, "number": number}
                        turn = open_ones[name].ask(turn=asked)
                        found[shape][name] += [turn] if number else []
        alone = [open_ones["two ranks"].ask(exchange=rows) for rows in (1, SMALL, 64, 512)]
    return {"turns": found, "exchanges": alone}


def rate(turns: list[Any]) -> float:
    return median(turn["rate"] for turn in turns)


def ratio(turns: list[Any], others: list[Any]) -> float:
    """The median ratio of two turns that follow each other, so that drifts of the machine fall out."""
    return median(turn["rate"] / other["rate"] for turn, other in zip(turns, others, strict=True))


def table(model: str, found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"**{model}**, tokens/s, medians",
        "",
        "| stroke | one core | two ranks | two threads | ranks / core | ranks / threads | waited, us a layer |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for shape, turns in found["turns"].items():
        one, ranks, threads = (rate(turns[name]) for name in CONTENDERS)
        waited = median(turn["waited_us"] for turn in turns["two ranks"])
        speedup, against = (ratio(turns["two ranks"], turns[name]) for name in ("one core", "two threads"))
        cells = f"{one:.1f} | {ranks:.1f} | {threads:.1f} | {speedup:.2f} | {against:.2f} | {waited:.1f}"
        lines.append(f"| {shape} | {cells} |")
    lines += [
        "",
        "| rows | gathers of a layer, us | all-reduces, us | gathers, bytes | formula, bytes |",
        "|--:|--:|--:|--:|--:|",
    ]
    for one in found["exchanges"]:
        times = f"{one['gather_us']:.1f} | {one['all_reduce_us']:.1f}"
        lines.append(f"| {one['rows']} | {times} | {one['gather_bytes']:,.0f} | {one['formula_bytes']:,.0f} |")
    others = [turn["others_cpu"] for turns in found["turns"].values() for some in turns.values() for turn in some]
    return "\n".join([*lines, "", *doubt(others)])


def predicted() -> str:
    """The seed's scaling table beside what `twostroke plan` predicts for such machines."""
    model, machine = find_model("llama-2-70b").model, find_machine("a100")
    lines = ["Llama 70B, 4,096 tokens, FP16, A100s, ms", "", "| devices | published | predicted |", "|--:|--:|--:|"]
    for degree, published in SEED.items():
        seconds = Roofline(model, machine, weight_format("bf16"), degree).step([SequenceRows(4096, 0, 1)]).seconds
        lines.append(f"| {degree} | {published} | {1e3 * seconds:.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Two ranks against one process.")
    parser.add_argument("--model", action="append", help=f"may be repeated (default {', '.join(MODELS)})")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians over (default 5)")
    parser.add_argument(
        "--prefill", type=int, action="append", help="tokens; may be repeated (default 512, 2000, 4096)"
    )
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = options.model or list(MODELS)
    if options.serve:
        serve(models[0], *options.serve)
    else:
        compare(models, options.rounds, tuple(options.prefill or PREFILLS))


def compare(models: Sequence[str], rounds: int, prefills: tuple[int, ...]) -> None:
    """Print the tables, and write the results."""
    print(predicted())
    for model in models:
        found = measure(model, rounds, prefills)
        print(table(model, found), flush=True)
        print(save("tensor-parallel", DEFINITIONS, model, found), file=sys.stderr)


if __name__ == "__main__":
    main()
