"""The cost of resuming a preempted request, by replay or by copying its pages, and of page names in a step.

    python -m benchmarks.page_tiers --model smollm2-135m

A request of each technique is preempted in the middle of its answer, and resumed in three ways. *Cold*: it is replayed
and everything is computed. *Indexed*: it is replayed and finds its prefills in the prefix index, whose pages stayed in
the pool, so that this is a lower bound for a tier behind the index. *Copied*: its pages are copied back from ordinary
memory, as `PagePool.fetch` does.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.methods import Method, Plain, method
from twostroke.sampling.params import SamplingParams
from twostroke.study.bench.latency import BatchShape, PromptSource

DEFINITIONS = {
    "cold_s": "from the preemption to the next token, minus a step, with an empty prefix index; the least",
    "indexed_s": "the same with a prefix index that kept every canonical page",
    "copied_s": "time to copy the request's pages back into the pool; the least",
    "bytes": "of these pages",
    "others_cpu": "processor time of everything else on the machine during a technique's turns / wall time",
    "frames_us": "time to translate the span tables of a step from pages to frames; the least",
}
SPANS = 250  # spans of each sequence in a step


@dataclass(frozen=True)
class Turn:
    """One technique, as in `DEFINITIONS`."""

    technique: str
    cold_s: float
    indexed_s: float
    copied_s: float
    bytes: int
    others_cpu: float


def techniques(prompt: int) -> dict[str, Method]:
    """Techniques with different values: canonical, sliced, handed over, evicted, and rolled back."""
    budget = max(16, prompt // 4)
    return {
        "plain": Plain(),
        "repeat": method("repeat", sinks=4),
        "refresh": method("refresh", every=16),
        "drop": method("drop", window=budget),
        "snap": method("snap", budget=budget, window=min(32, budget - 1)),
        "speculative": method("speculative"),
    }


def measure(llms: tuple[LLM, LLM], name: str, chosen: Method, prompt: int, output: int, rounds: int) -> Turn:
    """The least over some rounds. `llms`: without a prefix index, and with one."""
    others, cold, indexed, copied, held = Others(), list[float](), list[float](), list[float](), 0
    for number in range(rounds):
        for llm, seconds in zip(llms, (cold, indexed), strict=True):
            request, step = started(llm, chosen, prompt, output, number)
            if llm is llms[0]:
                held, took = copying(llm)
                copied.append(took)
            seconds.append(max(0.0, replaying(llm, request) - step))
            llm.engine.cancel(request)
            if llm.model.index is not None:
                llm.model.index.clear()
    return Turn(name, min(cold), min(indexed), min(copied), held, others.cpu)


def started(llm: LLM, chosen: Method, prompt: int, output: int, number: int) -> tuple[Request, float]:
    """(a request in the middle of its answer, seconds per step)."""
    (tokens,) = PromptSource().make(llm, BatchShape(prompt, output, 1), number)
    request = llm.request(tokens, SamplingParams(max_tokens=output, ignore_eos=True), chosen)
    llm.engine.submit(request)
    steps = list[float]()
    while len(request.events) < output // 2:
        began = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - began)
    return request, median(steps)


def copying(llm: LLM) -> tuple[int, float]:
    """(bytes of all pages in use, seconds to copy them back)."""
    pool = llm.pool
    frames = sorted(set(range(pool.num_pages)) - set(pool.frames._free))
    away = [np.frombuffer(page, np.uint8).copy() for page in pool.memory.read_pages(frames)]
    began = time.perf_counter()
    for frame, page in zip(frames, away, strict=True):
        pool.memory.write_page(frame, page.data)
    return len(frames) * pool.page_bytes, time.perf_counter() - began


def replaying(llm: LLM, request: Request) -> float:
    """Seconds from a preemption to the next token."""
    count = len(request.events)
    llm.engine._placement.preempt(request.choices[0])
    began = time.perf_counter()
    while len(request.events) == count:
        llm.engine.step()
    return time.perf_counter() - began


def translation(llm: LLM, sequences: int, rounds: int) -> float:
    """Microseconds to find the frames of a step in which sequences of `SPANS` pages decode."""
    pages = np.array(llm.pool.allocate(SPANS))
    table = np.zeros((SPANS, 4), np.int32)
    table[:, 0], table[:, 2] = pages, llm.pool.page_size
    tables, best = [table] * sequences, float("inf")
    for _ in range(200 * rounds):
        began = time.perf_counter()
        llm.pool.step_tables(tables)
        best = min(best, time.perf_counter() - began)
    llm.pool.release(pages)
    return 1e6 * best


def report(model: str, prompt: int, output: int, turns: list[Turn], frames_us: dict[int, float]) -> str:
    """A Markdown table."""
    lines = [
        f"**{model}**: preempted after {prompt} prompt tokens and {output // 2} of the answer; the least of each",
        "",
        "| technique | replayed cold ms | replayed, prefills indexed ms | pages copied back ms | MB |",
        "|---|--:|--:|--:|--:|",
    ]
    for turn in turns:
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (turn.cold_s, turn.indexed_s, turn.copied_s))
        lines.append(f"| {turn.technique} | {times} | {turn.bytes / 1e6:.1f} |")
    each = ", ".join(f"{us:.1f} us for {count}" for count, us in frames_us.items())
    lines += ["", f"Pages to frames, sequences of {SPANS} pages: {each}.", ""]
    return "\n".join([*lines, *doubt([turn.others_cpu for turn in turns])])


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of resuming a preempted request.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the least of (default 5)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--output", type=int, default=256, help="tokens; stopped after half of them (default 256)")
    parser.add_argument("--quick", action="store_true", help="one round of short prompts, to test the script")
    options = parser.parse_args()
    prompt, output, rounds = options.prompt, options.output, options.rounds
    if options.quick:
        prompt, output, rounds = 64, 24, 1
    llms = tuple(LLM(options.model, student="int4", prefix_index=index) for index in ("off", "radix"))
    turns = [
        measure((llms[0], llms[1]), name, chosen, prompt, output, rounds) for name, chosen in techniques(prompt).items()
    ]
    frames_us = {count: translation(llms[0], count, rounds) for count in (1, 8)}
    print(report(options.model, prompt, output, turns, frames_us))
    if not options.quick:
        facts = {"prompt": prompt, "output": output, "turns": [asdict(turn) for turn in turns], "frames_us": frames_us}
        print(save("page-tiers", DEFINITIONS, options.model, facts), file=sys.stderr)


if __name__ == "__main__":
    main()
