"""What benchmarks of our own engine share: how quiet the machine was, and where results are kept."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peer.processes import busy_seconds
from benchmarks.peer.report import OTHERS_LIMIT
from twostroke.system.machine import describe

RESULTS = Path(__file__).parent / "results"


class Others:
    """How much processor time everything else on the machine takes, from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._theirs = busy_seconds() - time.process_time()

    @property
    def cpu(self) -> float:
        """So far, per second of wall time: 1 is a whole core."""
        theirs = busy_seconds() - time.process_time() - self._theirs
        return max(0.0, theirs) / (time.perf_counter() - self._began)


def doubt(cpus: Sequence[float]) -> list[str]:
    """A line that says so if turns were not quiet, by what `Others` found in each."""
    crowded = [cpu for cpu in cpus if cpu > OTHERS_LIMIT]
    if not crowded:
        return []
    worst = f"other processes took up to {max(crowded):.0%} of a core"
    return [f"Not quiet: in {len(crowded)} of {len(cpus)} turns {worst}.", ""]


def today(stem: str, suffix: str = "json") -> Path:
    """benchmarks/results/STEM-DATE.SUFFIX"""
    return RESULTS / f"{stem}-{datetime.now(UTC).date()}.{suffix}"


def save(stem: str, definitions: dict[str, str], model: str, facts: dict[str, Any]) -> Path:
    """Into the file of today; a model measured again replaces what the day's file had of it."""
    path, known = today(stem), dict[str, Any]()
    with suppress(FileNotFoundError):
        known = json.loads(path.read_text())["models"]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"definitions": definitions, "models": known | {model: facts | describe()}}, indent=1) + "\n"
    )
    return path
