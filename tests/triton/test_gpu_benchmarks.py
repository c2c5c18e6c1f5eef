"""benchmarks/gpu: --help, and a dry run on a CPU with tiny models, so no device time is lost."""

# pyright: reportPrivateUsage=false

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import strokes
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.runs import Runs, random_model
from benchmarks.gpu.weights import WEIGHTS, RandomWeights
from twostroke.backends.interface import PAGE, STOP
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.engine.calibration import StepBench
from twostroke.models.cost import SequenceRows
from twostroke.models.formats.blocks import FORMATS

ROOT = Path(__file__).parents[2]
DRY = ["--device", "cpu", "--models", "tiny", "--quick", "--backend", "reference"]


def run(monkeypatch: pytest.MonkeyPatch, arguments: list[str], out: Path) -> Any:
    """Run the program in this process; returns what it wrote."""
    monkeypatch.setattr(sys, "argv", ["strokes", *arguments, "--out", str(out)])
    strokes.main()
    return json.loads(out.read_text())


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.strokes", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage: strokes" in done.stdout


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_dry_run(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = run(monkeypatch, [*DRY, "--kv-dtype", kv_dtype], tmp_path / "out.json")
    printed = capsys.readouterr().out
    assert not [case for case in facts["cases"] if "failure" in case or "skipped" in case]
    assert "| tiny |" in printed
    assert "Cut off" not in printed
    found = {(case["stroke"], case["chunk"]) for case in facts["cases"]}
    assert found == {("decode", 0), ("prefill", 48), ("prefill", 16)}


def test_nothing_starts_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = run(monkeypatch, [*DRY, "--seconds", "0"], tmp_path / "out.json")
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


def tiny_bench() -> StepBench:
    return StepBench(random_model(ReferenceBackend("cpu", "bfloat16"), RandomWeights(MODELS["tiny"]), 16), 200)


def test_pages_lie_apart_and_tables_say_where() -> None:
    step = [SequenceRows(3, 20), SequenceRows(1, 33, 1)]
    ((batch,),) = Runs(tiny_bench(), [[step]], follows=False).fresh
    assert batch.row_starts == [0, 3, 4]
    assert batch.positions.tolist() == [20, 21, 22, 33]
    assert batch.slots.tolist() == [4, 5, 6, 1]
    one, two = (table[:, PAGE].tolist() for table in batch.tables)
    assert batch.pages.tolist() == [[one[1]] * 3 + [two[2]]]
    assert len({*one, *two}) == 5
    assert [*one, *two] != sorted([*one, *two])
    assert batch.wanted.tolist() == [3]
    assert [table[-1, STOP] for table in batch.tables] == [7, 2]


def test_steps_in_a_row_take_the_tokens_of_the_step_before() -> None:
    runs = Runs(tiny_bench(), [[[SequenceRows(1, 8 + i, 1)] * 2] for i in range(2)], follows=True)
    drawn = runs.launch()
    assert runs.following[1][0].token_ids.tolist() == [-1, -2]
    assert len(runs.launch(drawn).read()) == 2


def test_a_failed_case_is_named_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(case: strokes.Case) -> Any:
        if case.chunk == 16:
            raise RuntimeError("no such luck")
        return steps_of(case)

    steps_of = strokes.steps_of
    monkeypatch.setattr(strokes, "steps_of", broken)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, DRY, tmp_path / "out.json")
    assert ended.value.code == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().out
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert {case["chunk"] for case in cases if "step_ms" in case} == {0, 48}
