"""Runs of `twostroke eval` that share some minutes, and what their summaries say."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

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
            print(f"{name}: no time left", file=sys.stderr)
            continue
        try:
            command = make(left / (len(steps) - index))
        except FileNotFoundError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(shlex.join(command[1:]), file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            print(f"{name}: ended with {done.returncode}", file=sys.stderr, flush=True)


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


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first column is words."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))
