"""PyTorch is an extra: commands that need it say so, and how to install it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from twostroke.backends.native import library
from twostroke.system.extras import install_command


@pytest.fixture(autouse=True)
def no_torch(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:  # transformers writes the tiny model, and needs it
    users = ("twostroke.backends.reference.", "twostroke.study.distilling", "twostroke.study.pruning")
    for name in [name for name in sys.modules if name.startswith(users)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)


def test_the_reference(run: Callable[..., Result], tiny: str) -> None:
    failed = run("generate", "--model", tiny, "--prompt", "a", "--backend", "reference")
    assert failed.exit_code == 1
    assert failed.stderr == f"error: the reference needs torch: {install_command('torch')}\n"


def test_no_kernels(run: Callable[..., Result], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda variant=None: "it was not compiled")
    failed = run("generate", "--model", tiny, "--prompt", "a", "--weights", "int8")
    assert failed.exit_code == 1
    assert failed.stderr.endswith(
        "error: the native backend cannot run this, since it was not compiled, and the reference needs torch: "
        f"{install_command('torch')}\n"
    )


def test_prune(run: Callable[..., Result], tiny: str, tmp_path: Path) -> None:
    failed = run("prune", tiny, tmp_path / "student", "--calibration", __file__)
    assert failed.exit_code == 1
    assert failed.stderr == f"error: pruning needs torch: {install_command('torch')}\n"


def test_a_gpu_without_torch_is_one_line_before_anything_is_fetched(run: Callable[..., Result]) -> None:
    failed = run("generate", "--model", "gemma3-270m", "--prompt", "a", "--device", "cuda")
    assert failed.exit_code == 1
    assert failed.stderr == f"error: device 'cuda' needs torch: {install_command('gpu')}\n"


def test_the_command_that_installs_an_extra_names_this_interpreter_and_this_checkout() -> None:
    root = Path(__file__).parents[2]
    assert install_command("gpu") == f"{sys.executable} -m pip install -e '{root}[gpu]'"
