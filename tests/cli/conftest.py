"""The command line, run in this process with a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from twostroke.cli.app import app


@pytest.fixture
def tiny(tiny_directory: Callable[[str], Path]) -> str:
    return str(tiny_directory("llama"))


@pytest.fixture
def run(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `twostroke` with arguments; raises unless it exits cleanly."""

    def invoke(*arguments: object, stdin: str | None = None) -> Result:
        monkeypatch.setenv("COLUMNS", "200")
        if tiny in arguments and arguments[0] not in ("models", "prune") and "--threads" not in arguments:
            arguments = (*arguments, "--threads", 1)  # faster for a tiny model
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., dict[str, Any]]:
    """The JSON object on stdout, which must have nothing else."""

    def invoke(*arguments: object, stdin: str | None = None) -> dict[str, Any]:
        result = run(*arguments, "--json", stdin=stdin)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("\n") == 1
        return json.loads(result.stdout)

    return invoke
