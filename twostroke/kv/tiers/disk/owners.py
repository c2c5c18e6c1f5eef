"""What belongs to one running process: the files that it is writing, and the pages of its values.

A process holds the lock of its own directory as long as it lives, however it ends. So who gets that lock may delete
what is there. Nothing is ever deleted for being old: a process that was stopped is not dead.
"""

import fcntl
import os
import secrets
from contextlib import suppress

from twostroke.kv.tiers.disk.directory import Directory
from twostroke.kv.tiers.disk.files import disk_bytes
from twostroke.kv.tiers.disk.ledger import Account

LOCK = "lock"


class Owner:
    """This process, in one directory."""

    def __init__(self, directory: Directory, account: Account) -> None:
        """`account` is held. Raises OSError."""
        self._directory = directory
        self.path = f"{directory.owners}/{secrets.token_hex(8)}"
        with directory.growing(directory.owners, account):
            os.mkdir(self.path, 0o700)
        account.used += disk_bytes(os.stat(self.path))
        self._lock = os.open(f"{self.path}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def private(self, scope: str, key: bytes) -> str:
        """The file of a page of a value."""
        return f"{self.path}/{scope}-{key.hex()}"

    def partial(self) -> str:
        """A name for a file that is being written."""
        return f"{self.path}/{secrets.token_hex(8)}.partial"

    def leave(self, account: Account) -> None:
        """Delete everything; `account` is held. Raises OSError."""
        try:
            _delete(self._directory, self.path, account)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of its directory as it is: somebody else has deleted it."""
        os.close(self._lock)


def sweep(directory: Directory, account: Account) -> bool:
    """Delete what dead processes have left; `account` is held. Returns whether there were any. Raises OSError."""
    dead = False
    for name in os.listdir(directory.owners):
        path = f"{directory.owners}/{name}"
        try:
            lock = os.open(f"{path}/{LOCK}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # it died while it came or went: both happen while the account is held
            _delete(directory, path, account)
            dead = True
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _delete(directory, path, account)
            dead = True
        finally:
            os.close(lock)
    return dead


def private_files(directory: Directory) -> list[tuple[str, int]]:
    """The pages of values that processes hold: (scope, bytes that one takes)."""
    found = list[tuple[str, int]]()
    for owner in os.listdir(directory.owners):
        with suppress(FileNotFoundError), os.scandir(f"{directory.owners}/{owner}") as items:
            for item in items:
                scope, _, key = item.name.partition("-")
                if key:
                    with suppress(FileNotFoundError):
                        found.append((scope, disk_bytes(item.stat())))
    return found


def _delete(directory: Directory, path: str, account: Account) -> None:
    directory.ledger.invalidate()
    names = os.listdir(path)
    for name in sorted(names, key=lambda name: name == LOCK):  # the lock last: without it the rest is deleted too
        directory.delete(f"{path}/{name}", account)
    account.used -= disk_bytes(os.stat(path))
    os.rmdir(path)
