"""Predictions beside published throughput: the data names what is known, and a prediction is that of the arithmetic."""

import tomllib
from dataclasses import replace

import pytest

from benchmarks.plan_published import HERE, throughput
from twostroke.study.plan.capacity import capacity
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.roofline.machines import machines
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.weight_formats import FORMATS


def test_every_row_can_be_predicted() -> None:
    published = tomllib.loads((HERE / "published-throughput.toml").read_text())
    for table in published.values():
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
