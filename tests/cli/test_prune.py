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
    assert "exists already" in again.stderr
    rate = run("prune", tiny, tmp_path / "other", "--calibration", tmp_path / "text", "--learning-rate", 0.001)
    assert "--learning-rate belongs to --distill" in rate.stderr
    assert not (tmp_path / "other").exists()


def test_distilled(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog " * 100)
    arguments = ("--calibration", tmp_path / "text", "--hidden", 0.5, "--distill", 3)
    made = run_json("prune", tiny, tmp_path / "student", *arguments)["distillation"]
    assert (made["steps"], len(made["losses"])) == (3, 3)
    assert made["after"] < made["before"]
    result = run("prune", tiny, tmp_path / "again", *arguments)
    assert f"KL to the teacher on held-out text: {made['before']:.3f} to {made['after']:.3f} nats" in result.stdout
    assert "step 3 of 3" in result.stderr
    short = run("prune", tiny, tmp_path / "third", *arguments, "--max-tokens", 300)
    assert "distillation needs at least 512 tokens of text, not 300" in short.stderr
    assert not (tmp_path / "third").exists()
