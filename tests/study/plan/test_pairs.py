"""Pairs of weights for a memory budget: the data are the measured ones, and a larger budget never loses more."""

import json
from pathlib import Path
from typing import Any

import pytest

from twostroke.study.plan.pairs import measured, pair_advice
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.techniques import PLAIN
from twostroke.study.roofline.weight_formats import FORMATS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "stroke-bits-2026-11-29.json"


def advice(model: str, budget: int) -> dict[str, Any]:
    spec = specifications()[model]
    return pair_advice(
        make_plan(spec, find_machine("epyc-9755"), FORMATS["bf16"], 1, RequestProfile(512, 128), PLAIN), budget
    )


def test_the_table_is_what_was_measured() -> None:
    found = json.loads(RESULTS.read_text())["models"]
    assert found.keys() == measured().keys()
    for model, facts in found.items():
        rows = {(row["kv"], f"{row['prefill']} {row['decode']}"): row["kl"] for row in facts["rows"] if "kv" in row}
        kept = {(kv, pair): kl for kv, pairs in measured()[model]["kl"].items() for pair, kl in pairs.items()}
        assert kept.keys() == rows.keys()
        assert all(kl == pytest.approx(rows[key], abs=6e-5) for key, kl in kept.items())
        assert measured()[model]["texts"] == facts["texts"]


def test_more_memory_never_loses_more() -> None:
    pairs = advice("smollm2-135m", 0)["pairs"]
    assert [one["kl_mean"] for one in pairs] == sorted(one["kl_mean"] for one in pairs)
    assert [one["bytes"] for one in pairs] == sorted((one["bytes"] for one in pairs), reverse=True)
    for one in pairs:
        assert advice("smollm2-135m", one["bytes"])["advised"] == one
        assert (advice("smollm2-135m", one["bytes"] - 1)["advised"] or {}) != one
    assert advice("smollm2-135m", pairs[-1]["bytes"] - 1)["advised"] is None
    best = pairs[0]
    assert (best["prefill"], best["decode"], best["kv_bits"], best["measured"]) == ("stored", "stored", 16, True)
    assert any(one["streamed"] and one["decode"] == "int3" for one in pairs)


def test_what_was_not_measured_is_said_to_be_of_others() -> None:
    found = advice("llama-3-8b", 9 * 10**9)
    assert not found["advised"]["measured"]
    assert found["advised"]["kl"].keys() == {"smollm2-135m", "qwen2.5-coder-0.5b"}  # those with all rows
