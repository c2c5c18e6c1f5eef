"""Both strokes on a GPU, through the calls that the engine makes, against what the card can do.

    python3 -m benchmarks.gpu.strokes --models llama-3.1-8b --out strokes.json

A step is `CompiledModel.forward` and `sample`. It is timed in three ways: until its tokens are read, as the engine
does it; back to back, where each step takes the tokens of the one before on the device; and on the device alone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.bench import Bench, figures, open_backend, parser
from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.runs import DEFINITIONS, Runs, Step, timed
from benchmarks.gpu.steps import Part, Stepper
from benchmarks.gpu.weights import RandomWeights
from twostroke.backends.interface import Backend
from twostroke.models.kv_formats import KV_FORMATS

LONGEST = 8  # kernels that are printed of each case
DECODED = 64  # steps of growing context, taken in turn


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
    return [one for one in [*decodes, *prefills, *chunks] if max(one.context + DECODED, one.tokens) <= most]


def steps_of(stepper: Stepper, case: Case) -> list[Step]:
    """Decode steps of growing context; or one prefill, of as many passes as it has chunks."""
    if not case.tokens:
        frames = stepper.sequences(case.sequences, case.context + DECODED)
        return [[[Part(f, case.context + i, 1) for f in frames]] for i in range(DECODED)]
    (frames,) = stepper.sequences(1, case.tokens)
    starts = range(0, case.tokens, case.chunk)
    counts = [min(case.chunk, case.tokens - start) for start in starts]
    ends = [start + count == case.tokens for start, count in zip(starts, counts, strict=True)]
    return [[[Part(frames, *part)] for part in zip(starts, counts, ends, strict=True)]]


def measure(
    card: Card, stepper: Stepper, case: Case, repeats: int, ceilings: Ceilings, profile: bool = False
) -> dict[str, Any]:
    """Time one case; with `profile`, also its kernels (`Card.kernels`)."""
    runs = Runs(stepper, steps_of(stepper, case), follows=not case.tokens)
    figures = timed(card, runs, repeats, ceilings)
    rate = {"tokens_per_second": 1e3 * case.made / figures["step_ms"]}
    if profile:
        figures["kernels"] = card.kernels(runs.launch, 3)
    return asdict(case) | {"stroke": case.stroke, "label": case.label} | figures | rate


def run(bench: Bench, card: Card, options: Any, chosen: Callable[[int], Sequence[Case]], ceilings: Ceilings) -> None:
    """Every case of every model."""
    backend = open_backend(options.backend, options.device, options.kv_dtype)
    for name in options.models:
        if bench.over:
            return
        bench.say(f"{name}: loading {options.weights}")
        with bench.guarded(model=name):
            of_model(bench, card, options, backend, chosen(MODELS[name].max_position), ceilings, name)
        gc.collect()


def of_model(
    bench: Bench, card: Card, options: Any, backend: Backend, asked: Sequence[Case], ceilings: Ceilings, name: str
) -> None:
    """One model's cases, in one memory; those that do not fit are said to be skipped."""
    stepper = Stepper(backend, RandomWeights(MODELS[name], options.weights), options.page_size)
    needed = [case.sequences * stepper.pages(case.tokens or case.context + DECODED) for case in asked]
    room = int(0.85 * card.free_bytes()) // stepper.page_bytes
    stepper.reserve(max(pages for pages in needed if pages <= room))
    for case, pages in zip(asked, needed, strict=True):
        if bench.over:
            return
        if pages > room:
            size = pages * stepper.page_bytes
            bench.add(model=name, label=case.label, skipped=f"no room for {size / 1e9:.1f} GB of KV")
            continue
        bench.say(f"{name}: {case.stroke} {case.label}")
        with bench.guarded(model=name, label=case.label):
            found = measure(card, stepper, case, 6 if options.quick else 16, ceilings, options.profile)
            bench.add(model=name, **found)


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
    kernels = [
        f"{c['model']} {c['stroke']} {c['label']}: {ms:.3f} ms in {count:.0f} x {name[:60]}"
        for c in found
        for name, ms, count in c.get("kernels", [])[:LONGEST]
    ]
    return [
        *kernels,
        f"Ceilings: copy {ceilings.bandwidth / 1e9:,.0f} GB/s, bf16 matmul {ceilings.flops / 1e12:,.0f} TFLOP/s",
        figures(head, rows),
        *skipped,
    ]


def main() -> None:
    made = parser("strokes", __doc__ or "", ["qwen2.5-0.5b", "llama-3.1-8b"])
    made.add_argument("--only", choices=("decode", "prefill"), help="one stroke alone")
    made.add_argument("--profile", action="store_true", help="also the time of every kernel, by PyTorch's profiler")
    made.add_argument("--kv-dtype", choices=KV_FORMATS, default="bfloat16", help="of K and V")
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
