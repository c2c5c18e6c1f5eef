"""Runs of `twostroke eval` that share some minutes, what their summaries say, and a page of them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.terminal import say

Summary = dict[str, Any]  # summary.json of a run


def words(command: Sequence[str], options: dict[str, Any], *flags: str) -> list[str]:
    """`twostroke eval` with options, without those that are None."""
    given = [f"--{key}={value}" for key, value in options.items() if value is not None]
    return [sys.executable, "-m", "twostroke", *command, *flags, *given]


def file_name(model: str) -> str:
    """A model's name as that of a directory: it may be a path or a hub id."""
    return model.strip("/").replace("/", "-")


def share_minutes(steps: dict[str, Callable[[float], list[str]]], minutes: float) -> None:
    """Run the command that each step makes of its minutes: a part of those left. Say which had none or failed."""
    end = monotonic() + 60 * minutes
    for index, (name, make) in enumerate(steps.items()):
        left = (end - monotonic()) / 60
        if left <= 0:
            say(f"{name}: no time left")
            continue
        try:
            command = make(left / (len(steps) - index))
        except FileNotFoundError as error:
            say(f"{name}: {error}")
            continue
        say(shlex.join(command[1:]))
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            say(f"{name}: ended with {done.returncode}")


def estimate(summary: Summary | None, measure: str, key: str, method: str) -> dict[str, Any]:
    """The estimate of a method: n, value, low, high. Empty if there is none."""
    measures = {} if summary is None else summary["measures"]
    found = measures.get(measure, {}).get(key, {}).get("methods", {}).get(method, {})
    return found if found.get("n") else {}


def difference(
    summary: Summary, measure: str, key: str, first: str, second: str
) -> tuple[float, float, float, float | None]:
    """(first - second, low, high, McNemar's p) on the same items. Raises KeyError if both were not measured."""
    for pair in summary["measures"][measure][key]["pairs"]:
        one = pair["difference"]
        if one["n"] and (pair["first"], pair["second"]) == (second, first):
            return one["value"], one["low"], one["high"], pair["p"]
        if one["n"] and (pair["first"], pair["second"]) == (first, second):
            return -one["value"], -one["high"], -one["low"], pair["p"]
    raise KeyError(first)


def shown(found: dict[str, Any], form: str, scale: float = 1.0, bounds: bool = False) -> str:
    """An estimate, with its interval if `bounds` are wanted."""
    if not found:
        return ""
    low, value, high = (format(found[key] * scale, form) for key in ("low", "value", "high"))
    return f"{value} [{low}, {high}]" if bounds else value


def summaries(directory: Path, *names: str) -> dict[str, Summary]:
    """Those of the runs in a directory that have one."""
    files = {name: directory / name / "summary.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}


def made_on(summary: Summary) -> str:
    """The machine and the day."""
    machine = summary["machine"]
    return f"{machine['cpu']}, {machine['cores']} cores, {summary['date'][:10]}."


def write_page(page: Path, directory: Path, introduction: str, parts: Sequence[str]) -> Path:
    """Write a page. Without parts, which come of summaries in the directory, ends the program, and the page stays."""
    if not parts:
        raise SystemExit(f"no run in {directory} has a summary: {page} stays as it is")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in (introduction, *parts)) + "\n")
    return page
