"""`twostroke plan` on this machine: --on here, --measure, --verify."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.study.plan.test_machine_benchmark import FOUND, needs_kernels
from tests.study.plan.test_verify import SMALL
from twostroke.cli import plan_verify
from twostroke.study.plan import local_machine, verification_cells


@pytest.fixture
def directory(tiny_directory: Callable[[str], Path]) -> str:
    return str(tiny_directory("llama"))


@needs_kernels
def test_a_plan_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_json: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    local_machine.keep(FOUND, local_machine.kept_at())
    facts = run_json("plan", "smollm2-135m", "--on", "here", "--weights", "int8")
    assert "measured here with native-test" in facts["machine_source"]
    assert facts["assumed"]["compute"] == 1


@needs_kernels
def test_what_is_measured_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_verify, "measure_machine", lambda *_: FOUND)
    assert "500" in run("plan", "--measure").stdout
    facts = run_json("plan", "--measure", "--output", tmp_path / "mine.toml")
    assert facts["flops"] == FOUND.flops
    assert Path(facts["kept"]).read_text() == (tmp_path / "mine.toml").read_text()


def test_a_plan_says_what_is_missing(run: Callable[..., Result]) -> None:
    assert "a plan needs a model" in run("plan").stderr
    assert "--on MACHINE" in run("plan", "llama-3-70b").stderr


def test_a_pair_for_a_memory_budget(run: Callable[..., Result]) -> None:
    asked = ("plan", "llama-3-8b", "--on", "epyc-9755", "--memory-budget")
    shown = " ".join(run(*asked, "9GB").stdout.split())
    assert "prefill stored (--stream-weights), decode 3 bits, KV of 16 bits" in shown
    assert "not measured for this model" in shown
    assert "none of the pairs that were measured fits" in run(*asked, "1MB").stdout
    assert [run(*asked, wrong).exit_code for wrong in ("-1", "much")] == [2, 2]


def test_the_command(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]
) -> None:
    """Both exits, raw numbers in a file where other models' stay, and bad input before anything is measured."""
    monkeypatch.setattr(verification_cells, "CELLS", SMALL[:2])
    output = tmp_path / "results.json"
    output.write_text(json.dumps({"definitions": {}, "models": {"other": {"kept": True}}}))
    arguments = ("plan", directory, "--verify", "--seconds", "1", "--threads", "1")
    done = run(*arguments, "--output", str(output))
    found: dict[str, Any] = json.loads(output.read_text())["models"]
    assert found["other"] == {"kept": True}
    mine = found[directory]
    assert done.exit_code == (0 if mine["holds"] else 1)
    assert all(one["raw_s"] for one in mine["cells"])
    assert ("holds" if mine["holds"] else "does not hold") in done.stdout

    for wrong, why in (
        (("--output", str(tmp_path / "absent" / "x.json")), "no directory"),
        (("--output", str(Path(directory) / "config.json")), "no file of results"),
        (("--seconds", "0"), "at least 1"),
        (("--models", "no-such-model"), "no-such-model"),
    ):
        failed = run(*arguments, *wrong)
        assert failed.exit_code == 1
        assert why in failed.stderr
