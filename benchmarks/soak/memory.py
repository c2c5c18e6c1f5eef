"""Memory of a server under load, sampled each second: RSS, its peak, and what its tiers take."""

from __future__ import annotations

import fcntl
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.peer.processes import peak_rss_bytes
from benchmarks.soak.verdict import Check
from benchmarks.soak.vitals import metrics, rss_bytes

SPARE = 0.02  # of the budgets and of what the server takes before any load
EVERY_S = 1.0
MOST_WORKERS = 32  # readers, writers and connections of both stores
MIB = 1 << 20
STORM_BYTES = 48 * MIB  # bodies, grammars, answers and connections of all calls at once, as measured


@dataclass(frozen=True)
class Budgets:
    """What the server was started with. `remote` is a URL; 0 and None: there is no such tier."""

    pool_bytes: int
    host_bytes: int = 0
    disk: Path | None = None
    disk_bytes: int = 0
    remote: str | None = None

    @property
    def spare(self) -> int:
        """Threads and open files that tiers may still begin, since theirs come as they are needed."""
        return MOST_WORKERS if self.disk or self.remote else 0

    @property
    def options(self) -> list[str]:
        """As `twostroke serve` takes them."""
        found = ["--kv-bytes", str(self.pool_bytes)]
        found += ["--kv-host", str(self.host_bytes)] if self.host_bytes else []
        found += ["--kv-disk", str(self.disk), "--kv-disk-bytes", str(self.disk_bytes)] if self.disk else []
        return found + (["--kv-remote", self.remote] if self.remote else [])


@dataclass(frozen=True)
class Sample:
    """Attributes: seconds since the watch began; bytes; remote: (keys, bytes) of the whole Redis server."""

    seconds: float
    rss: int
    disk: int = 0
    remote: tuple[int, int] = (0, 0)


@dataclass
class Watch:
    """A context manager: samples a server on a thread of its own, until it is left.

    Attributes:
        started: RSS before any load: the model, the interpreter and the empty pool.
        step_bytes: what the server says that a step takes.
        peak: largest RSS that the system has seen (VmHWM) since the start; it catches what lies between samples.
        facts: counts of tiers from /metrics, taken by `note`.
    """

    pid: int
    budgets: Budgets
    started: int
    step_bytes: int = 0
    peak: int = 0
    samples: list[Sample] = field(default_factory=list[Sample])
    facts: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._began, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._redis: Any = None
        if self.budgets.remote is not None:
            from redis import Redis

            self._redis = Redis.from_url(self.budgets.remote)

    def __enter__(self) -> Watch:
        # Sets the system's mark back, since loading the weights takes more than keeping them.
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def note(self, http: httpx.Client) -> None:
        """Read what tiers have moved so far."""
        names = {"cached_tokens_total", "tier_pages_total", "tier_skipped_pages_total"}
        found = metrics(http.get("/metrics").text)
        self.facts = {" ".join(one): value for one, value in found.items() if one[0] in names and value}

    @property
    def limit(self) -> int:
        """Bytes that RSS may reach."""
        known = self.started + self.budgets.pool_bytes + self.budgets.host_bytes
        return round((1 + SPARE) * known) + self.step_bytes + STORM_BYTES

    @property
    def most(self) -> int:
        """The largest RSS, in a sample or between two."""
        return max(self.peak, *(one.rss for one in self.samples))

    @property
    def course(self) -> str:
        """RSS beside what it may be, for people."""
        one = self.budgets
        parts = self.started, one.pool_bytes, one.host_bytes, self.step_bytes, STORM_BYTES
        numbers = self.most, self.samples[-1].rss, self.limit, *parts
        text = "{:.1f} MiB at most, {:.1f} at the end; limit {:.1f}: 2% above {:.1f} at the start + {:.1f} of the pool "
        return (text + "+ {:.1f} of the host, + {:.1f} for a step + {:.1f} for calls").format(
            *(number / MIB for number in numbers)
        )

    def checks(self) -> list[Check]:
        one = self.budgets
        found = [Check("RSS is within the sum of its parts", self.most <= self.limit, self.course)]
        if one.disk is not None:
            most = max(s.disk for s in self.samples)
            text = f"{most / MIB:.1f} MiB at most in {len(self.samples)} samples, of {one.disk_bytes / MIB:.1f}"
            found.append(Check("the directory is never above its cap", most <= one.disk_bytes, text))
        return found

    def record(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "budgets": {name: str(value) for name, value in asdict(self.budgets).items()},
            "started": self.started,
            "limit": self.limit,
            "peak": self.peak,
            "facts": dict(self.facts),
            "samples": [[round(s.seconds, 1), s.rss, s.disk, *s.remote] for s in self.samples],
        }

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            with suppress(FileNotFoundError, IndexError):  # the server has just ended
                rss, disk = rss_bytes(self.pid), taken(self.budgets.disk) if self.budgets.disk else 0
                self.samples.append(Sample(time.monotonic() - self._began, rss, disk, self._remote()))
                self.peak = max(self.peak, peak_rss_bytes([self.pid]))

    def _remote(self) -> tuple[int, int]:
        return (self._redis.dbsize(), self._redis.info("memory")["used_memory"]) if self._redis else (0, 0)


def planned_bytes(http: httpx.Client, part: str) -> int:
    """What the server has planned for a part of its memory, by its metrics."""
    return int(metrics(http.get("/metrics").text)["memory_planned_bytes", part])


def taken(directory: Path) -> int:
    """What `du` says that a disk tier takes. Its lock is held meanwhile, so that no file is counted in two places."""
    with (directory / "ledger").open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_SH)
        return int(subprocess.check_output(["du", "-s", "-B1", str(directory)]).split()[0])
