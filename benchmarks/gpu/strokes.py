"""Both strokes on a GPU, through the calls that the engine makes, against what the card can do.

    python3 -m benchmarks.gpu.strokes --models llama-3.1-8b --out strokes.json

A step is `CompiledModel.forward` and `sample`. It is timed in three ways: until its tokens are read, as the engine
does it; back to back, where each step takes the tokens of the one before on the device; and on the device alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.runs import DEFINITIONS, Runs, Step, fill, random_model, timed
from benchmarks.gpu.weights import WEIGHTS, RandomWeights
from benchmarks.results_file import today
from benchmarks.terminal import command_line, markdown
from twostroke.backends.interface import Backend
from twostroke.engine.calibration import StepBench
from twostroke.models.cost import SequenceRows
from twostroke.models.kv_formats import KV_FORMATS
from twostroke.system.machine import describe

LONGEST = 8  # kernels that are printed of each case
DECODED = 64  # steps of growing context, taken in turn
BACKENDS = {"triton": "TritonBackend", "reference": "ReferenceBackend"}


@dataclass(frozen=True)
class Case:
    """A decode step of `sequences` after `context` entries each; or a prefill of `tokens` in chunks of `chunk`."""

    sequences: int = 1
    context: int = 0
    tokens: int = 0
    chunk: int = 0

    @property
    def stroke(self) -> str:
        return "prefill" if self.tokens else "decode"

    @property
    def label(self) -> str:
        if self.tokens:
            return f"{self.tokens:,} tokens" + (f" by {self.chunk:,}" if self.chunk < self.tokens else "")
        return f"{self.sequences} after {self.context:,}"

    @property
    def made(self) -> int:
        """Tokens that count for tokens/s."""
        return self.tokens or self.sequences

    def pages(self, size: int) -> int:
        """KV pages of so many entries that it needs."""
        return self.sequences * -(-(self.tokens or self.context + DECODED) // size)


def cases(quick: bool, most: int) -> list[Case]:
    """The cases of a model with `most` positions, most useful first."""
    decodes = [Case(n, c) for c in (512, 4096) for n in (1, 8, 64)]
    prefills = [Case(tokens=n, chunk=n) for n in (512, 4096)]
    chunks = [Case(tokens=4096, chunk=c) for c in ((512,) if quick else (2048, 1024, 512, 256, 128))]
    if quick:
        decodes = [Case(1, 512), Case(64, 512), Case(8, 4096)]
    return [one for one in [*decodes, *prefills, *chunks] if max(one.context + DECODED, one.tokens) <= most]


def steps_of(case: Case) -> list[Step]:
    """Decode steps of growing context; or one prefill, of as many passes as it has chunks."""
    if not case.tokens:
        return [[[SequenceRows(1, case.context + i, 1)] * case.sequences] for i in range(DECODED)]
    starts = range(0, case.tokens, case.chunk)
    counts = [min(case.chunk, case.tokens - start) for start in starts]
    rows = (SequenceRows(n, at, int(at + n == case.tokens)) for at, n in zip(starts, counts, strict=True))
    return [[[one] for one in rows]]


class Results:
    """What was measured so far, written after every case, and the time that is left."""

    def __init__(self, options: argparse.Namespace, card: Card) -> None:
        self.began, self.options, self.card = time.perf_counter(), options, card
        self.path: Path = options.out or today("gpu-strokes")
        self.ceilings: Ceilings = card.ceilings(options.quick)
        asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        triton = version("triton") if find_spec("triton") else None
        self.cases = list[dict[str, Any]]()
        self.facts: dict[str, Any] = {
            "definitions": DEFINITIONS,
            "options": asked,
            "triton": triton,
            "cases": self.cases,
        }
        self.facts |= describe(options.device) | {"ceilings": asdict(self.ceilings)}

    @property
    def over(self) -> bool:
        """Whether the time is up. What is left out is said once in the results."""
        if time.perf_counter() - self.began < self.options.seconds:
            return False
        self.facts["cut_off_after_s"] = self.options.seconds
        return True

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, **case: Any) -> None:
        """Keep a case."""
        self.cases.append(case)
        self.write()

    def write(self) -> None:
        self.facts["seconds"] = round(time.perf_counter() - self.began, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.facts, indent=1) + "\n")

    def model(self, name: str, backend: Backend) -> None:
        """One model's cases, in one memory; those that do not fit are said to be skipped."""
        options, card = self.options, self.card
        asked = cases(options.quick, MODELS[name].max_position)
        asked = [one for one in asked if options.only in (None, one.stroke)]
        if card.on_cpu:
            asked = [Case(2, 40), Case(tokens=48, chunk=48), Case(tokens=48, chunk=16)]
        model = random_model(backend, RandomWeights(MODELS[name], options.weights), options.page_size)
        size, page_bytes = options.page_size, model.pool.page_bytes
        room = int(0.85 * card.free_bytes()) // page_bytes
        bench = StepBench(model, size * max(pages for one in asked if (pages := one.pages(size)) <= room))
        fill(bench)
        for case in asked:
            if self.over:
                return
            if (pages := case.pages(size)) > room:
                self.add(model=name, label=case.label, skipped=f"no room for {pages * page_bytes / 1e9:.1f} GB of KV")
                continue
            self.say(f"{name}: {case.stroke} {case.label}")
            try:
                self.add(model=name, **self.measured(bench, case))
            except Exception as error:
                self.failed(error, model=name, label=case.label)

    def measured(self, bench: StepBench, case: Case) -> dict[str, Any]:
        """The figures of one case."""
        runs = Runs(bench, steps_of(case), follows=not case.tokens)
        found = timed(self.card, runs, 6 if self.options.quick else 16, self.ceilings)
        kernels = {"kernels": self.card.kernels(runs.launch, 3)} if self.options.profile else {}
        rate = {"tokens_per_second": 1e3 * case.made / found["step_ms"]}
        return asdict(case) | {"stroke": case.stroke, "label": case.label} | found | kernels | rate

    def failed(self, error: Exception, **case: Any) -> None:
        """An error is a failure in the results, and the next case goes on: device time is scarce."""
        traceback.print_exception(error)
        self.add(**case, failure=f"{type(error).__name__}: {error}"[:300])

    def show(self) -> None:
        """Print the tables, last of all. Exits with status 1 if a case failed."""
        self.write()
        failed = [one for one in self.cases if "failure" in one]
        notes = [f"Failed: {', '.join(str(value) for value in one.values())}" for one in failed]
        if "cut_off_after_s" in self.facts:
            notes.append(f"Cut off after {self.options.seconds:g} s: not all cases were measured.")
        print("\n".join([*table(self.cases, self.ceilings), *notes]), flush=True)
        if failed:
            raise SystemExit(1)


def table(found: Sequence[dict[str, Any]], ceilings: Ceilings) -> list[str]:
    rows = [
        (c["model"], c["stroke"], c["label"], *(short(c[key]) for key in ("step_ms", "back_to_back_ms", "device_ms")),
         f"{c['outside']:.0%}", short(c["tokens_per_second"]), short(c["bytes_per_second"] / 1e9),
         short(c["flops_per_second"] / 1e12), f"{c['of_floor']:.0%}", f"{c['floor_ms'] / c['device_ms']:.0%}")
        for c in found if "step_ms" in c
    ]  # fmt: skip
    head = ("model", "stroke", "case", "step ms", "in a row ms", "device ms", "outside", "tokens/s", "GB/s", "TFLOP/s",
            "of floor", "device of floor")  # fmt: skip
    skipped = [f"Skipped: {c['model']} {c.get('label', '')}: {c['skipped']}" for c in found if "skipped" in c]
    kernels = [
        f"{c['model']} {c['stroke']} {c['label']}: {ms:.3f} ms in {count:.0f} x {name[:60]}"
        for c in found
        for name, ms, count in c.get("kernels", [])[:LONGEST]
    ]
    return [
        *kernels,
        f"Ceilings: copy {ceilings.bandwidth / 1e9:,.0f} GB/s, bf16 matmul {ceilings.flops / 1e12:,.0f} TFLOP/s",
        markdown(head, rows),
        *skipped,
    ]


def short(value: float) -> str:
    """Three or four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main() -> None:
    parser = command_line(__doc__)
    parser.prog = "strokes"
    usual = ["qwen2.5-0.5b", "llama-3.1-8b"]
    parser.add_argument("--models", nargs="+", default=usual, choices=list(MODELS), metavar="MODEL",
                        help=f"of {', '.join(MODELS)} (default {' '.join(usual)})")  # fmt: skip
    parser.add_argument("--backend", default="triton", choices=BACKENDS)
    parser.add_argument("--device", default="cuda", help="a torch device; cpu for a dry run")
    parser.add_argument("--weights", default="BF16", choices=WEIGHTS, help="the format of random weights")
    parser.add_argument("--page-size", type=int, default=16, help="entries of a KV page (default 16)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    parser.add_argument("--seconds", type=float, default=100.0, help="start no case after this time (default 100)")
    parser.add_argument("--out", type=Path, help="JSON (default benchmarks/results/gpu-strokes-DATE.json)")
    parser.add_argument("--only", choices=("decode", "prefill"), help="one stroke alone")
    parser.add_argument("--profile", action="store_true", help="also the time of every kernel, by PyTorch's profiler")
    parser.add_argument("--kv-dtype", choices=KV_FORMATS, default="bfloat16", help="of K and V")
    options = parser.parse_args()
    results = Results(options, Card(options.device))
    given = [options.device] + ["bfloat16"] * (options.backend == "reference")
    kind = getattr(import_module(f"twostroke.backends.{options.backend}.backend"), BACKENDS[options.backend])
    backend = kind(*given, kv_dtype=options.kv_dtype)
    for name in options.models:
        if results.over:
            break
        results.say(f"{name}: loading {options.weights}")
        try:
            results.model(name, backend)
        except Exception as error:
            results.failed(error, model=name)
        gc.collect()
    results.show()


if __name__ == "__main__":
    main()
