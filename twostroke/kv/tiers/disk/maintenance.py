"""What this user has in a directory: shown, checked, deleted, by `twostroke cache`."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from twostroke.errors import KVError
from twostroke.kv.tiers.disk import files
from twostroke.kv.tiers.disk.directory import Directory, PageFile
from twostroke.kv.tiers.disk.ledger import Account
from twostroke.kv.tiers.disk.owners import private_files, sweep
from twostroke.kv.tiers.page_format import scope
from twostroke.kv.tiers.store import StoreUsage
from twostroke.system.user_key import user_keys

FOREIGN = "(written with another key)"
UNNAMED = "(a model whose about.json is missing)"


@dataclass(frozen=True)
class _DiskPages:
    """The pages of one model."""

    scope: str
    model: str
    own: bool  # whether they are under this user's key
    entries: list[PageFile]
    values: list[int]  # bytes of each page that belongs to a value

    def usage(self, gone: list[PageFile], *, damaged: int = 0, unchecked: int = 0) -> StoreUsage:
        """What is there without the pages `gone`."""
        size = sum(entry.size for entry in self.entries) + sum(self.values) - sum(entry.size for entry in gone)
        pages = len(self.entries) - len(gone)
        return StoreUsage(self.model, pages, len(self.values), size, damaged, unchecked, damaged - len(gone))


def inspect(path: Path) -> list[StoreUsage]:
    """What is there, by model. Raises KVError."""
    with _opened(path) as (directory, keys):
        return [one.usage([]) for one in _by_model(directory, keys)]


def verify(path: Path) -> list[StoreUsage]:
    """Check every page, delete those that are wrong, and return what is there then. Raises KVError.

    Pages under another key, and those that cannot be read, are not checked, and stay.
    """
    with _opened(path) as (directory, keys):
        return [_verified(directory, one, keys) for one in _by_model(directory, keys)]


def clear(path: Path, model: str | None = None) -> list[StoreUsage]:
    """Delete the pages of prompts of one model, or of all, and return what was deleted. Raises KVError.

    Pages of values that running processes hold stay, and so does what cannot be deleted.
    """
    cleared = list[StoreUsage]()
    with _opened(path) as (directory, keys), directory.ledger.locked() as account:
        directory.ledger.invalidate()
        sweep(directory, account)
        for one in _by_model(directory, keys):
            if model in (None, one.model):
                entries = sorted(one.entries, key=lambda entry: entry.used)
                gone = [entry for entry in entries if _deleted(directory, entry, account)]
                size, left = sum(entry.size for entry in gone), len(entries) - len(gone)
                cleared.append(StoreUsage(one.model, len(gone), 0, size, left=left))
        account.used = directory.count()
    return cleared


def _by_model(directory: Directory, keys: Sequence[bytes]) -> list[_DiskPages]:
    private, found = private_files(directory), list[_DiskPages]()
    for name, facts in directory.scopes():
        entries, values = directory.entries(name), [size for owner, size in private if owner == name]
        if not entries and not values:
            continue
        try:
            own, model = _is_scope(bytes.fromhex(facts["namespace"]), name, keys), str(facts["model"])
        except (KeyError, ValueError, TypeError):
            own, model = any(_is_own(entry, name, keys) for entry in entries), UNNAMED
        shown = "".join(filter(str.isprintable, model)) if own else FOREIGN
        found.append(_DiskPages(name, shown, own, entries, values))
    return sorted(found, key=lambda one: one.model)


def _is_own(entry: PageFile, name: str, keys: Sequence[bytes]) -> bool:
    """Whether a page says that it is of a namespace which has this scope under the user's key."""
    with suppress(OSError):
        stated = files.peek(entry.path) if entry.regular else None
        return stated is not None and _is_scope(stated.namespace, name, keys)
    return False


def _is_scope(namespace: bytes, name: str, keys: Sequence[bytes]) -> bool:
    """Whether a namespace's digest has this scope under one of the user's keys."""
    return any(scope(namespace, key) == name for key in keys)


def _verified(directory: Directory, one: _DiskPages, keys: Sequence[bytes]) -> StoreUsage:
    if not one.own:
        return one.usage([], unchecked=len(one.entries))
    gone, damaged, unchecked = list[PageFile](), 0, 0
    for entry in one.entries:
        try:
            if _is_right(entry, one.scope, keys):
                continue
        except FileNotFoundError:  # deleted meanwhile
            continue
        except OSError:
            unchecked += 1
            continue
        damaged += 1
        with suppress(OSError), directory.ledger.locked() as account:
            if _deleted(directory, entry, account):
                gone.append(entry)
    return one.usage(gone, damaged=damaged, unchecked=unchecked)


def _is_right(entry: PageFile, name: str, keys: Sequence[bytes]) -> bool:
    """Whether a page is what its name says. Raises OSError: it cannot be read."""
    if not entry.regular:
        return False
    with files.opened(entry.path) as file:
        found = next((page for key in keys if (page := files.verify_file(file, key)) is not None), None)
    named = found is not None and found.name.right and found.name.key.hex() == os.path.basename(entry.path)
    return named and found is not None and _is_scope(found.namespace, name, keys)


def _deleted(directory: Directory, entry: PageFile, account: Account) -> bool:
    """Whether a page is gone now; the account is held."""
    try:
        directory.delete(entry.path, account)
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path) -> Generator[tuple[Directory, Sequence[bytes]]]:
    """The directory, and the user's key. Raises KVError, also for what fails inside."""
    directory, keys = Directory.open(path, make=False), user_keys(make=False)
    try:
        yield directory, keys
    except OSError as error:
        raise KVError(f"{directory.root} cannot be used: {error.strerror or error}") from None
    finally:
        directory.close()
