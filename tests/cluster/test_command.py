"""`twostroke worker` says what is wrong before it loads a model."""

from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from twostroke.cli import app
from twostroke.system.extras import install_command


@pytest.mark.skipif(find_spec("dynamo") is not None, reason="NVIDIA Dynamo is installed")
def test_without_dynamo_it_says_what_to_install() -> None:
    done = CliRunner().invoke(app.app, ["worker"])
    assert done.exit_code == 1
    assert install_command("dynamo") in done.output


@pytest.mark.skipif(find_spec("dynamo") is None, reason="needs NVIDIA Dynamo: make test-cluster")
@pytest.mark.parametrize("options", [["--role", "both-of-them"], ["--transport", "pigeon"]])
def test_an_unknown_choice_is_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app.app, ["worker", *options])
    assert done.exit_code == 2
