"""A path may begin with ~ wherever it is stated, and an empty address to listen at is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from twostroke import LLM, KVCache
from twostroke.cli.app import app
from twostroke.kv.tiers.tiers import open_tiers


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def paths(command: Any, name: str = "twostroke") -> list[tuple[str, str]]:
    """Each option and argument of every command that is a path."""
    found = [
        (name, one.name) for one in command.params if getattr(one, "type_descriptor", None) is not None
        and one.type_descriptor.annotation is Path
    ]  # fmt: skip
    for child, one in getattr(command, "commands", {}).items():
        found += paths(one, f"{name} {child}")
    return found


def test_every_path_of_the_command_line_is_expanded(home: Path) -> None:
    command = typer.main.get_command(app)
    found = paths(command)
    assert len(found) > 10
    for name, option in found:
        one: Any = command
        for word in name.split()[1:]:
            one = one.commands[word]
        (parameter,) = (one for one in one.params if one.name == option)
        with one.make_context(name, [], resilient_parsing=True) as context:
            assert parameter.process_value(context, "~/a/b") == home / "a" / "b", (name, option)


def test_the_disk_tier_and_saved_values_are_in_the_home(home: Path, tiny_llm: Callable[..., LLM]) -> None:
    open_tiers(kv_disk="~/kv", kv_disk_bytes=1 << 30).close()
    assert (home / "kv" / "FORMAT").is_file()
    llm = tiny_llm()
    llm.prefill([1, 2, 3]).save("~/value.kv")
    assert (home / "value.kv").is_file()
    assert len(KVCache.load("~/value.kv", llm)) == 3
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt-file", ""],
        ["generate", "--kv-disk", "", "--prompt", "a"],
        ["explain", "a", "--html", ""],
        ["eval", "nameindex", "--output", ""],
        ["verify", ""],
        ["cache", "clear", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_not_the_working_directory(arguments: list[str], home: Path) -> None:
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert told.exit_code != 0
    assert "it is empty" in told.output or "there is no directory" in told.output


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_address_is_refused(command: str, host: str) -> None:
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--host", host, "--model", "none"])
    assert told.exit_code == 2
    assert "127.0.0.1 for this machine alone" in told.output
