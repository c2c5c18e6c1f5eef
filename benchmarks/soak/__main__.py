"""The command. If a check fails at the end, it prints the reason and exits with status 1."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.needs import needs
from benchmarks.server_process import ServerFailed, ServerProcess
from twostroke.system.home import home

WORK = home() / "soak"
DEADLINE_S = 8  # default deadline, as fuzzed requests ask for thousands of tokens
OPTIONS = ["--backend", "native", "--kv-bytes", "128MiB", "--max-running", "24", "--max-queued", "24"]
# Freed memory is returned to the system at once. With glibc's defaults, an arena for each thread and large blocks kept,
# the same storm of two minutes ended 40 MiB higher than it began, which could hide a leak.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the storm lasts.")] = 10.0,
    model: Annotated[str, typer.Option(help="Name in the catalog.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    work: Annotated[Path, typer.Option(help="Where the server's log is kept.")] = WORK,
) -> None:
    """Our server under valid and invalid requests, disconnects, deadlines, raw bytes and schemathesis; then checks."""
    with needs("dev"):
        from benchmarks.soak.storm import run

    work = work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "twostroke", "serve", "--model", model, "--port", "{port}", *OPTIONS]
    try:
        with ServerProcess("twostroke", [*command, "--timeout", str(DEADLINE_S)], work, MALLOC) as server:
            checks = run(server, minutes * 60, seed)
    except ServerFailed as failure:
        typer.echo(str(failure), err=True)
        raise typer.Exit(1) from None
    for check in checks:
        typer.echo(f"{'ok  ' if check.holds else 'FAIL'}  {check.name}: {check.found}")
    if failed := [check.name for check in checks if not check.holds]:
        typer.echo(f"does not hold: {'; '.join(failed)} (the server's log: {server.log})", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
