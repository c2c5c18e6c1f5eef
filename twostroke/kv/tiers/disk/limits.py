"""What a disk takes: the quota of all processes, the day's budget, what goes to make room, and what it refuses."""

import errno
import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from twostroke.errors import KVError
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.disk import files
from twostroke.kv.tiers.disk.directory import Directory
from twostroke.kv.tiers.disk.ledger import Account, today

log = logging.getLogger(__name__)

GROWTH = 2 * files.BLOCK  # that a new file may make directories grow: its own, and that which it is moved to
KEPT = 0.9  # share of the quota that is left after an eviction, so that there is not one for every page
FREE_BYTES = 256 << 20  # left free for others on the file system
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REST_S = 10.0  # seconds without writing after the disk was full, or failed


class QuotaExceeded(Exception):
    """A file is not written: "full" or "budget"."""


def check_room(root: Path, used: int) -> None:
    """Warn if nothing can be stored in a directory now. `used`: bytes of pages that are there, and may go.

    Raises KVError: nothing ever can, since the file system is too small.
    """
    system = os.statvfs(root)
    whole, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    if whole <= FREE_BYTES:
        raise KVError(
            f"{root} is on a file system of {whole >> 20} MiB, and {FREE_BYTES >> 20} MiB are left free for others: "
            "nothing could ever be stored there, so choose another directory"
        )
    if free + used <= FREE_BYTES:
        log.warning(
            "%s: %d MiB are free on its file system, and %d MiB are left free for others: nothing is stored until "
            "there is more",
            *(root, free >> 20, FREE_BYTES >> 20),
        )


class Quota:
    """What may be written into a directory."""

    def __init__(self, directory: Directory, most_bytes: int, day_bytes: int, counters: TierCounters) -> None:
        """`most_bytes`: of the whole directory; `day_bytes`: written in a day; `counters` counts what is evicted."""
        self._directory, self._counters = directory, counters
        self._most_bytes, self._day_bytes = most_bytes, day_bytes
        self._spent = -1  # the day whose budget is used up

    @property
    def spent(self) -> bool:
        """Whether the day's budget is used up, as far as this process knows."""
        return self._spent == today()

    @contextmanager
    def reserved(self, path: str, size: int, budgeted: bool = False) -> Generator[int]:
        """A new file of `size` bytes with its space taken, which is deleted if writing it fails.

        `budgeted` counts it against the day's budget. Raises QuotaExceeded or OSError.
        """
        with self._directory.ledger.locked() as account:
            if budgeted and account.written_today + size > self._day_bytes:
                self._spent = today()
                raise QuotaExceeded("budget")
            self._make_room(account, -(-size // files.BLOCK) * files.BLOCK + GROWTH)
            account.wrote(size)
            self._directory.ledger.write(account)
            try:
                with self._directory.growing(os.path.dirname(path), account):
                    file, taken = files.reserve(path, size)
            except OSError as error:
                account.used -= size
                if error.errno in _FULL:
                    raise QuotaExceeded("full") from None
                raise
            account.used += taken - size
        try:
            yield file
        except BaseException:
            with suppress(OSError), self._directory.ledger.locked() as account:
                self._directory.delete(path, account)
            raise
        finally:
            os.close(file)

    def _make_room(self, account: Account, size: int) -> None:
        """Delete what was not used for longest until `size` bytes fit; the account is held. Raises QuotaExceeded."""
        free = os.statvfs(self._directory.root)
        wanted = FREE_BYTES + size - free.f_bavail * free.f_frsize
        if account.used + size <= self._most_bytes and wanted <= 0:
            return
        account.used = self._directory.count()
        least = max(account.used + size - self._most_bytes, wanted)
        if least > 0:  # some more than is needed, so that the next pages need none
            self._evict(account, least, least + round((1 - KEPT) * self._most_bytes))

    def _evict(self, account: Account, least: int, size: int) -> None:
        """Delete `size` bytes of pages, or all. If all were less than `least`, none is deleted.

        Raises QuotaExceeded or OSError.
        """
        scopes = [scope for scope, _ in self._directory.scopes()]
        entries = [entry for scope in scopes for entry in self._directory.entries(scope) if entry.regular]
        if sum(entry.size for entry in entries) < least:
            raise QuotaExceeded("full")
        freed = count = 0
        for entry in sorted(entries, key=lambda entry: entry.used):
            if freed >= size:
                break
            if self._directory.delete(entry.path, account):
                freed += entry.size
                count += 1
        self._counters.skipped("evicted", count)


class DiskFailures:
    """The failures of one store.

    Attributes:
        failing: whether it failed since the last thing that was written or read.
        rest_until: when prompts' pages are written again, after a failure.
    """

    def __init__(self, where: str, counters: TierCounters) -> None:
        self._where, self._counters = where, counters
        self.failing, self.rest_until = False, 0.0
        self._told: set[str] = set()

    @property
    def resting(self) -> bool:
        return time.monotonic() < self.rest_until

    def rest(self) -> None:
        """Write nothing for a while."""
        self.rest_until = time.monotonic() + REST_S

    def refused(self, reason: str, pages: int) -> None:
        """Count pages for which there is no room, and say so: once for each day's budget, and once for a full disk."""
        self._counters.skipped(reason, pages)
        if reason == "budget":
            log.info(
                "%s: the day's budget of writes is used up: nothing more goes there until midnight (UTC)", self._where
            )
            return
        self.rest()
        self.failing = True
        self._tell("is full, and has too few pages that may go: nothing is written there for now")

    def failed(self, error: OSError, pages: int, told: bool) -> None:
        """Count a failure of the disk, and say each kind once, unless all of it was told."""
        self._counters.skipped("error", pages)
        self.failing = True
        if not told:
            self._tell(f"does not work: {error.strerror or error}; pages are computed instead")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s %s", self._where, text)
