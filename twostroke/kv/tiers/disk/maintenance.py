"""What this user has in a directory: shown, checked, deleted, by `twostroke cache`."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import KVError
from twostroke.kv.tiers.disk import files
from twostroke.kv.tiers.disk.directory import Directory, PageFile
from twostroke.kv.tiers.disk.owners import private_files, sweep
from twostroke.kv.tiers.page_format import scope
from twostroke.kv.tiers.usage import StoreUsage
from twostroke.system.user_key import user_key

UNKNOWN = "(written with another key)"


@dataclass(frozen=True)
class _DiskPages:
    """The pages of one model."""

    name: str
    model: str
    own: bool
    entries: list[PageFile]
    private: list[int]

    def holding(self, gone: list[PageFile]) -> StoreUsage:
        """What is left without the damaged pages `gone`."""
        size = sum(entry.size for entry in self.entries) + sum(self.private) - sum(entry.size for entry in gone)
        return StoreUsage(self.model, len(self.entries) - len(gone), len(self.private), size, len(gone))


def inspect(path: Path) -> list[StoreUsage]:
    """What is there, by model. Raises KVError."""
    with _opened(path) as (directory, key):
        return [one.holding([]) for one in _scopes(directory, key)]


def verify(path: Path) -> list[StoreUsage]:
    """Check every page, delete those that are wrong, and return what is there then. Raises KVError.

    Pages under another key cannot be checked, and stay.
    """
    with _opened(path) as (directory, key):
        return [one.holding(_damaged(directory, one, key)) for one in _scopes(directory, key)]


def clear(path: Path, model: str | None = None) -> list[StoreUsage]:
    """Delete the pages of prompts of one model, or of all, and return what was deleted. Raises KVError.

    Pages of values that running processes hold stay.
    """
    cleared = list[StoreUsage]()
    with _opened(path) as (directory, key), directory.ledger.locked() as account:
        directory.ledger.invalidate()
        sweep(directory, account)
        for one in _scopes(directory, key):
            if model not in (None, one.model):
                continue
            for entry in sorted(one.entries, key=lambda entry: entry.used):
                directory.delete(entry.path, account)
            cleared.append(StoreUsage(one.model, len(one.entries), 0, sum(entry.size for entry in one.entries)))
        account.used = directory.count()
    return cleared


def _scopes(directory: Directory, key: bytes) -> list[_DiskPages]:
    private = private_files(directory)
    found = list[_DiskPages]()
    for name, facts in directory.scopes():
        try:
            own = scope(bytes.fromhex(facts["namespace"]), key) == name
            model = "".join(filter(str.isprintable, str(facts["model"]))) if own else UNKNOWN
        except (KeyError, ValueError, TypeError):
            own, model = False, UNKNOWN
        entries, values = directory.entries(name), [size for owner, size in private if owner == name]
        if entries or values:
            found.append(_DiskPages(name, model, own, entries, values))
    return sorted(found, key=lambda one: one.model)


def _damaged(directory: Directory, one: _DiskPages, key: bytes) -> list[PageFile]:
    """The pages that are not what their names say. They are deleted."""
    wrong = list[PageFile]()
    if not one.own:
        return wrong
    for entry in one.entries:
        with suppress(OSError):  # deleted meanwhile, or it cannot be read now
            with files.opened(entry.path) as file:
                found = files.verify_file(file, key)
            named = found is not None and (scope(found.namespace, key), found.name.key.hex()) == (
                one.name,
                os.path.basename(entry.path),
            )
            if found is None or not named or not found.name.right:
                with directory.ledger.locked() as account:
                    directory.delete(entry.path, account)
                wrong.append(entry)
    return wrong


@contextmanager
def _opened(path: Path) -> Generator[tuple[Directory, bytes]]:
    """The directory, and the user's key. Raises KVError, also for what fails inside."""
    directory, key = Directory.open(path, make=False), user_key(make=False)
    try:
        yield directory, key or bytes(32)
    except OSError as error:
        raise KVError(f"{directory.root} cannot be used: {error.strerror or error}") from None
    finally:
        directory.close()
