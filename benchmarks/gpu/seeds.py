"""The tables of this project's sources, measured on a card: prefill, chunks, batches, and a prompt read twice.

    python3 -m benchmarks.gpu.seeds --models llama-3.1-8b --out seeds.json

The sources' figures (benchmarks/gpu/published.py) are for Llama 70B, which one card does not hold; PTDO's are for
Llama-3.1-8B. Steps go through the calls that the engine makes, as in benchmarks/gpu/strokes.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.bench import Bench, markdown, open_backend, parser
from benchmarks.gpu.card import Card, Ceilings
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.published import BATCH_H100, CHUNKS_A100, PREFILL_A100, PREFILL_H100, REPEATED, TABLES, Published
from benchmarks.gpu.runs import DEFINITIONS as STEPS
from benchmarks.gpu.runs import Runs, timed
from benchmarks.gpu.steps import Part, Stepper
from benchmarks.gpu.strokes import Case, measure
from benchmarks.gpu.weights import RandomWeights

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
CHUNKS = (256, 512, 1024, 2048, 4096)
BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT, ANSWER = 1474, 256  # PTDO's prompts have 193.2 MB of KV: 1,474 entries of 131,072 bytes
ALONG, SHORT = 64, 512  # sequences that decode beside chunks, and entries of each
DEFINITIONS = STEPS | {
    "prefill": "TTFT of a prompt in one pass; TFLOPs by our count",
    "chunks": "a prompt of 4,096 tokens in chunks, beside 64 sequences that decode after 512 entries: TTFT is the sum "
    "of its steps, TBT the longest step, tokens/s all tokens of its steps / TTFT",
    "batch": "a decode step by number of sequences",
    "repeated": "P, P P and PTDO: prefill_s of one prompt; decode at batch 1, and at as many sequences as the card "
    "holds (in 85% of what is free beside the weights, at most 512); total = n x 256 / (n x prefill_s + 256 x step), "
    "computed from these",
}


class Tables:
    """Measures one model's tables."""

    def __init__(self, bench: Bench, card: Card, stepper: Stepper, ceilings: Ceilings, model: str, quick: bool) -> None:
        self.bench, self.card, self.stepper, self.ceilings, self.model = bench, card, stepper, ceilings, model
        self.quick, self.repeats = quick, 5 if quick else 12

    def fits(self, sequences: int, entries: int) -> bool:
        """Whether the memory has room for their KV; if not, the results say so."""
        if sequences * self.stepper.pages(entries) <= self.stepper.num_pages:
            return True
        self.bench.add(model=self.model, table="skipped", what=f"{sequences} x {entries:,} entries")
        return False

    def each(self, cases: Iterable[int]) -> Iterable[int]:
        """The cases, while there is time."""
        return (one for one in cases if not self.bench.over)

    def case(self, table: str, case: Case) -> None:
        self.bench.say(f"{table}: {case.label}")
        with self.bench.guarded(model=self.model, table="failed", label=f"{table} {case.label}"):
            self.bench.add(
                model=self.model, table=table, **measure(self.card, self.stepper, case, self.repeats, self.ceilings)
            )

    def prefill(self) -> None:
        for tokens in self.each(LENGTHS[::2] if self.quick else LENGTHS):
            if tokens <= self.stepper.config.max_position:
                self.case("prefill", Case(tokens=tokens, chunk=tokens))

    def batches(self) -> None:
        for context, batches in ((1024, BATCHES), (4096, BATCHES[:4])):
            for batch in self.each(batches[1::2] if self.quick else batches):
                if self.fits(batch, context + 64):
                    self.case("batch", Case(batch, context))

    def chunks(self, prompt: int = 4096, along: int = ALONG) -> None:
        stepper = self.stepper
        for chunk in self.each(CHUNKS[1::2] if self.quick else CHUNKS):
            chunk = min(chunk, prompt)
            if not self.fits(along + 1, max(prompt, SHORT)):
                return
            self.bench.say(f"chunks of {chunk}")
            frames = stepper.sequences(along + 1, max(prompt, SHORT))
            others = [Part(f, SHORT - 1, 1) for f in frames[1:]]
            parts = [Part(frames[0], at, chunk, at + chunk == prompt) for at in range(0, prompt, chunk)]
            runs = Runs(stepper, [[[*others, part]] for part in parts], follows=False)
            for _ in range(2):
                self.card.wall(runs.step, len(parts))
            steps = self.card.wall(runs.step, len(parts))
            self.bench.add(
                model=self.model, table="chunks", chunk=chunk, ttft_ms=1e3 * sum(steps), tbt_ms=1e3 * max(steps),
                tokens_per_second=(prompt + along * len(parts)) / sum(steps), raw_step_s=steps,
            )  # fmt: skip

    def repeated(self, prompt: int = PROMPT, answer: int = ANSWER) -> None:
        """Decode after what each of the three ways keeps: entries, and the position of the first."""
        for name, read, kept, first in (("P", 1, 1, 0), ("P P", 2, 2, 0), ("PTDO", 2, 1, prompt)):
            if self.bench.over:
                return
            self.bench.say(f"repeated: {name}")
            whole = Case(tokens=read * prompt, chunk=read * prompt)
            prefill_s = measure(self.card, self.stepper, whole, self.repeats, self.ceilings)["step_ms"] / 1e3
            entries = kept * prompt + answer
            room = self.stepper.num_pages // self.stepper.pages(entries)
            found: dict[str, Any] = {}
            for label, count in (("alone", 1), ("full", min(room, 512))):
                frames = self.stepper.sequences(count, entries)
                middle = kept * prompt + answer // 2
                steps = [[[Part(f, middle + i, 1, first=first) for f in frames]] for i in range(min(16, answer // 2))]
                figures = timed(self.card, Runs(self.stepper, steps, follows=True), self.repeats, self.ceilings)
                step_s = figures["step_ms"] / 1e3
                found[label] = figures | {
                    "sequences": count,
                    "decode_per_second": count / step_s,
                    "total_per_second": count * answer / (count * prefill_s + answer * step_s),
                }
            entry_mb = self.stepper.entry_bytes / 1e6
            self.bench.add(model=self.model, table="repeated", name=name, kv_mb=kept * prompt * entry_mb,
                           prefill_s=prefill_s, **found)  # fmt: skip


def beside(published: Published, key: object) -> list[object]:
    """The published figures of a row; empty cells if there is none."""
    return list(published.rows.get(str(key), ("",) * len(published.columns)))


def tables(found: list[dict[str, Any]]) -> list[str]:
    """Our figures, and behind them those of the sources."""

    def rows(table: str, make: Callable[[dict[str, Any]], list[object]]) -> list[list[object]]:
        return [[one["model"], *make(one)] for one in found if one["table"] == table]

    def prefill(one: dict[str, Any]) -> list[object]:
        tokens = one["tokens"]
        ours = [tokens, one["step_ms"], one["flops"] / 1e12, one["flops_per_second"] / 1e12, f"{one['of_floor']:.0%}"]
        return [*ours, *beside(PREFILL_A100, tokens), *beside(PREFILL_H100, tokens)]

    def chunks(one: dict[str, Any]) -> list[object]:
        ours = [one["chunk"], one["ttft_ms"], one["tbt_ms"], one["tokens_per_second"]]
        return [*ours, *beside(CHUNKS_A100, one["chunk"])[:3]]

    def batch(one: dict[str, Any]) -> list[object]:
        ours = [one["context"], one["sequences"], one["bytes"] / 1e9, one["intensity"], one["step_ms"],
                one["tokens_per_second"], f"{one['of_floor']:.0%}"]  # fmt: skip
        return [*ours, *beside(BATCH_H100, one["sequences"] if one["context"] == 4096 else None)]

    def repeated(one: dict[str, Any]) -> list[object]:
        full, alone = one["full"], one["alone"]
        ours = [one["name"], one["kv_mb"], one["prefill_s"], alone["decode_per_second"], full["sequences"],
                full["decode_per_second"], full["total_per_second"]]  # fmt: skip
        return [*ours, *beside(REPEATED, one["name"])[:3]]

    a100, h100 = "70B A100", "70B H100"
    parts: list[tuple[str, tuple[str, ...], Callable[[dict[str, Any]], list[object]]]] = [
        ("prefill", ("tokens", "ms", "TFLOPs", "TFLOP/s", "of floor", f"{a100}: ms", "TTFT", "TFLOPs", f"{h100}: ms"),
         prefill),
        ("chunks", ("chunk", "TTFT ms", "TBT ms", "tokens/s", f"{a100}: TTFT", "TBT", "tokens/s"), chunks),
        ("batch", ("context", "sequences", "GB", "intensity", "ms", "tokens/s", "of floor", f"{h100}: GB", "intensity",
                   "ms", "tokens/s"), batch),
        ("repeated", ("kept", "KV MB", "prefill s", "alone tok/s", "sequences", "decode tok/s", "total tok/s",
                      "paper: KV MB", "decode tok/s", "total tok/s"), repeated),
    ]  # fmt: skip
    lines = list[str]()
    for name, head, make in parts:
        if made := rows(name, make):
            lines += [f"**{name}**", *markdown(("model", *head), made), ""]
    return lines + [f"Skipped: no room for {one['what']}" for one in found if one["table"] == "skipped"]


def main() -> None:
    made = parser("seeds", __doc__ or "", ["llama-3.1-8b"])
    every = ("prefill", "batches", "chunks", "repeated")
    made.add_argument("--only", nargs="+", choices=every, default=list(every), help="some of the tables")
    options = made.parse_args()
    bench, card = Bench("seeds", options, DEFINITIONS), Card(options.device)
    backend, ceilings = open_backend(options.backend, options.device), card.ceilings(options.quick)
    bench.facts |= {"ceilings": asdict(ceilings), "published": [asdict(table) for table in TABLES]}
    for name in options.models:
        bench.say(f"{name}: loading")
        stepper = Stepper(backend, RandomWeights(MODELS[name], options.weights), options.page_size)
        share = 0.01 if card.on_cpu else 0.85  # the rest is for what a pass needs
        stepper.reserve(int(share * card.free_bytes()) // stepper.page_bytes)
        found = Tables(bench, card, stepper, ceilings, name, options.quick)
        if card.on_cpu:
            found.case("prefill", Case(tokens=48, chunk=48))
            found.case("batch", Case(2, 40))
            found.chunks(prompt=64, along=2)
            found.repeated(prompt=24, answer=8)
        else:
            for table in options.only:
                with bench.guarded(model=name, table="failed", label=table):
                    getattr(found, table)()
        del stepper, found
        gc.collect()
    bench.show(*tables(bench.cases))


if __name__ == "__main__":
    main()
