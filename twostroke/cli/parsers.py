"""Texts of the command line as values."""

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import typer

from twostroke.errors import InvalidRequest
from twostroke.fields import parsed_value

# As GNU's tools have it: 2G and 2GiB are 2 x 1024^3 bytes, 2GB are 2 x 1000^3.
UNITS = {
    "": 1,
    **{unit: 1 << 10 * i for i, letter in enumerate("kmgt", 1) for unit in (letter, f"{letter}ib")},
    **{f"{letter}b": 10 ** (3 * i) for i, letter in enumerate("kmgt", 1)},
}


def parse_size(text: str) -> int:
    """Bytes: `2GiB` or `2G`, `512MiB`, `1.5GB`, or a plain number."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if match is None or match[2] not in UNITS:
        raise typer.BadParameter(f"{text!r} is no size: write 2GiB, 512MiB or a number of bytes")
    return int(match[1]) * UNITS[match[2]] if match[1].isdigit() else int(float(match[1]) * UNITS[match[2]])


def exact_size(count: int) -> str:
    """A number of bytes in the largest unit that divides it, as `parse_size` reads it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % UNITS[unit.lower()] == 0:
            return f"{count // UNITS[unit.lower()]}{unit}"
    return str(count)


def parse_host(text: str) -> str:
    """An address to listen at. It is not empty: a server must not be opened to a network by an unset variable."""
    if not text.strip():
        raise typer.BadParameter("it is empty: give 127.0.0.1 for this machine alone, or 0.0.0.0 for all addresses")
    return text


def expand_paths(command: Any) -> None:
    """Let the paths that a command takes, or a group's commands, begin with ~, from wherever they come."""
    for option in command.params:
        descriptor = getattr(option, "type_descriptor", None)
        if descriptor is not None and descriptor.annotation is Path:
            option.process_value = partial(_expanded, option.process_value)
    for child in getattr(command, "commands", {}).values():
        expand_paths(child)


def _expanded(process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    return process(context, parse_path(value) if isinstance(value, str | Path) else value)


def parse_path(text: str | Path) -> str:
    """A path whose ~ is the home directory: shells leave it in --option=~/path, and files and services have none.

    It is not empty: an unset variable must not stand for the working directory.
    """
    if not str(text).strip():
        raise typer.BadParameter("it is empty: name a file or a directory (. is the working directory)")
    return os.path.expanduser(text)


def parse_remote(text: str) -> str:
    """The URL of a server that speaks Redis' protocol. A message never repeats it: it may hold a password."""
    if not re.match(r"(rediss?|unix)://.", text):
        raise typer.BadParameter(
            "write redis://HOST:PORT/DB, rediss://... (TLS) or unix://PATH, as redis://:PASSWORD@HOST:PORT/DB where it "
            "needs a password"
        )
    return text


def without_password(url: str) -> str:
    """A URL to show and to keep: what is before the @ may be a secret."""
    return re.sub(r"://.*@", "://***@", url)


def parse_id(text: str) -> int:
    """A token id."""
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is no token id: write --logit-bias ID=BIAS")
    return int(text)


def parse_pairs(texts: Iterable[str], option: str = "--method-option") -> dict[str, Any]:
    """`key=value` each. Raises BadParameter for another form, and for a key that comes twice."""
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form key=value", param_hint=option)
        name = key.strip().replace("-", "_")
        if name in pairs:
            raise typer.BadParameter(f"{name} is given twice", param_hint=option)
        pairs[name] = parsed_value(value.strip())
    return pairs


def require_file(path: Path) -> None:
    """Raises InvalidRequest if there is no such file, before a model is loaded."""
    if not path.is_file():
        raise InvalidRequest(
            f"{path} cannot be read: {'it is a directory' if path.is_dir() else 'there is no such file'}"
        )


def require_directory(option: str, path: Path | None) -> None:
    """Raises InvalidRequest if a file that is to be written has no directory, before it is made."""
    if path is not None and not path.parent.is_dir():
        raise InvalidRequest(f"{option} {path}: there is no directory {path.parent}")
