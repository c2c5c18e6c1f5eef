"""A virtual environment for each engine, as their dependencies conflict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peer.engines import Engine
from twostroke.system.home import home

ROOT = Path(__file__).resolve().parents[2]  # the repository: workers import `benchmarks` from there
WORK = home() / "peers"  # environments, weights and logs


class CannotSetUp(Exception):
    """An engine or a model is not available; the message is one line."""


def folder(engine: Engine, work: Path) -> Path:
    return work / (engine.home or engine.name)


def python(engine: Engine, work: Path) -> Path:
    """The interpreter that runs the engine's workers."""
    return folder(engine, work) / "bin" / "python" if engine.requirements else Path(sys.executable)


def ensure_environment(engine: Engine, work: Path) -> None:
    """Make the environment unless it exists with the same requirements. Raises CannotSetUp."""
    if not engine.requirements:
        return
    directory = folder(engine, work)
    recipe = _placeless(repr((engine.requirements, engine.pip, dict(engine.build), engine.unwanted)))
    installed = directory / "installed"  # written last: an environment without it is incomplete
    if installed.is_file() and _placeless(installed.read_text()) == recipe:
        return
    log = log_file(work, f"setup-{engine.name}")
    pip = [str(python(engine, work)), "-m", "pip"]
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [*pip, "install", *engine.pip, *engine.requirements],
        *([[*pip, "uninstall", "--yes", *engine.unwanted]] if engine.unwanted else []),
    ]
    for step in steps:
        run(step, log, engine.build)
    installed.write_text(recipe)


def _placeless(recipe: str) -> str:
    """A recipe without the place of the repository: another checkout has the same environments."""
    return re.sub(r"[^\s'=]*/benchmarks/peer/", "benchmarks/peer/", recipe)


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run a command and append its output to `log`. Raises CannotSetUp with the most informative line."""
    with log.open("a") as stream:
        done = subprocess.run(
            command,
            env=environment(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            check=False,
        )
    if done.returncode:
        raise CannotSetUp(f"{last_words(log) or f'exit status {done.returncode}'} (more in {log.name})")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of another engine's process: the user's, and `variables`."""
    inherited = dict(os.environ)
    # `import twostroke` sets this for its own threads. Peers get their default, and our worker sets it again.
    inherited.pop("GOMP_SPINCOUNT", None)
    return {**inherited, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **variables}


def log_file(work: Path, name: str) -> Path:
    path = work / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def last_words(log: Path) -> str:
    """The last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|\w*(Error|Exception)\b)[:\s]", line)]
    return (errors or lines or [""])[-1][:200]
