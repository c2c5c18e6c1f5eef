"""What a directory takes and what was written to it today: a small file that all processes share.

Whoever changes what the directory takes holds the file's lock while doing so. The kernel drops the lock of a process
that dies. If it dies between two steps the file may be wrong: the next process that opens the directory counts again.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from twostroke.system.interrupts import DeferredInterrupts

LIMIT_S = 5.0  # seconds to wait for the lock: a process that was stopped may hold it
RETRY_S = 1e-3
DAY_S = 86400

_RECORD = struct.Struct("<8sQQQ")
_MAGIC = b"2SKVLEDG"


class LedgerBusy(OSError):
    """Another process holds the lock, and does not give it back."""


@dataclass
class Account:
    """Attributes:
    used: bytes that the directory takes, as `du` counts them.
    day: days since 1970; written: bytes written on that day.
    """

    used: int
    day: int = 0
    written: int = 0

    def wrote(self, size: int) -> None:
        """Count bytes that are written now."""
        self.used += size
        self.written = self.written_today + size
        self.day = today()

    @property
    def written_today(self) -> int:
        return self.written if self.day == today() else 0


class Ledger:
    """The shared file. Any thread may use it."""

    def __init__(self, path: Path, count: Callable[[], int], writable: bool = True) -> None:
        """`count` gives what the directory takes, for a file that is new or damaged. Raises OSError."""
        self._path, self._count, self._writable = path, count, writable
        self._file = self._open()
        self._lock = threading.Lock()
        self._doubted = False

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY
        return os.open(self._path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @property
    def current(self) -> bool:
        """Whether the file that is open is still the one at its path."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def reopen(self) -> None:
        """Open what is at the path now, and make it if nothing is. Raises OSError."""
        with DeferredInterrupts(), self._lock:
            if self._file != -1:
                before, self._file = self._file, self._open()
                os.close(before)

    @contextmanager
    def locked(self) -> Generator[Account]:
        """The account, for reading and changing; what was changed is written at the end. Ctrl-C waits.

        Raises OSError: LedgerBusy, or the directory can only be read.
        """
        if not self._writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with DeferredInterrupts(), self._held() as account:
            yield account

    @contextmanager
    def _held(self) -> Generator[Account]:
        deadline = time.monotonic() + LIMIT_S
        if not self._lock.acquire(timeout=LIMIT_S):
            raise LedgerBusy("the directory's ledger is in use")
        try:
            if self._file == -1:
                raise LedgerBusy("the directory is closed")
            self._take(deadline)
            self._doubted = False
            try:
                account = self._read()
                if account is None:
                    self.write(Account(0))  # the file itself takes space too
                    account = Account(self._count())
                try:
                    yield account
                except BaseException:
                    if not self._doubted:
                        self.write(account)
                    raise
                self.write(account)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def write(self, account: Account) -> None:
        """Write the account now, while the lock is held: before what it counts, so that a cap is never exceeded."""
        os.pwrite(self._file, _RECORD.pack(_MAGIC, max(0, account.used), account.day, account.written), 0)

    def invalidate(self) -> None:
        """Whoever comes next counts again, unless the account is written before; the lock is held.

        Called before the traces of a process are deleted, which are else the sign that the account may be wrong.
        """
        self._doubted = True
        os.pwrite(self._file, bytes(_RECORD.size), 0)

    def peek(self) -> Account | None:
        """The account as it stands, without the lock; None if it cannot be read."""
        with suppress(OSError):
            return self._read()
        return None

    def close(self) -> None:
        """Let go of the file. It cannot be used after that."""
        with DeferredInterrupts():
            if self._lock.acquire(timeout=LIMIT_S):  # else a thread hangs in it
                file, self._file = self._file, -1
                self._lock.release()
                if file != -1:
                    os.close(file)

    def _take(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LedgerBusy("another process holds the directory's ledger, and does not go on") from None
                time.sleep(RETRY_S)

    def _read(self) -> Account | None:
        data = os.pread(self._file, _RECORD.size, 0)
        if len(data) != _RECORD.size:
            return None
        magic, *numbers = _RECORD.unpack(data)
        return Account(*numbers) if magic == _MAGIC else None


def today() -> int:
    """Days since 1970, in UTC."""
    return int(time.time()) // DAY_S
