"""Result files: of benchmarks of our own engine one JSON file for each kind and day, of others one for each run."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from twostroke.system.machine import describe

RESULTS = Path(__file__).parent / "results"


def today(stem: str, suffix: str = "json") -> Path:
    """The path benchmarks/results/STEM-DATE.SUFFIX."""
    return RESULTS / f"{stem}-{datetime.now(UTC).date()}.{suffix}"


def of_this_run(stem: str, folder: Path = RESULTS) -> Path:
    """STEM-DATE.json, or STEM-DATE-2.json and so on, so that a second run of a day does not replace the first."""
    dated = f"{stem}-{datetime.now(UTC).date()}"
    candidates = (folder / f"{dated}{suffix}.json" for suffix in chain([""], (f"-{i}" for i in count(2))))
    return next(path for path in candidates if not path.exists())


def earlier(stem: str, model: str) -> dict[str, Any]:
    """Today's results of a model so far; empty if there are none."""
    with suppress(FileNotFoundError, KeyError):
        return json.loads(today(stem).read_text())["models"][model]
    return {}


def save(stem: str, definitions: dict[str, str], model: str, facts: dict[str, Any]) -> Path:
    """Write results into today's file; a model measured again replaces its earlier results of the day."""
    path, known = today(stem), dict[str, Any]()
    with suppress(FileNotFoundError):
        known = json.loads(path.read_text())["models"]
    RESULTS.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"definitions": definitions, "models": known | {model: facts | describe()}}, indent=1) + "\n"
    )
    return path
