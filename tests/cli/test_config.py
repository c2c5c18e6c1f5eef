"""Options from variables and from files: their order, their names, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shellingham
import typer
from typer.testing import Result

from tests.cli.test_app import commands
from twostroke.cli import config
from twostroke.cli.app import app

PROMPT = ("-p", "the fox", "--raw", "--ignore-eos")
# Variables that are no options: a name would mean two things.
OTHERS = {"TWOSTROKE_HOME", "TWOSTROKE_WIRE_SECRET", "TWOSTROKE_PURE", "TWOSTROKE_PICTURES", "TWOSTROKE_SOAK"}


def options() -> list[tuple[str, Any]]:
    """Every option of every command."""
    root: Any = typer.main.get_command(app)
    found: list[tuple[str, Any]] = []
    for path in commands(root):
        command = root
        for name in path:
            command = command.commands[name]
        found += [(" ".join(path), one) for one in command.params if one.param_type_name == "option"]
    return found


def test_every_command_takes_a_file_and_every_option_a_variable() -> None:
    named = {command for command, option in options() if "--config" in option.opts}
    assert named == {command for command, _ in options()}
    for command, option in options():
        if option.name not in config.ACTIONS:
            assert config.variable_of(option) in option.envvar, (command, option.name)
            assert config.variable_of(option) not in OTHERS


@pytest.fixture
def tokens(run_json: Callable[..., dict[str, Any]], tiny: str) -> Callable[..., int]:
    """The number of output tokens of `generate` with these arguments."""
    return lambda *arguments: run_json("generate", "-m", tiny, *PROMPT, *arguments)["output_tokens"]


def test_an_option_then_its_variable_then_the_file_then_the_default(
    tokens: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.toml"
    path.write_text("max-tokens = 3\n")
    assert tokens("--config", path) == 3
    path.write_text("max-tokens = 3\n\n[generate]\nmax_tokens = 4\n")
    assert tokens("--config", path) == 4
    monkeypatch.setenv("TWOSTROKE_MAX_TOKENS", "5")
    assert tokens("--config", path) == 5
    assert tokens("--config", path, "--max-tokens", 6) == 6
    monkeypatch.setenv("TWOSTROKE_CONFIG", str(path))
    monkeypatch.delenv("TWOSTROKE_MAX_TOKENS")
    assert tokens() == 4


def test_a_file_has_flags_lists_sizes_and_options_of_other_commands(
    run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path
) -> None:
    path = tmp_path / "options.toml"
    path.write_text(
        f'model = "{tiny}"\nkv-bytes = "4M"\nmax_tokens = 30\ntemperature = 0.5\nseed = 1\n'
        'port = 9000\n\n[generate]\nchat = false\nstop = ["e", "zz"]\nstop-token-id = 5\njson = true\n'
        "\n[bench.latency]\nrepeats = 2\n\n[serve]\ncors = []\n",
        encoding="utf-8-sig",  # as Notepad does
    )
    made = run_json("generate", "the fox", "--config", path, "--threads", 1)
    options = ("--temperature", 0.5, "--seed", 1, "--stop", "e", "--stop", "zz", "--stop-token-id", 5)
    expected = run_json("generate", "the fox", "-m", tiny, "--raw", "--max-tokens", 30, *options)
    assert made["token_ids"] == expected["token_ids"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-token = 3", "there is no option or command max-token; did you mean max-tokens?"),
        ("[serv]\nport = 1", "there is no option or command serv; did you mean serve?"),
        ("[serve]\nprot = 1", "there is no option or command serve.prot; did you mean port?"),
        ("[chat]\nport = 1", "there is no option or command chat.port"),
        ("config = 'other'", "there is no option or command config"),
        ("chat = 'yes'", "chat must be true or false, not 'yes'"),
        ("model = true", "model must be a text or a number, not True"),
        ("model = ['a', 'b']", "model takes one value, not a list"),
        ("model = ", "is not TOML"),
    ],
)
def test_what_a_file_may_not_say(
    text: str, message: str, run: Callable[..., Result], tiny: str, tmp_path: Path
) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text)
    refused = run("generate", *PROMPT, "--config", path, "--threads", 1)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: {path}")
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_file_that_is_not_there(run: Callable[..., Result], tmp_path: Path) -> None:
    refused = run("chat", "--config", tmp_path / "none.toml")
    assert refused.exit_code == 1
    assert refused.stderr == f"error: {tmp_path / 'none.toml'} cannot be read: No such file or directory\n"


def test_the_model_as_an_argument(run: Callable[..., Result], tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_MODEL", "/no/such/model")
    answered = run("chat", tiny, "--max-tokens", 2, stdin="the fox\n")
    assert answered.exit_code == 0, answered.output
    twice = run("chat", tiny, "--model", tiny, stdin="the fox\n")
    assert twice.exit_code == 2
    assert "name the model once" in re.sub(r"\s+", " ", twice.stderr)
    assert run("chat", stdin="the fox\n").exit_code == 1


def test_a_checked_configuration_is_a_file_of_options(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_KV_BYTES", "2G")
    options = ("--port", 1, "--cors", "http://a", "--api-key", "secret", "--kv-disk", "~/kv", "--when-full", "window")
    shown = run("serve", "smollm2-135m", "--check-config", *options)
    assert shown.exit_code == 0
    assert "secret" not in shown.output
    assert shown.stderr == "smollm2-135m would be served at http://127.0.0.1:1\n"
    assert "kv-bytes = 2147483648  # TWOSTROKE_KV_BYTES\n" in shown.stdout
    assert f'kv-disk = "{Path.home()}/kv"  # option\n' in shown.stdout
    path = tmp_path / "options.toml"
    path.write_text(shown.stdout)
    monkeypatch.delenv("TWOSTROKE_KV_BYTES")
    again = run("serve", "--check-config", "--config", path)
    values = [re.sub(r"  # .*", "", line) for line in shown.stdout.splitlines() if not line.startswith("#")]
    assert [
        line.removesuffix(f"  # {path}") for line in again.stdout.splitlines() if line.endswith(str(path))
    ] == values
    for wrong in (("--max-queued", -1), ("--max-running", 0), ("--kv-disk-bytes", "5GiB"), ("--kv-compress",)):
        refused = run("serve", "--check-config", *wrong)
        assert (refused.exit_code, refused.stdout) == (1, "")


BAD = [("--backend", "magic"), ("--device", "nowhere"), ("--weights", "int5"), ("--student", "int5"), ("--tp", 99)]


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "-p", "a"),
        ("chat",),
        ("explain", "-p", "a"),
        ("serve", "--port", "0"),
        ("bench", "latency"),
        ("eval", "nameindex"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("option", BAD, ids=str)
def test_nothing_is_fetched_for_a_bad_option(
    command: tuple[str, ...], option: tuple[str, Any], run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr("twostroke.models.checkpoints.resolve.fetch", fetch)
    refused = run(*command, "--model", "qwen2.5-coder-3b", *option, stdin="a\n")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [("chat", "gemma3-270m"), ("chat", "--when-full", "never"), ("chat", "--load", "/no/such/file")],
    ids=" ".join,
)
def test_nothing_is_fetched_for_a_chat_that_cannot_be(
    arguments: tuple[str, ...], run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.api.open_engine.open_checkpoint", lambda *_, **__: pytest.fail("fetched"))
    refused = run(*arguments, stdin="a\n")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        (
            ("generate",),
            "auto|native|native-i8mm|native-neon|native-amx|native-avx512bf16|native-avx512|native-avx2|triton",
        ),
        (("generate",), "radix|hash|off"),
        (("chat",), "drop|window|refuse"),
        (("serve",), "refuse|drop|window"),
        (("serve",), "text|json"),
        (("simulate",), "round-robin|least-loaded|kv-aware"),
        (("worker",), "both|prefill|decode"),
    ],
    ids=str,
)
def test_help_shows_choices(command: tuple[str, ...], choices: str, run: Callable[..., Result]) -> None:
    shown = run(*command, "--help").stdout  # a long column is broken into lines
    cells = "".join(re.sub(r"\s+", "", cell) for cell in re.findall(r"  ([\w|-]+)  ", shown))
    assert choices in cells


def test_shells_complete_commands_options_and_choices(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the shell is looked for among the parents of this process, of which some may have ended.
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("bash", "/bin/bash"))
    shown = run("--show-completion")
    assert "_TWOSTROKE_COMPLETE=complete_bash" in shown.stdout
