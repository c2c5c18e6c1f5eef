"""The page of the league: a table and a plot for each cell, and which published claims hold in it."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.eval_runs import Summary, difference, estimate, made_on, shown, summaries, write_page
from benchmarks.results_file import save
from benchmarks.terminal import markdown
from twostroke.methods.drop import Drop

MIN_ITEMS = 10  # with fewer, no claim is judged
# What is claimed to be better than what, each by the first words of its name in a run, and by whom.
CLAIMS = (
    ("What the end attends to beats the newest entries (SnapKV, Li et al. 2024)", "snapkv-by-head", "streaming"),
    ("Choice by head beats choice per sequence (papers of H2O and SnapKV)", "snapkv-by-head", "snapkv"),
    ("Whole chunks beat single entries (ChunkKV, Liu et al. 2025)", "chunkkv", "snapkv-by-head"),
    ("The output matrix improves the choice (CriticalKV, Feng et al. 2025)", "critical-kv", "snapkv-by-head"),
    ("Budgets by head improve KVzip (Ada-KV, Feng et al. 2024)", "kvzip:budgets=ada", "kvzip"),
    ("Budgets by head improve CriticalKV (Ada-KV)", "critical-kv:budgets=ada", "critical-kv"),
    ("Expected Attention beats SnapKV (Devoto et al. 2025)", "expected-attention", "snapkv-by-head"),
    ("Expected Attention beats TOVA (Devoto et al. 2025)", "expected-attention", "tova"),
    ("Heavy hitters beat the newest entries (H2O, Zhang et al. 2023)", "heavy-hitters", "streaming"),
    ("Merging improves H2O (D2O, Wan et al. 2024)", "d2o", "heavy-hitters"),
    ("Choice for any question beats that of the prompt's end (KVzip, Kim et al. 2025)", "kvzip", "snapkv-by-head"),
    ("Similar keys may go, rather than old ones (KeyDiff, Park et al. 2025)", "keydiff", "streaming"),
    ("Norms of keys are enough (Devoto et al. 2024)", "key-norms", "streaming"),
    ("Fitted entries beat chosen ones (Zweiger et al. 2026)", "attention-matching", "snapkv-by-head"),
    ("Few heads retrieve (DuoAttention, Xiao et al. 2024)", "duo-attention", "streaming"),
)  # fmt: skip
BUDGETS = ("ratio=", "budget=", "window=")
COLUMNS = {
    "right": ("answers", "correct"), "KL": ("divergence", "kl_rest"), "same": ("divergence", "exact"),
    "kept": ("answers", "kept_ratio"), "bytes": ("answers", "kept_bytes"), "TTFT": ("serving", "ttft_alone_s"),
    "ITL 1": ("serving", "itl_1_s"), "ITL 16": ("serving", "itl_16_s"), "answers": ("serving", "answers_at_once"),
    "rate": ("serving", "full_rate"),
}  # fmt: skip
HEADER = (
    "technique", "right (95%)", "points to plain's, p", "KL, nats (95%)", "same", "KV kept", "MiB", "TTFT, s",
    "ITL of 1, ms", "ITL of 16, ms", "answers in the pool", "tokens/s, full pool",
)  # fmt: skip
INTRODUCTION = """# The league: right answers, bytes and times

Made by `python -m benchmarks.league` of the cells that were run; [the league](../league.md) says what it means.

Right: all that was asked for is in the answer; in brackets 95%, Wilson. Points: the share of right answers less that \
of everything kept, with McNemar's exact p on the same items. KL: from the second token of the full cache's own answer \
on, the bootstrap over items. Same: answers in which each token of the full cache's stays the likeliest. KV kept and \
MiB are of the pages that the first decode starts from. Times are of one item, with nothing else running (times of \
choosing included in TTFT), and decodes of 32 tokens of copies of its value, 16 at once and as many as the pool has \
room for.

**What this cannot see.** Questions over documents are [made by rule](../evaluation.md#which-tasks-are-there); small \
models fail at several kinds whatever is kept, and then right answers cannot tell techniques apart: KL can, but not \
whether the answer is worse. One order of items, greedy answers, one machine. No correction is made for the number of \
comparisons. Claims are of models of 7B and more; what small ones show refutes nothing there.
"""


def rows(summaries: dict[str, Summary]) -> list[list[str]]:
    """A row for each technique: the most right answers first, then the least KL."""
    quality = summaries["quality"]
    baseline = quality["settings"]["baseline"]

    def of(column: str, method: str) -> dict[str, Any]:
        measure, key = COLUMNS[column]
        return estimate(summaries.get("serving" if measure == "serving" else "quality"), measure, key, method)

    def rank(method: str) -> tuple[float, float]:
        return -of("right", method).get("value", 0.0), of("KL", method).get("value", 9e9)

    made: list[list[str]] = []
    for method in sorted((one["name"] for one in quality["settings"]["methods"]), key=rank):
        points = ""
        if method != baseline:
            value, _, _, p = difference(quality, *COLUMNS["right"], method, baseline)
            points = f"{100 * value:+.0f}, {p:.2g}"
        made.append(
            [
                f"`{method}`", shown(of("right", method), ".0f", 100, True), points,
                shown(of("KL", method), ".2f", bounds=True), shown(of("same", method), ".0f", 100),
                shown(of("kept", method), ".2f"), shown(of("bytes", method), ".1f", 2**-20),
                shown(of("TTFT", method), ".2f"), shown(of("ITL 1", method), ".1f", 1e3),
                shown(of("ITL 16", method), ".1f", 1e3), shown(of("answers", method), ".0f"),
                shown(of("rate", method), ".0f"),
            ]
        )  # fmt: skip
    return made


def base(method: str) -> str:
    """The name without its budget: "critical-kv:budgets=ada,ratio=0.25" is "critical-kv:budgets=ada"."""
    name, _, parameters = method.partition(":")
    others = [one for one in parameters.split(",") if one and not one.startswith(BUDGETS)]
    return f"{name}:{','.join(others)}" if others else name


def share(method: str, length: int) -> float | None:
    """The part of a prompt that a method is to keep, as its name says; None where it says nothing."""
    given = dict(one.split("=") for one in method.partition(":")[2].split(",") if one.startswith(BUDGETS))
    if "window" in given:
        return (int(given["window"]) + Drop().sinks) / length
    return float(given["ratio"]) if "ratio" in given else int(given["budget"]) / length if given else None


def judged(quality: Summary, better: str, worse: str) -> list[str]:
    """Whether the first is better than the second here, at each budget that both have. Empty if one was not run."""
    settings = quality["settings"]
    names, length = [one["name"] for one in settings["methods"]], settings["task"]["parameters"]["length"]
    shares = {name: share(name, length) for name in names}
    made: list[str] = []
    for first, second in product(names, names):
        parts = {one for one in (shares[first], shares[second]) if one is not None}  # one may have no budget
        if (base(first), base(second)) != (better, worse) or len(parts) > 1:
            continue
        at = "".join(f"{100 * part:.0f}% kept: " for part in parts)
        kl, low, high, _ = difference(quality, *COLUMNS["KL"], first, second)
        right, _, _, p = difference(quality, *COLUMNS["right"], first, second)
        verdict = "**holds**" if high < 0 else "**contradicted**" if low > 0 else "within chance"
        if p is not None and p < 0.05:
            verdict += f"; right answers {'agree' if (right > 0) == (kl < 0) else 'say the opposite'}"
        verdict = "too few items" if quality["n"] < MIN_ITEMS else verdict
        made.append(f"{at}{verdict}: KL {kl:+.2f} [{low:+.2f}, {high:+.2f}], {100 * right:+.0f} points (p {p:.2g})")
    return made


def write(directory: Path, page: Path) -> Path:
    """Write the page of all cells with a summary of their quality, their plots in ../images, and their numbers."""
    parts, verdicts = list[str](), list[str]()
    for cell in sorted(path.parent.parent for path in directory.glob("*/quality/summary.json")):
        found = summaries(cell, "quality", "serving")
        quality, made = found["quality"], rows(found)
        settings = quality["settings"]
        task = settings["task"]
        title = f"{settings['model']}: {task['name']}, {task['parameters']['length']:,} tokens"
        about = (
            f"`{task['name']}`, all kinds in turn, items: {quality['n']}, seed {settings['seed']}; "
            f"greedy, at most {settings['max_tokens']} tokens; {made_on(quality)}"
        )
        parts += [f"## {title}", about, markdown(HEADER, made)]
        if (plot := cell / "quality" / "plot.svg").exists():
            image = page.parent.parent / "images" / f"league-{cell.name}.svg"
            image.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(plot, image)
            parts.append(f"![Right answers over the KV that is kept](../images/{image.name})")
        lines = [(claim, "; ".join(told)) for claim, *pair in CLAIMS if (told := judged(quality, *pair))]
        verdicts += [f"### {title}", markdown(("claim", "here"), lines, words=2)] if lines else []
        save("league", {"rows": ", ".join(HEADER)}, cell.name, {"n": quality["n"], "rows": made, "claims": lines})
    closing = ["## Which published claims hold?", "KL and points: of the first technique less the second."]
    return write_page(page, directory, INTRODUCTION, [*parts, *(closing if verdicts else []), *verdicts])
