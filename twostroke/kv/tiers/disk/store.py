"""The disk tier: a directory of pages, shared by all processes of a user, which outlives them.

Nothing is flushed to the device. A process that is killed loses nothing that way, since the system keeps what was
written; a power cut can lose or damage the newest files, and the seal of each is checked when it is read.
"""

import errno
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.disk import files
from twostroke.kv.tiers.disk.directory import Directory
from twostroke.kv.tiers.disk.directory_watch import DirectoryWatch
from twostroke.kv.tiers.disk.ledger import Account
from twostroke.kv.tiers.disk.limits import DiskFailures, Quota, QuotaExceeded, check_room
from twostroke.kv.tiers.disk.owners import Owner, sweep
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.page_format import PageFormat
from twostroke.system.daemon_threads import DaemonThreads
from twostroke.system.futures import fulfil
from twostroke.system.user_key import user_keys

log = logging.getLogger(__name__)

WEAR = 2  # quotas that may be written in a day
READERS = 4  # pages that are read and checked at once


class DiskStore:
    """The disk tier of one process; see `tiers.store.Store`."""

    tier = "disk"

    def __init__(
        self, directory: Directory, keys: Sequence[bytes], most_bytes: int, day_bytes: int, compressed: bool
    ) -> None:
        self.where, self.counters, self.most_bytes = str(directory.root), TierCounters(), most_bytes
        self._directory = directory
        self._quota = Quota(directory, most_bytes, day_bytes, self.counters)
        self._page_format = cache(lambda namespace: PageFormat.of(namespace, keys, compressed))
        self._owner: Owner | None = None
        self._readers = DaemonThreads("disk tier", READERS)
        self._left: list[str] = []  # files that could not be deleted when they should have been
        self.failures = DiskFailures(self.where, self.counters)

    @classmethod
    def open(
        cls, directory: Path, most_bytes: int, *, day_bytes: int | None = None, compressed: bool = False
    ) -> "DiskStore":
        """The store in a directory, which is made if it is not there.

        Args:
            directory: of its own, with no other files in it.
            most_bytes: what all processes together may take there.
            day_bytes: what may be written there in a day (UTC), by all processes; None: twice `most_bytes`.
            compressed: whether pages are written compressed.

        Raises:
            KVError: the directory cannot be used, or there is no key to seal pages with.
        """
        keys = user_keys(make=True)
        if not keys:
            raise KVError("a disk tier needs the user's key, which cannot be used here: see the warning before")
        own = Directory.open(directory, make=True)
        store = cls(own, keys, most_bytes, day_bytes or WEAR * most_bytes, compressed)
        store._enter()
        return store

    @property
    def used_bytes(self) -> int | None:
        account = self._directory.ledger.peek()
        return account.used if account else None

    @property
    def answering(self) -> bool:
        """Whether pages can go there: it is whole, may be written to, and has not failed since it last worked."""
        return self._owner is not None and not self.failures.failing and self._directory.whole

    # Pages of prompts -----------------------------------------------------------------------------------------

    def find(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        page_format = self._page_format(namespace)
        return next((i for i, name in enumerate(names) if not self._is_there(page_format, name)), len(names))

    def find_any(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        page_format = self._page_format(namespace)
        return next((i for i, name in enumerate(names) if self._is_there(page_format, name)), len(names))

    def read(self, namespace: Namespace, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float) -> int:
        page_format, began = self._page_format(namespace), time.perf_counter()
        reads = [self._begin(page_format, name, view) for name, view in zip(names, into, strict=True)]
        wait(reads, max(0.0, limit_s))
        late = sum(one.cancel() for one in reads)
        wait([one for one in reads if not one.cancelled()])  # they write to `into`
        self.counters.skipped("late", late)
        count = next((i for i, one in enumerate(reads) if one.cancelled() or not one.result()), len(reads))
        if count:
            self.counters.moved("in", count, count * namespace.page_bytes, time.perf_counter() - began)
        return count

    def write(self, namespace: Namespace, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        page_format, count = self._page_format(namespace), 0
        if self._quota.spent:
            self.counters.skipped("budget", len(names))
            return 0
        if self.failures.resting:
            self.counters.skipped("open", len(names))
            return 0
        try:
            self._restore()
            for name, page in zip(names, pages, strict=True):
                if not self._put(page_format, name, page):
                    break
                count += 1
        except QuotaExceeded as refused:
            self.failures.refused(str(refused), len(names) - count)
        except OSError as error:
            self.failures.rest()
            self._failed(error, len(names) - count)
        return count

    def touch(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        self._directory.touch(self._page_format(namespace), names)

    def watch(self, namespace: Namespace) -> DirectoryWatch:
        """Tells which pages of prompts are there, whoever writes and deletes them."""
        return DirectoryWatch(self._directory, self._page_format(namespace))

    # Pages of one value ---------------------------------------------------------------------------------------

    def keep(self, namespace: Namespace, name: PageName, page: memoryview) -> None:
        page_format, began = self._page_format(namespace), time.perf_counter()
        try:
            if not self.failures.resting:
                self._restore()
            owner = self._owner
            if owner is None:
                raise OutOfPages(f"{self.where} cannot be written to: no value can go there")
            path = owner.private(page_format.scope, name.key)
            parts = self._parts(page_format, name, page)
            with self._quota.reserved(path, sum(map(len, parts))) as file:
                files.fill(file, parts)
        except QuotaExceeded:
            self.counters.skipped("full")
            text = f"{self.where} is full: drop values that are there, or give it more (kv_disk_bytes)"
            raise OutOfPages(text) from None
        except OSError as error:
            self._failed(error, 1)
            raise OutOfPages(f"{self.where} takes no value: {error.strerror or error}") from None
        self.failures.failing = False
        self.counters.moved("out", 1, len(page), time.perf_counter() - began)

    def fetch(self, namespace: Namespace, name: PageName, into: memoryview) -> None:
        page_format, began = self._page_format(namespace), time.perf_counter()
        owner = self._owner
        if owner is None:
            raise PageLost(f"a page of this value is gone from {self.where}")
        try:
            path = owner.private(page_format.scope, name.key)
            if not files.read_page(path, page_format, name, into):
                self.counters.skipped("corrupt")
                raise PageLost(f"a page of this value is damaged in {self.where}")
        except FileNotFoundError:
            raise PageLost(f"a page of this value is gone from {self.where}") from None
        except OSError as error:
            self._failed(error, 1)
            raise PageLost(f"a page of this value cannot be read in {self.where}: {error.strerror or error}") from None
        self.counters.moved("in", 1, len(into), time.perf_counter() - began)

    def discard(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        page_format = self._page_format(namespace)
        owner = self._owner
        if owner is None:
            return
        self._left += [owner.private(page_format.scope, name.key) for name in names]
        try:
            with self._directory.ledger.locked() as account:
                self._tidy(account)
        except OSError as error:
            self._failed(error, 0)

    def close(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            with suppress(OSError), self._directory.ledger.locked() as account:  # else the next process sweeps
                owner.leave(account)
        self._readers.close(0.0)
        self._directory.close()

    # ----------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """After a failure: make what somebody has deleted again. Raises OSError."""
        owner = self._owner
        if not self.failures.failing or owner is None:
            return
        try:
            if self._directory.restore():
                log.warning("%s had been deleted, or a part of it: it was made again", self.where)
                owner.abandon()
                self._enter()
                with self._directory.ledger.locked() as account:
                    account.used = self._directory.count()
        except KVError as error:
            raise OSError(errno.EIO, str(error)) from None

    def _enter(self) -> None:
        """Become one of those who write here, if that is possible now. Raises KVError: it never will be."""
        why = "it can only be read"
        if self._directory.writable:
            check_room(self._directory.root, self.used_bytes or 0)
            try:
                with self._directory.ledger.locked() as account:
                    if sweep(self._directory, account):  # they may have died between two steps
                        account.used = self._directory.count()
                    self._owner = Owner(self._directory, account)
                return
            except OSError as error:
                why = error.strerror or str(error)
        log.warning("%s cannot be written to (%s): pages are read from it, and none goes there", self.where, why)

    def _parts(self, page_format: PageFormat, name: PageName, page: memoryview) -> tuple[bytes, memoryview]:
        """What a page's file holds."""
        payload = page_format.payload(page)
        return files.block(page_format, name, payload), payload

    def _is_there(self, page_format: PageFormat, name: PageName) -> bool:
        holder = self._directory.holder(page_format, name.key)
        return os.path.exists(self._directory.path(holder, name.key))

    def _begin(self, page_format: PageFormat, name: PageName, into: memoryview) -> Future[bool]:
        """Read one page on another thread, which does not keep the process from ending if the disk hangs."""
        done = Future[bool]()
        self._readers.submit(partial(fulfil, done, partial(self._read, page_format, name, into)))
        return done

    def _read(self, page_format: PageFormat, name: PageName, into: memoryview) -> bool:
        """Read one page. What is wrong is deleted; what cannot be read now is left."""
        page_format = self._directory.holder(page_format, name.key)
        path = self._directory.path(page_format, name.key)
        try:
            if files.read_page(path, page_format, name, into):
                self.failures.failing = False
                return True
            self.counters.skipped("corrupt")
            log.warning("%s: this page is damaged: it is deleted, and computed instead", path)
            with self._directory.ledger.locked() as account:
                self._directory.delete(path, account)
        except FileNotFoundError:  # deleted since it was found
            pass
        except OSError as error:
            self._failed(error, 1)
        return False

    def _put(self, page_format: PageFormat, name: PageName, page: memoryview) -> bool:
        """Write a page if it is not there. Returns whether it is there now. Raises QuotaExceeded or OSError."""
        if self._is_there(page_format, name):
            return True
        owner = self._owner
        if owner is None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        began, unfinished = time.perf_counter(), owner.partial()
        parts = self._parts(page_format, name, page)
        with self._quota.reserved(unfinished, sum(map(len, parts)), budgeted=True) as file:
            files.fill(file, parts)
        try:
            with self._directory.ledger.locked() as account:
                self._tidy(account)
                if self._directory.commit(unfinished, page_format, name, account):
                    self.failures.failing = False
                    self.counters.moved("out", 1, len(page), time.perf_counter() - began)
        except OSError:
            self._left.append(unfinished)
            raise
        return self._is_there(page_format, name)

    def _tidy(self, account: Account) -> None:
        """Delete what is left; the account is held. Raises OSError."""
        while self._left:
            path = self._left.pop()
            try:
                self._directory.delete(path, account)
            except OSError:
                self._left.append(path)
                raise

    def _failed(self, error: OSError, pages: int) -> None:
        self.failures.failed(error, pages, told=self._owner is None)  # when it was opened
