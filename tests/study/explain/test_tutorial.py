"""The tutorial's figures are what its commands print, except for times, and for what rounds otherwise elsewhere."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.methods.watching import needs_native
from twostroke.cli.app import app

PAGE = Path(__file__).parents[3] / "docs" / "inference-by-example.md"
# Probabilities, what was timed, shades, first values.
ROUNDED = re.compile(r"0\.\d\d|bound by (?:reading|computing)|\de-\d|[·░▒▓█┄]|\[-?\d\.\d")


def blocks() -> list[tuple[str, list[str]]]:
    """Commands and lines of their output. A block without a command is of the one before."""
    found, command = list[tuple[str, list[str]]](), ""
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        lines = block.splitlines()
        if lines[0].startswith("$ "):
            command = lines.pop(0).removeprefix("$ ")
        found.append((command, [line for line in lines if line != "..."]))
    return found


@cache
def printed_by(command: str) -> list[str]:
    name, *arguments = shlex.split(command)
    assert name == "twostroke"
    result = CliRunner().invoke(app, arguments + (["--threads", "1"] if arguments[0] == "explain" else []))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def fits(printed: str, line: str) -> bool:
    """Whether a line is the page's, up to its ellipsis if it has one. Columns are as wide as what is in them."""
    start, cut, _ = line.partition("...")
    shown, wanted = " ".join(printed.split()), " ".join(start.split())
    return shown.startswith(wanted) if cut else shown == wanted


@needs_native  # the page says "the same bits", which only exact backends compute
@pytest.mark.parametrize(("command", "lines"), blocks(), ids=range(len(blocks())))
def test_the_page_shows_what_the_command_prints(
    command: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    printed, at = printed_by(command), 0
    for line in lines:
        if ROUNDED.search(line):
            continue
        at = next((i + 1 for i, one in enumerate(printed) if i >= at and fits(one, line)), -1)
        assert at > 0, f"the page shows this line, and the command does not print it there: {line}"
