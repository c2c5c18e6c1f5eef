"""Both strokes on a GPU, through the calls that the engine makes, against what the card can do.

    python3 -m benchmarks.gpu.strokes --models llama-3.1-8b --out strokes.json

A step is `CompiledModel.forward` and `sample`. It is timed in three ways: until its tokens are read, as the engine
does it; back to back, where each step takes the tokens of the one before on the device; and on the device alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, markdown, open_backend, parser
from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.steps import Part, Stepper
from benchmarks.gpu.weights import RandomWeights
from twostroke.backends.interface import Drawn
from twostroke.errors import OutOfPages

ENOUGH_S = 0.5  # of repeats of one kind
NO_ROOM = (OutOfPages, MemoryError, torch.OutOfMemoryError)
DEFINITIONS = {
    "step_ms": "median wall time of a step, or of a whole prefill, until its tokens are read",
    "back_to_back_ms": "wall time of many in a row / their number; no tokens are read in between",
    "device_ms": "median time between events around it, launched while the device was kept busy before",
    "outside": "1 - device_ms / step_ms",
    "bytes, flops": "weights and KV that a step reads, and its operations (twostroke/models/cost.py); sums over chunks",
    "floor_ms": "sum over its steps of the larger of bytes / copy bandwidth and flops / best rate of torch.matmul",
    "of_floor": "floor_ms / step_ms",
    "ceilings": "measured in the same run: device-to-device copy, bytes read plus written; torch.matmul in bf16",
    "first_s": "the first run of the case: compiling and capturing",
}


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


def cases(quick: bool, most: int) -> list[Case]:
    """The cases of a model with `most` positions, most useful first."""
    decodes = [Case(n, c) for c in (512, 4096) for n in (1, 8, 64)]
    prefills = [Case(tokens=n, chunk=n) for n in (512, 4096)]
    chunks = [Case(tokens=4096, chunk=c) for c in ((512,) if quick else (2048, 1024, 512, 256, 128))]
    if quick:
        decodes = [Case(1, 512), Case(64, 512), Case(8, 4096)]
    return [one for one in [*decodes, *prefills, *chunks] if max(one.context + 64, one.tokens) <= most]


class Runs:
    """The steps of a case, prepared: what is timed is the backend, not the making of batches."""

    def __init__(self, stepper: Stepper, case: Case, steps: int) -> None:
        """`steps`: decode steps, of growing context; a prefill is one, of as many passes as it has chunks."""
        self.stepper, self.case = stepper, case
        self.draws = stepper.draws(case.sequences)
        if case.tokens:
            (frames,) = stepper.sequences(1, case.tokens)
            starts = range(0, case.tokens, case.chunk)
            counts = [min(case.chunk, case.tokens - start) for start in starts]
            ends = [start + count == case.tokens for start, count in zip(starts, counts, strict=True)]
            self.steps = [[[Part(frames, *part)] for part in zip(starts, counts, ends, strict=True)]]
        else:
            frames = stepper.sequences(case.sequences, case.context + steps)
            self.steps = [[[Part(f, case.context + i, 1) for f in frames]] for i in range(steps)]
        self.fresh = [[stepper.batch(parts) for parts in step] for step in self.steps]
        self.following = [[stepper.batch(parts, follows=not case.tokens) for parts in step] for step in self.steps]

    def launch(self, number: int, drawn: Drawn | None = None) -> Drawn:
        """Launch a step; `drawn` has the tokens of the one before."""
        batches = self.fresh if drawn is None else self.following
        made: Drawn | None = None
        for batch in batches[number % len(batches)]:
            made = self.stepper.launch(
                batch, self.draws if len(batch.wanted) else (), None if self.case.tokens else drawn
            )
        assert made is not None
        return made

    def work(self) -> Iterator[tuple[float, float]]:
        """(bytes, FLOPs) of each pass of the middle step."""
        return (self.stepper.work(parts) for parts in self.steps[len(self.steps) // 2])


def measure(card: Card, stepper: Stepper, case: Case, repeats: int, ceilings: Ceilings) -> dict[str, Any]:
    """Time one case; the figures are those of `DEFINITIONS`."""
    runs, number = Runs(stepper, case, 64), iter(range(1 << 30))

    def step() -> None:
        runs.launch(next(number)).read()

    (first,) = card.wall(step, 1)
    (second,) = card.wall(step, 2)[1:]
    repeats = max(3, min(repeats, int(ENOUGH_S / second)))
    taken = card.wall(step, repeats)
    step_s = median(taken)

    def launch() -> None:
        runs.launch(next(number))

    on_device = card.on_device(launch, min(2e3 * step_s, 500.0) + 1, max(3, repeats // 2))
    drawn = runs.launch(0)
    card.wait()
    began = time.perf_counter()
    for i in range(repeats):
        drawn = runs.launch(i + 1, drawn)
    drawn.read()
    card.wait()
    in_a_row = (time.perf_counter() - began) / repeats
    work = list(runs.work())
    size, flops = (sum(one) for one in zip(*work, strict=True))
    floor = sum(max(size / ceilings.bandwidth, flops / ceilings.flops) for size, flops in work)
    return asdict(case) | {
        "stroke": case.stroke,
        "label": case.label,
        "step_ms": 1e3 * step_s,
        "back_to_back_ms": 1e3 * in_a_row,
        "device_ms": 1e3 * median(on_device),
        "outside": 1 - median(on_device) / step_s,
        "tokens_per_second": case.made / step_s,
        "bytes": size,
        "flops": flops,
        "bytes_per_second": size / step_s,
        "flops_per_second": flops / step_s,
        "floor_ms": 1e3 * floor,
        "of_floor": floor / step_s,
        "first_s": first,
        "raw_step_s": taken,
        "raw_device_s": on_device,
    }


def run(bench: Bench, card: Card, options: Any, chosen: Callable[[int], Sequence[Case]], ceilings: Ceilings) -> None:
    """Every case of every model."""
    backend, repeats = open_backend(options.backend, options.device), 6 if options.quick else 16
    for name in options.models:
        if bench.over:
            return
        bench.say(f"{name}: loading {options.weights}")
        try:
            stepper = Stepper(backend, RandomWeights(MODELS[name], options.weights), options.page_size)
        except NO_ROOM as error:
            bench.add(model=name, skipped=f"no room for the weights: {error}"[:200])
            continue
        for case in chosen(stepper.config.max_position):
            if bench.over:
                return
            needed = stepper.room(case.sequences, case.tokens or case.context + 64)
            stepper.memory = None
            if needed > 0.9 * card.free_bytes():
                bench.add(model=name, label=case.label, skipped=f"no room for {needed / 1e9:.1f} GB of KV")
                continue
            bench.say(f"{name}: {case.stroke} {case.label}")
            bench.add(model=name, **measure(card, stepper, case, repeats, ceilings))
        del stepper
        gc.collect()


def table(found: Sequence[dict[str, Any]], ceilings: Ceilings) -> list[str]:
    rows = [
        (c["model"], c["stroke"], c["label"], *(c[key] for key in ("step_ms", "back_to_back_ms", "device_ms")),
         f"{c['outside']:.0%}", c["tokens_per_second"], c["bytes_per_second"] / 1e9, c["flops_per_second"] / 1e12,
         f"{c['of_floor']:.0%}", f"{c['floor_ms'] / c['device_ms']:.0%}")
        for c in found if "step_ms" in c
    ]  # fmt: skip
    head = ("model", "stroke", "case", "step ms", "in a row ms", "device ms", "outside", "tokens/s", "GB/s", "TFLOP/s",
            "of floor", "device of floor")  # fmt: skip
    skipped = [f"Skipped: {c['model']} {c.get('label', '')}: {c['skipped']}" for c in found if "skipped" in c]
    return [
        f"Ceilings: copy {ceilings.bandwidth / 1e9:,.0f} GB/s, bf16 matmul {ceilings.flops / 1e12:,.0f} TFLOP/s",
        *markdown(head, rows),
        *skipped,
    ]


def main() -> None:
    made = parser("strokes", __doc__ or "", ["qwen2.5-0.5b", "llama-3.1-8b"])
    made.add_argument("--only", choices=("decode", "prefill"), help="one stroke alone")
    options = made.parse_args()
    bench, card = Bench("strokes", options, DEFINITIONS), Card(options.device)
    ceilings = card.ceilings(options.quick)
    bench.facts["ceilings"] = asdict(ceilings)

    def chosen(most: int) -> list[Case]:
        if card.on_cpu:
            return [Case(2, 40), Case(tokens=48, chunk=48), Case(tokens=48, chunk=16)]
        return [one for one in cases(options.quick, most) if options.only in (None, one.stroke)]

    run(bench, card, options, chosen, ceilings)
    bench.show(*table(bench.cases, ceilings))


if __name__ == "__main__":
    main()
