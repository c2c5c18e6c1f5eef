"""What this user has in a remote tier: shown, checked, deleted, by `twostroke cache`."""

import json
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from twostroke.errors import KVError
from twostroke.kv.tiers.remote.connection import (
    CallTimedOut,
    Command,
    ErrorReply,
    RedisConnection,
    ServerUnavailable,
    accepted,
)
from twostroke.kv.tiers.remote.connection_pool import CircuitOpen, ConnectionPool
from twostroke.kv.tiers.remote.format import ABOUT, PAGE, PREFIX, PRIVATE, right, scope
from twostroke.kv.tiers.store import StoreUsage
from twostroke.system.user_key import user_keys

LIMIT_S = 60.0  # for one batch of keys
SCANNED = 512  # keys


@dataclass
class _RemotePages:
    """The keys of one namespace of this user."""

    model: str
    pages: list[bytes]
    private: list[bytes]
    bytes: int = 0
    damaged: int = 0

    @property
    def holding(self) -> StoreUsage:
        return StoreUsage(self.model, len(self.pages) - self.damaged, len(self.private), self.bytes, self.damaged)


def inspect(url: str) -> list[StoreUsage]:
    """What is there, by model. Raises KVError."""
    with _opened(url) as (connection, keys):
        return [one.holding for one in _scopes(connection, keys)]


def verify(url: str) -> list[StoreUsage]:
    """Check every page, delete those that are wrong, and return what is there then. Raises KVError."""
    with _opened(url) as (connection, keys):
        scopes = _scopes(connection, keys)
        for one in scopes:
            for name in one.pages:
                (value,) = _asked(connection, [("GET", name)])
                if value is not None and not any(right(name, value, key) for key in keys):
                    _asked(connection, [("DEL", name)])
                    one.damaged += 1
                    one.bytes -= len(value)
        return [one.holding for one in scopes]


def clear(url: str, model: str | None = None) -> list[StoreUsage]:
    """Delete the pages of prompts of one model, or of all, and return what was deleted. Raises KVError.

    Private pages stay: values of running processes need them, and they go by themselves after that.
    """
    with _opened(url) as (connection, keys):
        scopes = [one for one in _scopes(connection, keys) if model in (None, one.model)]
        for one in scopes:
            one.private, one.bytes = [], sum(_asked(connection, [("STRLEN", name) for name in one.pages]))
            for name in reversed(one.pages):
                _asked(connection, [("DEL", name)])
        return [one.holding for one in scopes]


def _scopes(connection: RedisConnection, keys: Sequence[bytes]) -> list[_RemotePages]:
    """This user's namespaces, by the models' names. Keys of other users are left out."""
    by_scope: defaultdict[str, dict[str, list[bytes]]] = defaultdict(lambda: {PAGE: [], PRIVATE: []})
    abouts = list[bytes]()
    for name in _keys(connection):
        parts = name.decode(errors="replace").split(":")
        if len(parts) == 5 and parts[3] in (PAGE, PRIVATE):
            by_scope[parts[2]][parts[3]].append(name)
        elif len(parts) == 4 and parts[3] == ABOUT:
            abouts.append(name)
    scopes = list[_RemotePages]()
    for name in abouts:
        (text,) = _asked(connection, [("GET", name)])
        try:
            facts = json.loads(text or b"")
            model, namespace = str(facts["model"]), bytes.fromhex(facts["namespace"])
        except (ValueError, KeyError, TypeError):
            continue
        own = name.decode().split(":")[2]
        if own in [scope(namespace, key) for key in keys]:
            found = by_scope[own]
            if not any(found.values()):
                continue
            size = sum(_asked(connection, [("STRLEN", one) for kind in found.values() for one in kind]))
            scopes.append(_RemotePages("".join(filter(str.isprintable, model)), found[PAGE], found[PRIVATE], size))
    return sorted(scopes, key=lambda one: one.model)


def _keys(connection: RedisConnection) -> set[bytes]:
    found, cursor = set[bytes](), b"0"
    while True:
        (reply,) = _asked(connection, [("SCAN", cursor, "MATCH", PREFIX + "*", "COUNT", SCANNED)])
        cursor, names = reply
        found.update(names)
        if cursor == b"0":
            return found


def _asked(connection: RedisConnection, commands: Sequence[Command]) -> list[Any]:
    """Replies to commands; each batch has its time. Raises ErrorReply, ServerUnavailable or CallTimedOut."""
    found = list[Any]()
    for start in range(0, len(commands), SCANNED):
        connection.begin(time.monotonic() + LIMIT_S)
        found += accepted(connection.replies(commands[start : start + SCANNED]))
    return found


@contextmanager
def _opened(url: str) -> Generator[tuple[RedisConnection, Sequence[bytes]]]:
    """A connection, and the user's key. Raises KVError, also for what fails inside."""
    pool, keys = ConnectionPool(url), user_keys(make=False)
    if not keys:
        raise KVError("there is no key of this user: nothing of theirs can be in a remote tier")
    try:
        with pool.connection(LIMIT_S) as connection:
            yield connection, keys
    except (CircuitOpen, ServerUnavailable, CallTimedOut, ErrorReply) as error:
        raise KVError(f"{pool.where} does not answer: {pool.describe(error)}") from None
    finally:
        pool.close()
