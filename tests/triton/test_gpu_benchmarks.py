"""benchmarks/gpu: every program has --help, and a dry run on a CPU with tiny models, so no device time is lost."""

# pyright: reportPrivateUsage=false

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import strokes
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.runs import Runs
from benchmarks.gpu.steps import Part, Stepper
from benchmarks.gpu.weights import WEIGHTS, RandomWeights
from twostroke.backends.interface import POSITION, STOP
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.models.formats.blocks import FORMATS

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.stem for path in (ROOT / "benchmarks" / "gpu").glob("*.py") if "__main__" in path.read_text())
DRY = ["--device", "cpu", "--models", "tiny", "--quick"]
REFERENCE = [*DRY, "--backend", "reference"]
ARGUMENTS: dict[str, list[str]] = {
    "strokes": REFERENCE,
}


def run(monkeypatch: pytest.MonkeyPatch, program: str, arguments: list[str], out: Path) -> Any:
    """Run a program in this process; returns what it wrote."""
    monkeypatch.setattr(sys, "argv", [program, *arguments, "--out", str(out)])
    import_module(f"benchmarks.gpu.{program}").main()
    return json.loads(out.read_text()) if out.suffix == ".json" else None


def test_programs_are_found() -> None:
    assert set(ARGUMENTS) == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.gpu.{program}").main()
    assert ended.value.code == 0
    assert f"usage: {program}" in capsys.readouterr().out


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.strokes", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("program", list(ARGUMENTS))
def test_dry_run(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = run(monkeypatch, program, ARGUMENTS[program], tmp_path / "out.json")
    printed = capsys.readouterr().out
    assert facts["cases"]
    assert not [case for case in facts["cases"] if "failure" in case or "skipped" in case]
    assert "| tiny |" in printed
    assert "Cut off" not in printed
    if program == "strokes":
        strokes = {(case["stroke"], case["chunk"]) for case in facts["cases"]}
        assert strokes == {("decode", 0), ("prefill", 48), ("prefill", 16)}


def test_nothing_starts_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = run(monkeypatch, "strokes", [*REFERENCE, "--seconds", "0"], tmp_path / "out.json")
    assert facts["cases"] == []
    assert facts["cut_off_after_s"] == 0
    assert "Cut off after 0 s" in capsys.readouterr().out


@pytest.mark.parametrize("format", WEIGHTS)
def test_random_weights_have_the_wanted_deviation(format: str) -> None:
    weights = RandomWeights(MODELS["tiny"], format)
    for name in ("layers.1.down", "head"):
        tensor = weights(name)
        assert tensor.format == format
        values = tensor.dequantize()
        assert np.isfinite(values).all()
        assert values.std() == pytest.approx(values.shape[1] ** -0.5, rel=0.05)
        assert abs(values.mean()) < 0.15 * values.std()
    assert (weights("norm").dequantize() == 1).all()


def test_rows_that_are_no_whole_blocks_have_another_format() -> None:
    weights = RandomWeights(MODELS["qwen2.5-0.5b"], "Q4_K")
    found = {name: weights._format(shape[1]) for name, shape in weights.shapes.items() if len(shape) == 2}
    assert 896 % FORMATS["Q4_K"].block_size != 0
    assert found["layers.0.q"] == "Q8_0"
    assert found["layers.0.down"] == "Q4_K"


def test_a_batch_is_what_the_interface_says() -> None:
    stepper = Stepper(ReferenceBackend("cpu", "bfloat16"), RandomWeights(MODELS["tiny"]), 16)
    one, two = stepper.sequences(2, 40)
    batch = stepper.batch([Part(one, 20, 3, makes=False), Part(two, 33, 1, first=100)])
    assert batch.row_starts == [0, 3, 4]
    assert batch.positions.tolist() == [20, 21, 22, 133]
    assert batch.slots.tolist() == [4, 5, 6, 1]
    assert batch.pages.tolist() == [[int(one[1, 0])] * 3 + [int(two[2, 0])]]
    assert batch.wanted.tolist() == [3]
    assert [table[-1, STOP] for table in batch.tables] == [7, 2]
    assert batch.tables[1][:, POSITION].tolist() == [100, 116, 132]
    assert len({*one.ravel().tolist(), *two.ravel().tolist()}) == 6


def test_steps_in_a_row_take_the_tokens_of_the_step_before() -> None:
    stepper = Stepper(ReferenceBackend("cpu", "bfloat16"), RandomWeights(MODELS["tiny"]), 16)
    frames = stepper.sequences(2, 12)
    runs = Runs(stepper, [[[Part(f, 8 + i, 1) for f in frames]] for i in range(2)], follows=True)
    drawn = runs.launch()
    assert runs.following[1][0].token_ids.tolist() == [-1, -2]
    assert len(runs.launch(drawn).read()) == 2


def test_a_failed_case_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(stepper: Any, case: strokes.Case) -> Any:
        if case.chunk == 16:
            raise RuntimeError("no such luck")
        return steps_of(stepper, case)

    steps_of = strokes.steps_of
    monkeypatch.setattr(strokes, "steps_of", broken)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "strokes", REFERENCE, tmp_path / "out.json")
    assert ended.value.code == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().out
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert {case["chunk"] for case in cases if "step_ms" in case} == {0, 48}
