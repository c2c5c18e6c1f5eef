"""A file of API keys: lines of names and keys, or TOML with limits for each name.

    [anna]
    key = "sk-..."                  # or a list of keys; or sha256, the digests of keys, in hexadecimal
    requests_per_minute = 60
    tokens_per_minute = 20_000
    max_parallel_requests = 4
    priority = 10
    models = ["qwen2.5-coder-0.5b"]
    methods = ["plain", "repeat"]
    private = true

No key is kept: only its digest is, and no message has one.
"""

import dataclasses
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.fields import Checked, Rule, declare, flag, integer

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAMES = Rule(tuple, optional=True, each=Rule(str, least=1), words="a list of names")


@dataclass(frozen=True)
class Limits(Checked):
    """What the calls of a key may use; without a limit everything. Checked on construction (InvalidRequest)."""

    requests_per_minute: int | None = integer(None, least=1)  # calls (POST); at most as many at once
    tokens_per_minute: int | None = integer(None, least=1)  # tokens of prompts and of answers
    max_parallel_requests: int | None = integer(None, least=1)  # calls (POST) in flight
    priority: int = integer(-100, least=-100, most=100)  # the soonest that a call may have: lower is sooner
    # models, methods: those that may be used; None for all
    models: tuple[str, ...] | None = declare(None, _NAMES)
    methods: tuple[str, ...] | None = declare(None, _NAMES)
    private: bool = flag(False)  # its prefixes, contexts and stored responses are its own
    admin: bool = flag(False)  # it may watch the engine, empty the prefix cache, and change models (`--manage-models`)


UNLIMITED = Limits(admin=True)


@dataclass(frozen=True)
class ApiKey:
    """An accepted key: its SHA-256, the name that logs and metrics have ("" without one), and its limits."""

    digest: bytes = dataclasses.field(repr=False)
    name: str = ""
    limits: Limits = UNLIMITED

    @classmethod
    def of(cls, key: str, name: str = "", limits: Limits = UNLIMITED) -> "ApiKey":
        """Of the key itself."""
        return cls(digest_of(key.encode()), name, limits)


def digest_of(key: bytes) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file, which is TOML if its name ends with .toml.

    Otherwise it has `KEY` or `NAME KEY` on each line; empty lines and those that begin with # are skipped.

    Raises InvalidRequest if it cannot be read, has no key, or has something of another form.
    """
    where = f"the file of API keys, {path}"
    try:
        text = path.read_text(encoding="utf-8-sig")  # Notepad begins with a mark
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise InvalidRequest(f"{where}, cannot be read: {reason}") from None
    try:
        keys = list(_of_tables(text) if path.suffix == ".toml" else _of_lines(text))
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if not keys:
        raise InvalidRequest(f"{where}, has no key: give it at least one")
    names: dict[bytes, str] = {}
    for key in keys:
        if (other := names.setdefault(key.digest, key.name)) != key.name:
            raise InvalidRequest(f"{where}: {other or 'no name'} and {key.name or 'no name'} have the same key")
    return keys


def _of_lines(text: str) -> Iterator[ApiKey]:
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case []:
                continue
            case [first, *_] if first.startswith("#"):
                continue
            case [key]:
                yield ApiKey.of(key)
            case [name, key]:
                yield ApiKey.of(key, name)
            case _:
                raise InvalidRequest(f"line {number} must be KEY, or NAME KEY")


def _of_tables(text: str) -> Iterator[ApiKey]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"it is not TOML: {error}") from None
    for name, table in tables.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"[{name:.80}]: a name has 1 to 64 letters, digits, _, . and -")
        if not isinstance(table, dict):
            raise InvalidRequest(f"{name} must be a table: write [{name}], and its key below as key = ...")
        yield from _of_table(name, table)


def _of_table(name: str, table: Mapping[str, Any]) -> Iterator[ApiKey]:
    known = [field.name for field in dataclasses.fields(Limits)]
    if unknown := sorted(table.keys() - {"key", "sha256", *known}):
        raise InvalidRequest(f"[{name}] has {unknown[0]:.80}: there are key, sha256, {', '.join(known)}")
    try:
        limits = Limits(**{field: value for field, value in table.items() if field in known})
    except InvalidRequest as error:
        raise InvalidRequest(f"[{name}] {error}") from None
    keys, digests = _texts(name, table, "key"), _texts(name, table, "sha256")
    if not keys and not digests:
        raise InvalidRequest(f"[{name}] needs key, or sha256 of one")
    if not all(map(_DIGEST.fullmatch, digests)):
        raise InvalidRequest(f"[{name}] sha256 must be 64 hexadecimal digits")
    if not all(key == key.strip() for key in keys):
        raise InvalidRequest(f"[{name}] key must not begin or end with a space")
    yield from (ApiKey.of(key, name, limits) for key in keys)
    yield from (ApiKey(bytes.fromhex(digest), name, limits) for digest in digests)


def _texts(name: str, table: Mapping[str, Any], field: str) -> list[str]:
    """One text, or a list of them. A message does not show what is wrong with a key."""
    value = table.get(field, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest(f"[{name}] {field} must be a text that is not empty, or a list of such texts")
    return texts
