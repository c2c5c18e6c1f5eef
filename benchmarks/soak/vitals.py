"""Counters of a server from the system and /metrics."""

from __future__ import annotations

import os
import re
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


def hosted_bytes(metrics: str) -> int:
    """What the host tier holds, from the text of /metrics; 0 without one."""
    found = re.search(r'^twostroke_tier_used_bytes{tier="host"} (\S+)', metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


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
    families = text_string_to_metric_families(http.get("/metrics").text)
    found = {(s.name, s.labels.get("state", "")): s.value for family in families for s in family.samples}
    pages = {state: int(found["twostroke_kv_pages", state]) for state in ("used", "cached", "free")}
    requests = {state: int(found["twostroke_requests", state]) for state in ("running", "waiting", "arriving")}
    return Vitals(
        **pages,
        **requests,
        in_flight=http.get("/health").json()["in_flight"],
        tasks=int(found["twostroke_tasks", ""]),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        files=len(os.listdir(f"/proc/{pid}/fd")),
    )
