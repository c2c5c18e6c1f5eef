"""A directory of pages, which any number of processes share.

    FORMAT                      which version of this layout it has
    ledger                      what it takes (`ledger`)
    pages/<scope>/<key>         a page of a prompt (`files`); the scope stands for a model, under the user's key
    pages/<scope>/about.json    which model that is, for people
    contexts/<model>/           what named contexts of a server are (`server/contexts/saved.py`)
    owners/<owner>/             one process: its lock, what it is writing, and the pages of its values (`owners`)

The files are the truth: a page is there if its file is. The time of a file says when its page was used last, and is
always later than that of the page after it. So whoever deletes the oldest first never leaves a page without the one
before it. Readers take no lock.
"""

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.errors import KVError
from twostroke.kv.tiers.disk.files import disk_bytes
from twostroke.kv.tiers.disk.ledger import Account, Ledger
from twostroke.kv.tiers.names import PageName
from twostroke.kv.tiers.page_format import PageFormat

VERSION = 1
FORMAT = f"twostroke pages {VERSION}\n"
ABOUT = "about.json"
STEP_NS = 1000  # from a page's time to that of the next one
_PAGE = re.compile(r"[0-9a-f]{64}")
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page's file, or what else has a page's name."""

    path: str
    size: int  # bytes that it takes; used: when it was used last, in ns since 1970
    used: int
    regular: bool  # whether it is a file; what is not (a directory, a pipe, a link) holds no page


class Directory:
    """An open directory."""

    def __init__(self, root: Path, ledger: Ledger, writable: bool) -> None:
        # root: its path; ledger: what it takes; writable: False if nothing can be written there
        self.root, self.ledger, self.writable = root, ledger, writable
        self.pages, self.owners = root / "pages", root / "owners"

    @classmethod
    def open(cls, root: Path, make: bool) -> "Directory":
        """Open a directory, and make it if it is not there and `make`. Raises KVError."""
        root = Path(os.path.abspath(root))
        try:
            writable = _prepare(root, make)
            return cls(root, Ledger(root / "ledger", lambda: _count(root), writable), writable)
        except OSError as error:
            raise KVError(f"{root} cannot be used as a disk tier: {error.strerror}") from None

    @property
    def whole(self) -> bool:
        """Whether nobody has deleted it, or put something else in its place."""
        return self.ledger.current and self.pages.is_dir() and self.owners.is_dir()

    def restore(self) -> bool:
        """Make what is missing again. Returns whether anything was. Raises KVError or OSError."""
        if self.whole:
            return False
        _prepare(self.root, make=True)
        self.ledger.reopen()
        return True

    def path(self, page_format: PageFormat, key: bytes) -> str:
        """The file of a page of a prompt."""
        return f"{self.pages}/{page_format.scope}/{key.hex()}"

    def holder(self, page_format: PageFormat, key: bytes) -> PageFormat:
        """The format under which a page is there; the first if it is not."""
        formats = (page_format, *page_format.others) if page_format.others else ()
        return next((one for one in formats if os.path.exists(self.path(one, key))), page_format)

    def commit(self, partial: str, page_format: PageFormat, name: PageName, account: Account) -> bool:
        """Give a whole file the name of its page; the account is held. Raises OSError.

        Returns False, and deletes the file, if the page before it is not there or somebody else was quicker.
        """
        self._make_scope(page_format, account)
        final, used = self.path(page_format, name.key), time.time_ns()
        try:
            if name.number:
                parent = self.path(self.holder(page_format, name.parent), name.parent)
                used = min(used, os.stat(parent).st_mtime_ns) - STEP_NS
        except FileNotFoundError:
            self.delete(partial, account)
            return False
        if os.path.exists(final):
            self.delete(partial, account)
            return False
        os.utime(partial, ns=(used, used))
        with self.growing(self.pages / page_format.scope, account):
            os.rename(partial, final)
        return True

    def touch(self, page_format: PageFormat, names: Sequence[PageName]) -> None:
        """Note that the leading pages of a prompt were used now."""
        with suppress(OSError), self.ledger.locked():  # else a page could become older than one after it
            used = time.time_ns()
            for name in names:
                path = self.path(self.holder(page_format, name.key), name.key)
                if os.stat(path).st_mtime_ns < used:
                    os.utime(path, ns=(used, used))
                used -= STEP_NS

    def _make_scope(self, page_format: PageFormat, account: Account) -> None:
        """Make the directory of a model's pages if it is not there; the account is held. Raises OSError."""
        path = self.pages / page_format.scope
        if not (path / ABOUT).exists():
            with self.growing(self.pages, account), self.growing(path, account):
                path.mkdir(mode=0o700, exist_ok=True)
                partial = path / f"{secrets.token_hex(8)}.partial"
                try:
                    partial.write_text(json.dumps(page_format.about))
                    partial.rename(path / ABOUT)
                finally:
                    partial.unlink(missing_ok=True)
                account.used += disk_bytes((path / ABOUT).stat())

    def growing(self, path: str | Path, account: Account) -> "_CountedGrowth":
        """What a directory of files grows by inside of this context is counted."""
        return _CountedGrowth(str(path), account)

    def scopes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The models that have pages here: (scope, what about.json says)."""
        with suppress(FileNotFoundError):
            for item in sorted(self.pages.iterdir()):
                try:
                    facts = json.loads((item / ABOUT).read_text())
                except (OSError, ValueError):
                    facts = None
                yield item.name, facts if isinstance(facts, dict) else {}

    def entries(self, scope: str) -> list[PageFile]:
        """The pages of one model. Files with other names are left out."""
        found = list[PageFile]()
        with suppress(FileNotFoundError), os.scandir(self.pages / scope) as items:
            for item in items:
                if _PAGE.fullmatch(item.name):
                    with suppress(FileNotFoundError):  # another process was quicker
                        status = item.stat(follow_symlinks=False)
                        regular = stat.S_ISREG(status.st_mode)
                        found.append(PageFile(item.path, disk_bytes(status), status.st_mtime_ns, regular))
        return found

    def count(self) -> int:
        """What all of it takes, counted."""
        return _count(self.root)

    def delete(self, path: str, account: Account) -> bool:
        """Delete a file, or an empty directory in its place, and count it; the account is held.

        Returns whether it was there. Raises OSError.
        """
        try:
            status = os.lstat(path)
            size = disk_bytes(status)
            (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(path)
        except FileNotFoundError:
            return False
        account.used -= size
        return True

    def close(self) -> None:
        self.ledger.close()


class _CountedGrowth:
    """Counts what a directory grows by."""

    def __init__(self, path: str, account: Account) -> None:
        self._path, self._account = path, account

    def __enter__(self) -> None:
        self._before = self._size()

    def __exit__(self, *_: object) -> None:
        self._account.used += self._size() - self._before

    def _size(self) -> int:
        try:
            return disk_bytes(os.stat(self._path))
        except FileNotFoundError:
            return 0


def _prepare(root: Path, make: bool) -> bool:
    """Make what is missing. Returns whether the directory can be written to. Raises KVError or OSError."""
    if not make and not root.is_dir():
        raise KVError(f"there is no directory {root}")
    with suppress(FileExistsError):
        root.mkdir(parents=True, mode=0o700)
    if not root.is_dir():
        raise KVError(f"{root} is no directory: a disk tier needs one")
    file = root / "FORMAT"
    try:
        version = file.read_text()
    except FileNotFoundError:
        version = None
    if version is None:
        own = re.compile(r"lost\+found|ledger|pages|owners|FORMAT.*")
        if not all(own.fullmatch(item.name) for item in root.iterdir()):
            raise KVError(f"{root} has other files in it: a disk tier needs a directory of its own")
        if not make:
            raise KVError(f"{root} is not a disk tier: it is empty")
        partial = root / f"FORMAT.{secrets.token_hex(8)}"
        partial.write_text(FORMAT)
        partial.rename(file)
    elif version != FORMAT:
        raise KVError(f"{root} was written by another version of Twostroke: delete it, or choose another directory")
    try:
        for name in ("pages", "owners"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        return os.access(root, os.W_OK)
    except OSError as error:
        if error.errno in _READ_ONLY:
            return False
        raise


def _count(root: Path) -> int:
    """What a directory takes, as `du` counts it. What is deleted meanwhile is left out."""
    total, left = 0, [str(root)]
    while left:
        path = left.pop()
        with suppress(FileNotFoundError):
            total += disk_bytes(os.lstat(path))
            with os.scandir(path) as items:
                for item in items:
                    with suppress(FileNotFoundError):
                        if item.is_dir(follow_symlinks=False):
                            left.append(item.path)
                        else:
                            total += disk_bytes(item.stat(follow_symlinks=False))
    return total
