"""`twostroke prune`: the directory it writes is a student of the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result


def test_prune_and_use(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 5)
    arguments = ("--calibration", tmp_path / "text", "--hidden", 0.5, "--intermediate", 0.3)
    result = run("prune", tiny, tmp_path / "student", *arguments)
    assert result.exit_code == 0
    assert "hidden size: 64 to 32" in result.stdout
    options = ("--student", tmp_path / "student", "--method", "overfill", "--max-tokens", 5, "--ignore-eos")
    assert len(run_json("generate", "-m", tiny, "-p", "the fox", *options)["token_ids"]) == 5
    again = run("prune", tiny, tmp_path / "student", "--calibration", tmp_path / "text")
    assert again.exit_code == 1
    assert "is there already" in again.stderr
