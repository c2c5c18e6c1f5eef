"""Refresh by gate and student: thresholds from looks, commands in order, and the page's rows."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import refresh
from twostroke.cli.eval import ContenderOptions
from twostroke.study.evaluate.tasks import LongForm

NAMES = ["teacher", "overfill", "refresh:every=64"]


@pytest.fixture
def looked(tmp_path: Path) -> Path:
    """A directory whose gates looked: variances of 0 to 7, divergences ten times that."""
    looks = tmp_path / "looks"
    looks.mkdir()
    with (looks / "items.jsonl").open("w") as stream:
        for half in (range(4), range(4, 8)):
            records = {
                f"refresh:when={gate},every=16,threshold=1000000000.0": {"facts": {"looks": [scale * i for i in half]}}
                for gate, scale in (("mc-dropout", 1.0), ("probe", 10.0))
            }
            stream.write(json.dumps({"item": str(half), "measures": {"answers": records}}) + "\n")
    return tmp_path


def test_one_look_of_four_refreshes(looked: Path) -> None:
    found = refresh.thresholds(looked / "looks")
    assert [sum(i > found["mc-dropout"] for i in range(8)), found["probe"]] == [2, 10 * found["mc-dropout"]]
    asked = ContenderOptions(refresh.policies(looked)).contenders(LongForm())
    assert [one.method.name for one in asked[:3]] == ["plain", "student", "overfill"]
    (gate,) = (one.method for one in asked if "mc-dropout" in one.name)
    assert (gate.every, gate.threshold) == (16, found["mc-dropout"])  # pyright: ignore[reportAttributeAccessIssue]


def test_commands_come_in_order_and_a_pruned_student_is_made_once(
    looked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresh, "articles", lambda: iter(["text"]))
    options = Namespace(output=looked, model="m", threads=None, tokens=1200, looked=4, items=64, distill=7)
    (looked / "m-pruned" / "looks").mkdir(parents=True)
    (looked / "looks" / "items.jsonl").rename(looked / "m-pruned" / "looks" / "items.jsonl")
    made = refresh.steps(options, "pruned")
    assert list(made) == ["pruned, pruning", "pruned, looks", "pruned, led", "pruned, judged"]
    assert {"prune", "m", "--distill=7"} <= set(made["pruned, pruning"](5.0))
    student = f"--student={looked / 'm-pruned' / 'student'}"
    assert {student, "--measure=divergence", "--batch=1", "--minutes=5.0"} <= set(made["pruned, led"](5.0))
    (looked / "m-pruned" / "student").mkdir()
    (looked / "m-pruned" / "student" / "config.json").touch()
    assert list(refresh.steps(options, "pruned")) == ["pruned, looks", "pruned, led", "pruned, judged"]


def test_rows_are_less_than_overfills() -> None:
    values = dict(zip(NAMES, (0.0, 0.5, 0.4), strict=True))
    methods = {name: {"n": 3, "value": one, "low": one, "high": one} for name, one in values.items()}
    pair: dict[str, Any] = {"n": 3, "value": -0.1, "low": -0.2, "high": -0.05}
    led = {
        "settings": {"methods": [{"name": name} for name in NAMES]},
        "measures": {
            "divergence": {
                "kl_rest": {
                    "methods": methods,
                    "pairs": [{"first": NAMES[1], "second": NAMES[2], "difference": pair, "p": None}],
                }
            }
        },
    }
    assert [row[:3] for row in refresh.rows(None, led)] == [
        ["`teacher`", "0.000 [0.000, 0.000]", ""],
        ["`overfill`", "0.500 [0.500, 0.500]", ""],
        ["`refresh:every=64`", "0.400 [0.400, 0.400]", "0.100 [0.050, 0.200]"],
    ]
