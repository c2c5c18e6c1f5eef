"""KV refresh by gate and by student, at the same number of refreshes: answers judged, and KL to the teacher. Resumable.

    python -m benchmarks.refresh --students int2 pruned --minutes 60

Gates look every 16 tokens. On a few of the questions each gate's looks (variance of the student's logits under dropout,
KL of a probe) are noted without a refresh; its threshold is the percentile at which one of four looks refreshes, once
in 64 tokens as the periodic gate does. Then every policy is led through the teacher's own answers, and answers itself
(Emara et al. 2025: 1,200 tokens). "pruned" is made first, with `twostroke prune --distill`. The same command goes on
where the last one stopped; with `--minutes 0` the page (docs/results/refresh-students.md) alone is made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.eval_runs import (
    Summary,
    difference,
    estimate,
    file_name,
    made_on,
    share_minutes,
    shown,
    summaries,
    words,
    write_page,
)
from benchmarks.results_file import RESULTS, save
from benchmarks.terminal import command_line, markdown, say
from twostroke.study.evaluate.wikipedia import articles

EVERY, LOOKS = 16, 4  # tokens between looks, and looks between refreshes
POLICIES = (
    "teacher", "student", "overfill", "refresh:every=256", "refresh:every=64", "refresh:every=16",
    "refresh:every=8,window=8", f"refresh:when=budget,every={EVERY},budget={1000 / EVERY / LOOKS:g}",
)  # fmt: skip
GATES = ("mc-dropout", "probe")
NEVER = 1e9  # a threshold that no look exceeds
MEASURES = {"judged": "answers,judge", "led": "divergence"}
HEADER = (
    "policy", "KL to the teacher from token 2 (95%)", "less OverFill's (paired)", "likeliest the same",
    "teacher perplexity (95%)", "tail log p", "repetition@3", "refreshes", "teacher tokens", "tokens",
)  # fmt: skip
INTRODUCTION = """# Refresh: worse students, and the gate by MC dropout

Made by `python -m benchmarks.refresh`. [OverFill and refresh](refresh.md) has the published figures and a \
student that is close to its teacher.

Every gate that looks does so every 16 tokens, and its threshold lets one look of four refresh on a few of the \
questions: so policies are compared at about the refreshes of every 64 tokens (the column says how many it was). KL: \
each policy is led through the teacher's own greedy answers. The rest is of the policy's own answers, temperature 0.7, \
end tokens ignored. 95%: bootstrap over questions.

**What this cannot see.** Whether an answer is good: perplexity under the teacher falls with dullness, so a loop \
scores well. Answers that go on behind their end are no answers. One seed of sampling.
"""


def run(model: str, student: str, methods: str, minutes: float | None, output: Path, **changes: Any) -> list[str]:
    """A run of `eval longform`, without timings."""
    asked = {"model": model, "student": student, "methods": methods, "minutes": minutes, "output": output} | changes
    return words(["eval", "longform"], asked, "--no-timings", "--ignore-eos")


def thresholds(directory: Path) -> dict[str, float]:
    """Of each gate: what one look of `LOOKS` exceeds. Raises FileNotFoundError if none was noted."""
    looks: dict[str, list[float]] = {}
    for line in (directory / "items.jsonl").read_text().splitlines():
        for method, record in json.loads(line)["measures"]["answers"].items():
            looks.setdefault(method.split(",")[0], []).extend(record["facts"]["looks"])
    found = {gate: np.array(looks[f"refresh:when={gate}"]) for gate in GATES}
    return {gate: float(f"{np.quantile(ones, 1 - 1 / LOOKS):.4g}") for gate, ones in found.items()}


def never(gate: str) -> str:
    return f"refresh:when={gate},every={EVERY},threshold={NEVER:g}"


def policies(directory: Path) -> str:
    gates = thresholds(directory / "looks")
    return ",".join((*POLICIES, *(f"refresh:when={g},every={EVERY},threshold={gates[g]:g}" for g in GATES)))


def steps(options: argparse.Namespace, student: str) -> dict[str, Callable[[float], list[str]]]:
    """Commands of a student, in order: make it, note looks, and the runs of both kinds."""
    directory: Path = options.output / f"{file_name(options.model)}-{student}"
    made, tokens = directory / "student", options.tokens
    name = str(made) if student == "pruned" else student
    asked = {"threads": options.threads, "max-tokens": tokens}
    found: dict[str, Callable[[float], list[str]]] = {}
    if student == "pruned" and not (made / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "text.txt").write_text("\n\n".join(articles())[:400_000])
        given = {"calibration": directory / "text.txt", "distill": options.distill}
        found[f"{student}, pruning"] = lambda _: words(["prune", options.model, str(made)], given)
    looking = asked | {"max-tokens": min(256, tokens), "limit": options.looked, "seed": 1, "measure": "answers"}
    methods = ",".join(never(gate) for gate in GATES)
    found[f"{student}, looks"] = lambda _: run(options.model, name, methods, None, directory / "looks", **looking)

    def evaluated(measured: str, minutes: float) -> list[str]:
        batch = {"judged": 8, "led": 1}[measured]  # of led ones, logits of every token are held
        rest = {"measure": MEASURES[measured], "limit": options.items, "batch": batch, "positions": tokens}
        rest |= {"temperature": 0.7, "baseline": "overfill"} if measured == "judged" else {"baseline": "teacher"}
        return run(options.model, name, policies(directory), minutes, directory / measured, **asked, **rest)

    return found | {f"{student}, {one}": partial(evaluated, one) for one in reversed(MEASURES)}


def rows(judged: Summary | None, led: Summary | None) -> list[list[str]]:
    """A row for each policy, in order."""
    names = [one["name"] for one in (led or judged or {})["settings"]["methods"]]
    made: list[list[str]] = []
    for name in names:
        less = ""
        if led is not None and name not in ("teacher", "overfill"):
            value, low, high, _ = difference(led, "divergence", "kl_rest", "overfill", name)
            less = f"{value:.3f} [{low:.3f}, {high:.3f}]"
        made.append(
            [
                f"`{name}`", shown(estimate(led, "divergence", "kl_rest", name), ".3f", bounds=True), less,
                shown(estimate(led, "divergence", "top1_rest", name), ".1f", 100),
                shown(estimate(judged, "judge", "judge_perplexity", name), ".2f", bounds=True),
                shown(estimate(judged, "judge", "judge_tail", name), ".2f"),
                shown(estimate(judged, "judge", "repetition3", name), ".1f", 100),
                shown(estimate(judged, "answers", "refreshes", name), ".1f"),
                shown(estimate(judged, "answers", "teacher_tokens", name), ".0f"),
                shown(estimate(judged, "answers", "output_tokens", name), ".0f"),
            ]
        )  # fmt: skip
    return made


def write(directory: Path, page: Path) -> Path:
    """Write the page of all students that have a summary, and their numbers."""
    parts: list[str] = []
    for own in sorted(directory.glob("*")):
        known = summaries(own, *MEASURES)
        if not known:
            continue
        summary = next(iter(known.values()))
        counts = ", ".join(f"{one['n']} questions {name}" for name, one in known.items())
        tokens = summary["settings"]["max_tokens"]
        about = f"{counts}; {tokens:,} tokens; {made_on(summary)}"
        made = rows(known.get("judged"), known.get("led"))
        parts += [f"## {own.name}", about, markdown(HEADER, made)]
        save("refresh", {"rows": ", ".join(HEADER)}, own.name, {"tokens": tokens, "about": about, "rows": made})
    return write_page(page, directory, INTRODUCTION, parts)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--students", nargs="+", default=["int2"], help="int4, int3, int2, pruned (default int2)")
    parser.add_argument("--minutes", type=float, default=60, help="of all students together (default 60)")
    parser.add_argument("--items", type=int, default=64, help="most questions, 64 are there (default 64)")
    parser.add_argument("--tokens", type=int, default=1200, help="of an answer (default 1200)")
    parser.add_argument("--looked", type=int, default=4, help="questions by which thresholds are set (default 4)")
    parser.add_argument("--distill", type=int, default=200, help="steps of the pruned student (default 200)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=RESULTS / "refresh", help="where runs are kept")
    parser.add_argument("--page", type=Path, default=Path("docs/results/refresh-students.md"))
    options = parser.parse_args()
    every = [steps(options, student) for student in options.students]
    share_minutes({name: step for one in every for name, step in one.items()}, options.minutes)
    say(write(options.output, options.page))


if __name__ == "__main__":
    main()
