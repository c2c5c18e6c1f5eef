"""Counters of a server from the system and /metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_bytes(pid: int) -> int:
    """The current resident memory of the process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def metrics(text: str) -> dict[tuple[str, ...], float]:
    """The samples of a text of /metrics, each by its name, without "twostroke_", and the values of its labels."""
    found = (one for family in text_string_to_metric_families(text) for one in family.samples)
    return {(one.name.removeprefix("twostroke_"), *one.labels.values()): one.value for one in found}


def hosted_bytes(text: str) -> int:
    """What the host tier holds, from a text of /metrics; 0 without one."""
    return int(metrics(text).get(("tier_used_bytes", "host"), 0))


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """The slope in bytes per second over the second half of (seconds, bytes), by least squares."""
    half = samples[len(samples) // 2 :]
    seconds, held = np.array(half, dtype=float).T
    return float(np.polyfit(seconds - seconds[0], held, 1)[0])


@dataclass(frozen=True)
class Vitals:
    """Counters at one moment. Pages and requests are counted by the server, threads and files by the system."""

    used: int
    cached: int
    free: int
    running: int
    waiting: int
    arriving: int
    in_flight: int
    tasks: int
    threads: int
    files: int


def read(http: httpx.Client, pid: int) -> Vitals:
    found = metrics(http.get("/metrics").text)
    pages = {state: int(found["kv_pages", state]) for state in ("used", "cached", "free")}
    requests = {state: int(found["requests", state]) for state in ("running", "waiting", "arriving")}
    return Vitals(
        **pages,
        **requests,
        in_flight=http.get("/health").json()["in_flight"],
        tasks=int(found["tasks",]),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        files=len(os.listdir(f"/proc/{pid}/fd")),
    )
