"""The league of cells: commands of `eval`, and the page made of their summaries."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import league_page, refresh
from benchmarks.league import SLOW, Cell

NAMES = ["plain", "streaming:window=96", "snapkv-by-head:budget=100", "duo-attention"]
RIGHT = dict(zip(NAMES, (0.9, 0.3, 0.7, 0.9), strict=True))
KL = dict(zip(NAMES, (0.0, 0.5, 0.2, 0.1), strict=True))


def metric(values: dict[str, float], pairs: bool = True) -> dict[str, Any]:
    """A metric's part of a summary, with intervals of 0.1 on both sides."""

    def one(value: float) -> dict[str, Any]:
        return {"n": 20, "value": value, "low": value - 0.1, "high": value + 0.1}

    both = [(a, b) for i, a in enumerate(NAMES) for b in NAMES[i + 1 :]] if pairs else []
    made = [{"first": a, "second": b, "difference": one(values[b] - values[a]), "p": 0.01} for a, b in both]
    return {"methods": {name: one(value) for name, value in values.items()}, "pairs": made}


@pytest.fixture
def summary() -> dict[str, Any]:
    settings = {
        "methods": [{"name": name} for name in NAMES], "baseline": "plain", "model": "tiny", "seed": 1,
        "max_tokens": 96, "task": {"name": "ruler", "parameters": {"length": 400}},
    }  # fmt: skip
    measures = {"answers": {"correct": metric(RIGHT)}, "divergence": {"kl_rest": metric(KL)}}
    facts = {"machine": {"cpu": "a cpu", "cores": 2}, "date": "2026-11-29T20:00"}
    return {"n": 20, "settings": settings, "measures": measures} | facts


def test_the_page_orders_techniques_and_judges_claims(
    summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(league_page, "save", lambda *facts: saved.append(facts))
    cell = tmp_path / "cells" / "tiny-ruler-400"
    for measured, own in (("quality", summary), ("serving", {"measures": {"serving": {"itl_1_s": metric(KL, False)}}})):
        (cell / measured).mkdir(parents=True)
        (cell / measured / "summary.json").write_text(json.dumps(own))
    (cell / "quality" / "plot.svg").write_text("<svg/>")
    page = league_page.write(tmp_path / "cells", tmp_path / "docs" / "results" / "league.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == ["plain", "duo-attention", NAMES[2], NAMES[1]]
    assert "70 [60, 80] | -20, 0.01 | 0.20 [0.10, 0.30]" in lines[2]
    assert "| 200.0 |" in lines[2]  # ITL of one, ms
    claims = [line for line in page.splitlines() if "points (p" in line]
    assert len(claims) == 2  # those of which both were run
    assert "**holds**; right answers agree: KL -0.30 [-0.40, -0.20], +40 points (p 0.01)" in claims[0]
    assert (tmp_path / "docs" / "images" / "league-tiny-ruler-400.svg").exists()
    assert saved[0][2] == "tiny-ruler-400"


def test_a_page_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("what was found")
    for write in (league_page.write, refresh.write):
        with pytest.raises(SystemExit, match=f"{page} stays as it is"):
            write(tmp_path / "cells", page)
    assert page.read_text() == "what was found"


def test_verdicts_turn_with_the_difference_and_want_items(summary: dict[str, Any]) -> None:
    (found,) = league_page.judged(summary, "streaming", "snapkv-by-head")
    assert found.startswith("25% kept: **contradicted**; right answers agree: KL +0.30 [+0.20, +0.40], -40 points")
    assert league_page.judged(summary, "tova", "streaming") == []
    (found,) = league_page.judged(summary | {"n": 9}, "streaming", "snapkv-by-head")
    assert found.startswith("25% kept: too few items")


def test_verdicts_are_of_the_same_budget(summary: dict[str, Any]) -> None:
    """Duo-attention has none: it is compared with each of another's."""
    more = [{"name": f"{one}:{budget}"} for one, budget in (("streaming", "window=36"), ("tova", "ratio=0.1"))]
    summary["settings"]["methods"] += more
    for measure, key in (("answers", "correct"), ("divergence", "kl_rest")):
        pairs = summary["measures"][measure][key]["pairs"]
        known = dict(pairs[0])
        pairs += [known | {"first": a, "second": more[0]["name"]} for a in (NAMES[2], NAMES[3], more[1]["name"])]

    def starts(better: str, worse: str) -> list[str]:
        return [found.partition(":")[0] for found in league_page.judged(summary, better, worse)]

    assert starts("snapkv-by-head", "streaming") == ["25% kept"]
    assert starts("tova", "streaming") == ["10% kept"]
    assert starts("duo-attention", "streaming") == ["25% kept", "10% kept"]


def test_a_cell_is_a_run_of_eval() -> None:
    options = Namespace(
        methods=None, quick=False, items=5, budgets="0.5,0.25", slow_budget=0.25, seed=1, threads=None, kv_bytes="1GiB",
        output=Path("cells"),
    )  # fmt: skip
    words = Cell("tiny", "ruler", 2000).command("quality", options, 3.0)
    assert {"--minutes=3.0", "--limit=5", "--output=cells/tiny-ruler-2000/quality"} <= set(words)
    assert not any(word.startswith("--threads") for word in words)
    (methods,) = (word for word in words if word.startswith("--methods="))
    assert all(name in methods for name in SLOW)
    assert "critical-kv:ratio=0.25,critical-kv:budgets=ada,ratio=0.25" in methods  # the slow ones have one budget
    (methods,) = (word for word in Cell("tiny", "ruler", 30_000).command("serving", options, 3.0) if "methods" in word)
    assert "kvzip" not in methods
    words = Cell("/a/path", "ruler", 400).command("quality", options, 3.0)
    assert {"--model=/a/path", "--output=cells/a-path-ruler-400/quality"} <= set(words)
