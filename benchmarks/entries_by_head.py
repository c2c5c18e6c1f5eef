"""Memory of a value, and time of a token, where heads keep different numbers of entries.

    python -m benchmarks.entries_by_head --model smollm2-135m --tokens 2000

Each budget chooses among the entries of one prompt. Pages are shared by all layers, or each layer has its own
(`kv_groups`). Run it on a quiet machine: it times single tokens, budgets in turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.distances import result
from benchmarks.terminal import command_line, head, row
from twostroke.api.llm import LLM
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.methods import Prompt, method
from twostroke.methods.by_head import ChosenOnce
from twostroke.study.evaluate.tasks.ruler import essay, fill

RATIO, DECODED, ROUNDS = 0.25, 16, 5
BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": ("critical-kv", {"ratio": 1.0}),
    "equal": ("critical-kv", {"ratio": RATIO, "first": 1.0}),
    "ada": ("critical-kv", {"ratio": RATIO, "first": 1.0, "budgets": "ada"}),
    "pyramid": ("critical-kv", {"ratio": RATIO, "first": 1.0, "budgets": "pyramid"}),
    "duo": ("duo-attention", {"retrieval": RATIO}),
}


@dataclass(frozen=True)
class Kept:
    """What a budget keeps: the mean and the most entries of a head, MB of pages, and ms of a token."""

    budget: str
    mean: float
    most: int
    mb: float
    ms: float = 0.0


def kept(llm: LLM, name: str, prompt: Prompt) -> tuple[KVCache, Kept]:
    """The value that a budget decodes from."""
    kind, options = BUDGETS[name]
    chooses = method(kind, **options)
    assert isinstance(chooses, ChosenOnce)

    def program() -> Any:
        kv, stays = yield from chooses.chosen(*chooses.copies(prompt), prompt)
        counts = (stays != NO_ENTRY).sum(-1)
        return chooses.cut(kv, stays), np.atleast_1d(counts)

    kv, counts = result(llm, program)
    size = kv.num_pages * llm.pool.page_bytes / 1e6
    return kv, Kept(name, float(counts.mean()), int(counts.max()), size)


def timed(llm: LLM, kv: KVCache) -> float:
    """Seconds of a token, the median of some."""
    times, began = list[float](), 0.0
    for _ in llm.decode(kv, max_tokens=DECODED, ignore_eos=True):
        now = perf_counter()
        times.append(now - began)
        began = now
    return median(times[2:])


def measured(model: str, tokens: int, kv_groups: str, rounds: int) -> list[Kept]:
    """All budgets, with such pages."""
    with LLM(model, kv_groups=kv_groups, prefix_index="off", max_step_tokens=512) as llm:
        text = " ".join(fill(llm.tokenizer, essay(random.Random(0)), tokens))
        prompt = Prompt(llm.tokenizer.encode(text), llm.tokenizer)
        values = [kept(llm, name, prompt) for name in BUDGETS]
        each = [[timed(llm, kv) for kv, _ in values] for _ in range(rounds)]
        return [replace(one, ms=1e3 * median(ms)) for (_, one), ms in zip(values, zip(*each, strict=True), strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args(arguments)
    print(head(["pages", "budget", "entries of a head", "most", "MB", "ms a token"], 2))
    for kv_groups in ("auto", "layers"):
        for one in measured(asked.model, asked.tokens, kv_groups, asked.rounds):
            print(row([kv_groups, one.budget, f"{one.mean:.0f}", one.most, f"{one.mb:.2f}", f"{one.ms:.2f}"]))


if __name__ == "__main__":
    main()
