"""The command: fast help, clean exits, shared options."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import Result

from tests.cli.test_serve import MAIN, PAUSES
from tests.patience import PATIENCE_S
from twostroke.cli import parsers
from twostroke.cli.app import app

TWOSTROKE = [sys.executable, "-m", "twostroke"]


def test_help_is_quick_because_what_is_slow_stays_out() -> None:
    code = "import sys; from twostroke.cli.app import app; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def commands(group: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """How each command is called."""
    if not hasattr(group, "commands"):
        return [path]
    return [found for name, command in group.commands.items() for found in commands(command, (*path, name))]


@pytest.mark.parametrize("command", commands(typer.main.get_command(app)), ids=" ".join)
def test_help_shows_defaults_as_a_person_writes_them(command: tuple[str, ...], run: Callable[..., Result]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert not re.search(r"object at 0x|<class|<function|MISSING|default: None", result.stdout)


def test_ctrl_c_exits_130_without_a_traceback(native_directory: Path) -> None:
    command = [
        *(sys.executable, "-c", PAUSES + MAIN),
        "generate",
        "-m",
        str(native_directory),
        "-p",
        "the fox",
        "--max-tokens",
        "1900",
        "--ignore-eos",
        "--threads",
        "1",
    ]
    # A test run in the background inherits SIGINT as ignored.
    default: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **default) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        err: Any = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_closed_pipe_is_no_error(tiny: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [*TWOSTROKE, "generate", "-m", tiny, "-p", "the fox", "--max-tokens", "5", "--backend", "reference"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 1
    # A slow machine says what it waits for.
    assert [line for line in done.stderr.splitlines() if not line.startswith("loading ")] == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("4096", 4096), ("64kib", 65536)],
)
def test_sizes(text: str, size: int) -> None:
    assert parsers.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 XiB", "1,5GiB", "9" * 400 + ".5", "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parsers.parse_size(text)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("times=2", ("times", 2)),
        ("p=0.5", ("p", 0.5)),
        ("keep=all", ("keep", "all")),
        ("hand-over=true", ("hand_over", True)),
        ("a=b=c", ("a", "b=c")),
        ("empty=", ("empty", "")),
    ],
)
def test_method_options(text: str, pair: tuple[str, object]) -> None:
    assert parsers.parse_pairs([text, "x=1"]) == dict([pair, ("x", 1)])


def test_a_parameter_comes_once() -> None:
    with pytest.raises(typer.BadParameter, match="hand_over is given twice"):
        parsers.parse_pairs(["hand-over=true", "times=2", "hand_over=true"])


def test_output_that_cannot_be_written_is_one_line(native_directory: Path) -> None:
    """A full disk is named; a closed stdout takes nothing."""
    shell = f"{sys.executable} -m twostroke generate -m {native_directory} -p fox --max-tokens 3"
    full = subprocess.run(["bash", "-c", f"{shell} > /dev/full"], capture_output=True, text=True)
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1:] == ["error: No space left on device"]
    closed = subprocess.run(["bash", "-c", f"{shell} 1>&-"], capture_output=True, text=True)
    assert closed.returncode == 0
    assert "Traceback" not in closed.stderr
