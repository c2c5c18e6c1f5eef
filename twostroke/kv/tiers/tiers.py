"""The tiers of one open model: its budgets, its stores, and the threads that read and write them."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from twostroke.errors import InvalidRequest, KVError
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.speed import TransferSpeed
from twostroke.kv.tiers.store import Store
from twostroke.kv.tiers.write_queue import WriteQueue
from twostroke.system.atomic_files import check_file_name
from twostroke.system.daemon_threads import DaemonThreads

log = logging.getLogger(__name__)

READERS = 16  # threads: those of loads that run, and those that hang in a store
FLUSH_S = 10.0  # seconds that closing waits for what is still to be written
DEFAULT_DISK_BYTES = 50 << 30
MIN_DISK_BYTES = 1 << 20
FIRST_TOUCH_S = 1.0  # pages of prompts that take this long to compute go to the disk when they are first seen


class Tiers:
    """Where pages may be besides the pool.

    Attributes:
        host_bytes: budget of the prefix cache in ordinary memory; 0: it does not go there.
        disk, remote: the stores, or None; stores: those that exist, nearest first.
        links: how quickly each store answers, by tier; outboxes: what waits to be written, by tier.
        host_counters: what went to the host and back.
        first_touch_s: seconds of prefill from which on pages are written to the disk when they are first computed.
    """

    def __init__(self, host_bytes: int = 0, disk: Store | None = None, remote: Store | None = None) -> None:
        self.host_bytes, self.disk, self.remote = host_bytes, disk, remote
        self.stores = [store for store in (disk, remote) if store is not None]
        self.host_counters = TierCounters()
        self.first_touch_s = FIRST_TOUCH_S
        self.speeds = {store.tier: TransferSpeed() for store in self.stores}
        self.write_queues = {store.tier: WriteQueue(store.tier, store.counters) for store in self.stores}
        self.readers = DaemonThreads("tiers reader", READERS)
        self._clerk = DaemonThreads("tiers clerk", 1)
        self._closed = False

    @property
    def by_name(self) -> dict[str, Store]:
        """The stores by tier: "disk", "remote"."""
        return {store.tier: store for store in self.stores}

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job that reads, on a thread of its own."""
        self.readers.submit(job)

    def note(self, job: Callable[[], object]) -> None:
        """Run a short job that neither reads nor writes, beside the step loop and in order."""
        self._clerk.submit(job)

    def flush(self, limit_s: float = FLUSH_S) -> bool:
        """Wait until all that was to be read or written is, at most `limit_s` seconds."""
        until = time.monotonic() + limit_s

        def left() -> float:
            return max(0.0, until - time.monotonic())

        done = self._clerk.settle(left()) and self.readers.settle(left())
        written = [outbox.settle(left()) for outbox in self.write_queues.values()]
        return done and all(written)

    def close(self, limit_s: float = FLUSH_S) -> None:
        """Write what waits, within `limit_s` seconds, and let go of the stores. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + limit_s
        self._clerk.settle(limit_s)
        self._clerk.close(limit_s)
        ended = [outbox.close(max(0.1, until - time.monotonic())) for outbox in self.write_queues.values()]
        ended.append(self.readers.close(max(0.1, until - time.monotonic())))
        if not all(ended):
            log.warning("a tier does not answer: what it still had to write was dropped")
        ending = DaemonThreads("tiers end", len(self.stores))
        for store in self.stores:
            ending.submit(store.close)
        if not ending.settle(limit_s):
            log.warning("a tier cannot be closed, since it does not answer")
        ending.close(0.1)


def require_tiers(
    kv_host: int | None, kv_disk: str | Path | None, kv_disk_bytes: int | None, kv_remote: str | None, kv_compress: bool
) -> None:
    """Raise InvalidRequest for arguments of `open_tiers` that cannot be."""
    if kv_host is not None and kv_host < 0:
        raise InvalidRequest(f"kv_host is a number of bytes, not {kv_host:,}")
    if kv_disk is not None and Path(kv_disk).exists() and not Path(kv_disk).is_dir():
        raise InvalidRequest(f"{kv_disk} is no directory: a disk tier needs one (kv_disk)")
    if kv_disk_bytes is not None and kv_disk is None:
        raise InvalidRequest("kv_disk_bytes limits a disk tier: give its directory too (kv_disk)")
    if kv_disk_bytes is not None and kv_disk_bytes < MIN_DISK_BYTES:
        raise InvalidRequest(f"kv_disk_bytes is a number of bytes, at least 1 MiB, not {kv_disk_bytes:,}")
    if kv_compress and kv_disk is None and kv_remote is None:
        raise InvalidRequest("kv_compress is for a disk tier or a remote one: give kv_disk or kv_remote too")


def open_tiers(
    kv_host: int | None = None,  # bytes of ordinary memory for the prefix cache
    kv_disk: str | Path | None = None,  # a directory, made if it is not there
    kv_disk_bytes: int | None = None,  # the most that it may take; None: a tenth of what is free there, at most 50 GiB
    kv_remote: str | None = None,  # the URL of a server that speaks Redis' protocol
    kv_compress: bool = False,  # whether pages are written compressed to the disk and the server
) -> Tiers:
    """Open the tiers that were asked for.

    Raises:
        InvalidRequest: an argument is out of range. KVError: the directory or the key cannot be used.
    """
    require_tiers(kv_host, kv_disk, kv_disk_bytes, kv_remote, kv_compress)
    disk = remote = None
    if kv_disk is not None:
        from twostroke.kv.tiers.disk import DiskStore

        directory = Path(os.path.expanduser(kv_disk))
        try:
            check_file_name(directory)
        except OSError as error:
            raise KVError(f"{directory}: it cannot be the disk tier: {error.strerror}") from None
        most = kv_disk_bytes or min(DEFAULT_DISK_BYTES, _free(directory) // 10)
        disk = DiskStore.open(directory, most, compressed=kv_compress)
    try:
        if kv_remote is not None:
            from twostroke.kv.tiers.remote import RedisStore

            remote = RedisStore.open(kv_remote, compressed=kv_compress)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    return Tiers(kv_host or 0, disk, remote)


def _free(directory: Path) -> int:
    path = Path(os.path.abspath(directory))
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
