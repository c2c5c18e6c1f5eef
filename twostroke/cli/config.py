"""Options from environment variables and from a file: `TWOSTROKE_KV_BYTES=2GiB`, or `--config FILE`.

An option of the command line comes first, then its variable, then the file, then the default. A file is TOML. Its keys
are options without the dashes; a table holds those of one command:

    model = "qwen2.5-coder-1.5b"
    kv-bytes = "2GiB"

    [serve]
    port = 8080
    cors = ["https://chat.example"]
"""

import json
import os
import tomllib
from collections.abc import Iterator
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from twostroke.cli.parsers import without_password
from twostroke.errors import InvalidRequest

SOURCES = {"COMMANDLINE": "option", "ENVIRONMENT": "variable", "DEFAULT_MAP": "file"}
ACTIONS = {"help", "version", "install_completion", "show_completion"}  # options that do something and end
SECRETS = {"api_key"}  # options whose values are never shown
_RUNNING: ContextVar[typer.Context] = ContextVar("running")  # the command that is being parsed or runs


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of `--config`: the file's values become the defaults of the command's options."""
    _RUNNING.set(context)
    if path is not None and not context.resilient_parsing:
        context.default_map = values_for(context, path)
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        is_eager=True,  # read before other options, whose defaults it sets
        callback=read_config,
        metavar="FILE",
        help="Options in a TOML file; --NAME here, or the variable TWOSTROKE_NAME, comes first.",
        show_default="none",
    ),
]


def variable_of(option: Any) -> str:
    """The name of an option's environment variable."""
    return f"TWOSTROKE_{_key(option).upper().replace('-', '_')}"


def name_variables(command: Any) -> None:
    """Let every option of a command, or of a group's commands, be set by its variable."""
    for option in [*_options(command), *(one for one in command.params if one.name == "config")]:
        own = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
        option.envvar = list(dict.fromkeys([variable_of(option), *own]))
        option.show_envvar = False  # a sentence of --config says it for all of them
    for child in getattr(command, "commands", {}).values():
        name_variables(child)


def source_of(name: str) -> str:
    """Where a parameter of the running command has its value from: "option", "variable", "file" or "default"."""
    source = _RUNNING.get().get_parameter_source(name)
    return SOURCES.get(source.name if source is not None else "", "default")


def print_sources() -> None:
    """Show the running command's options as a file for `--config`, each with its source; defaults are comments."""
    context = _RUNNING.get()
    argument = context.params.get("model_argument")
    given = context.params | ({"model": argument} if argument else {})
    for one in _options(context.command):
        value, source = given[one.name], source_of(one.name)
        if value is None or value == () or one.name == "check_config":
            continue
        if one.name == "model" and argument:
            source = "argument"
        elif source == "variable":
            source = next(name for name in one.envvar if name in os.environ)
        elif source == "file":
            source = str(context.params["config"])
        secret = one.name in SECRETS or without_password(str(value)) != str(value)
        line = f"{_key(one)} = {'...' if secret else json.dumps(value, default=str)}"
        typer.echo(f"# {line}" if source == "default" else f"{'# ' if secret else ''}{line}  # {source}")


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file has. Raises InvalidRequest."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not TOML: {error}") from None


def values_for(context: typer.Context, path: Path) -> dict[str, Any]:
    """The file's values for the command that runs. Raises InvalidRequest for what cannot be read, or is unknown."""
    table = read_toml(path)
    names, part = list[str](), context
    while part.parent is not None:  # not `command_path`, which has several words for `python -m twostroke`
        names.insert(0, str(part.info_name))
        part = part.parent
    return _collect(path, table, context.find_root().command, names, "")


def _collect(path: Path, table: dict[str, Any], command: Any, names: list[str] | None, where: str) -> dict[str, Any]:
    """The values of a table, then of its sub-tables on the way to the command; `names` is None beside that way."""
    known = {_key(option): option for one in _leaves(command) for option in _options(one)}
    own = {} if names is None else {_key(option): option for option in _options(_at(command, names))}
    children = getattr(command, "commands", {})
    found: dict[str, Any] = {}
    tables: dict[str, Any] = {}
    for given, value in table.items():
        key = given.replace("_", "-")
        if isinstance(value, dict) and given in children:
            on_the_way = names[1:] if names and names[0] == given else None
            tables |= _collect(path, value, children[given], on_the_way, f"{where}{given}.")
        elif key not in known:
            near = get_close_matches(key, [*known, *children], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidRequest(f"{path}: there is no option or command {where}{given}{hint}")
        elif key in own:
            found[own[key].name] = _value(path, f"{where}{given}", own[key], value)
    return found | tables


def _value(path: Path, where: str, option: Any, value: Any) -> Any:
    """A value of TOML in the form in which the command line gives it."""
    if isinstance(value, bool) != bool(option.is_flag) or isinstance(value, dict):
        wanted = "true or false" if option.is_flag else "a text or a number"
        raise InvalidRequest(f"{path}: {where} must be {wanted}, not {value!r}")
    if option.multiple:
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        raise InvalidRequest(f"{path}: {where} takes one value, not a list")
    return value if option.is_flag else str(value)


def _at(command: Any, names: list[str]) -> Any:
    for name in names:
        command = command.commands[name]
    return command


def _leaves(command: Any) -> Iterator[Any]:
    """The commands of a group, and of groups in it; a command itself."""
    children = getattr(command, "commands", None)
    if children is None:
        yield command
    for child in (children or {}).values():
        yield from _leaves(child)


def _options(command: Any) -> list[Any]:
    """The options of one command that variables and files may set."""
    left_out = ACTIONS | {"config"}
    return [one for one in command.params if one.param_type_name == "option" and one.name not in left_out]


def _key(option: Any) -> str:
    """The option's long name, without dashes in front."""
    return next(name for name in option.opts if name.startswith("--")).removeprefix("--")
