"""Predictions beside published throughput: the data names what is known, and a prediction is that of the arithmetic."""

import json
import tomllib
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.plan_published import rows_of, throughput
from benchmarks.results_file import RESULTS
from twostroke.study.plan.capacity import capacity
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.roofline.machines import machines
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.weight_formats import FORMATS

PUBLISHED = tomllib.loads((RESULTS / "published-throughput.toml").read_text())
ROWS: list[dict[str, Any]] = json.loads((RESULTS / "plan-published.json").read_text())["rows"]
PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def test_every_row_can_be_predicted() -> None:
    for table in PUBLISHED.values():
        assert table["source"]
        for system in table["system"]:
            names = system["model"], system["machine"], system["weights"]
            assert names[0] in specifications()
            assert names[1] in machines()
            assert names[2] in FORMATS
            assert all(tokens.count("/") == 1 and rate > 0 for tokens, rate in system["cells"].items())


def test_where_nothing_is_in_the_way_throughput_is_that_of_the_arithmetic() -> None:
    profile = RequestProfile(512, 32)
    plan = make_plan(specifications()["llama-3.1-8b"], machines()["h100"], FORMATS["bf16"], 1, profile)
    plan = replace(plan, max_running=16, workers=2)
    assert throughput(plan) == pytest.approx(32 * capacity(plan), rel=0.15)


def test_the_file_has_what_the_plan_says_today() -> None:
    """The cells that are quick: eight requests at once, and one user."""
    for name, count in (("vllm-ci", 4), ("nim-1_8", 1)):
        known = [row for row in ROWS if row["from"] == name][:count]
        assert [row["predicted"] for row in islice(rows_of(name, PUBLISHED[name]), count)] == pytest.approx(
            [row["predicted"] for row in known]
        )


def test_the_page_has_the_file_s_errors() -> None:
    """Each cell of its tables, and its summary."""
    systems: defaultdict[str, list[str]] = defaultdict(list)
    mlperf: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
    for row in ROWS:
        system = f"{row['model']} {row['weights']} on {row['devices']} x {row['machine']}"
        if row["from"].startswith("tensorrt"):
            systems[f"{row['from']} {system}"].append(f"{row['error']:+.0%}")
        elif row["from"].startswith("mlperf"):
            mlperf[row["model"], row["machine"], row["scenario"], row["measured"]].append(row["predicted"])
        else:
            assert f"{row['measured']:,.0f}" in PAGE
            assert f"{row['error']:+.0%}" in PAGE
    for name, errors in systems.items():
        assert f"| {name.partition(' ')[2]} | {' | '.join(errors)} |" in PAGE
    for (*_, measured), predicted in mlperf.items():
        assert f"**{measured:,}** ({min(predicted):,.0f} to {max(predicted):,.0f})" in PAGE
    for name in ("tensorrt-llm", "tensorrt-llm-0_14", "nim-1_8", "vllm-ci"):
        rows = [row for row in ROWS if row["from"] == name]
        off, within = [row["error"] for row in rows], sum(row["low"] <= row["measured"] <= row["high"] for row in rows)
        assert f"| {len(rows)} | {mean(map(abs, off)):.0%} | {mean(off):+.0%} | {within} |" in PAGE
