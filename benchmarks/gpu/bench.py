"""What the programs of benchmarks/gpu share: options, the time limit, the file of results, the backend."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from benchmarks.gpu.models import MODELS
from benchmarks.gpu.weights import WEIGHTS
from benchmarks.results_file import today
from benchmarks.terminal import command_line, markdown
from twostroke.backends.interface import Backend
from twostroke.system.machine import describe

BACKENDS = ("triton", "reference")


def parser(name: str, doc: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all programs have; `models` are the default ones."""
    made = command_line(doc)
    made.prog = name
    made.add_argument("--models", nargs="+", default=list(models), choices=list(MODELS), metavar="MODEL",
                      help=f"of {', '.join(MODELS)} (default {' '.join(models)})")  # fmt: skip
    made.add_argument("--backend", default="triton", choices=BACKENDS)
    made.add_argument("--device", default="cuda", help="a torch device; cpu for a dry run")
    made.add_argument("--weights", default="BF16", choices=WEIGHTS, help="the format of random weights")
    made.add_argument("--page-size", type=int, default=16, help="entries of a KV page (default 16)")
    made.add_argument("--quick", action="store_true", help="fewer cases and repeats")
    made.add_argument("--seconds", type=float, default=100.0, help="start no case after this time (default 100)")
    made.add_argument("--out", type=Path, help="JSON (default benchmarks/results/gpu-NAME-DATE.json)")
    return made


class Bench:
    """One run of a program: its results so far, and the time that it has left."""

    def __init__(self, name: str, options: argparse.Namespace, definitions: dict[str, str]) -> None:
        self.name, self.began, self.limit = name, time.perf_counter(), float(options.seconds)
        self.path = cast("Path | None", options.out) or today(f"gpu-{name}")
        asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        triton = version("triton") if find_spec("triton") else None
        self.facts: dict[str, Any] = {"definitions": definitions, "options": asked, "triton": triton, "cases": []}
        self.facts |= describe(options.device)

    @property
    def cases(self) -> list[dict[str, Any]]:
        return self.facts["cases"]

    @property
    def over(self) -> bool:
        """Whether the time is up. What is left out is said once in the results."""
        if time.perf_counter() - self.began < self.limit:
            return False
        self.facts["cut_off_after_s"] = self.limit
        return True

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, **case: Any) -> dict[str, Any]:
        """Keep a case and write all results."""
        self.cases.append(case)
        self.write()
        return case

    @contextmanager
    def guarded(self, **case: Any) -> Generator[None]:
        """Around one case: an error becomes a failure in the results, and the next case goes on.

        Device time is scarce. `show` names the failures, and ends the program with status 1.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(**case, failure=f"{type(error).__name__}: {error}"[:300])

    def write(self) -> None:
        self.facts["seconds"] = round(time.perf_counter() - self.began, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.facts, indent=1) + "\n")

    def show(self, *lines: str) -> None:
        """Print the tables, last of all. Exits with status 1 if a case failed."""
        self.write()
        failed = [one for one in self.cases if "failure" in one]
        notes = [f"Failed: {', '.join(str(value) for value in one.values())}" for one in failed]
        if "cut_off_after_s" in self.facts:
            notes.append(f"Cut off after {self.limit:g} s: not all cases were measured.")
        print("\n".join([*lines, *notes]), flush=True)
        if failed:
            raise SystemExit(1)


def figures(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers get three or four digits."""
    return markdown(head, (map(short, row) for row in rows))


def short(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def open_backend(name: str, device: str, kv_dtype: str) -> Backend:
    """The backend that computes in bfloat16 on a device, with K and V stored as `kv_dtype` says."""
    if name == "reference":
        from twostroke.backends.reference.backend import ReferenceBackend

        return ReferenceBackend(device, "bfloat16", kv_dtype=kv_dtype)
    return cast(Backend, import_module("twostroke.backends.triton.backend").TritonBackend(device, kv_dtype=kv_dtype))
