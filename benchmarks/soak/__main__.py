"""The command. If a check fails at the end, it prints the reason and exits with status 1."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.server_process import ServerFailed, our_server
from benchmarks.terminal import ended_by, needs
from twostroke.cli.parsers import parse_size
from twostroke.system.home import home

WORK = home() / "soak"
DEADLINE_S = 8  # default deadline, as fuzzed requests ask for thousands of tokens
OPTIONS = ["--backend", "native", "--max-running", "24", "--max-queued", "24"]
# Freed memory is returned to the system at once. With glibc's defaults, an arena for each thread and large blocks kept,
# the same storm of two minutes ended 40 MiB higher than it began, which could hide a leak.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the storm lasts.")] = 10.0,
    model: Annotated[str, typer.Option(help="Name in the catalog.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    work: Annotated[Path, typer.Option(help="Where the server's log and the samples are kept.")] = WORK,
    kv_bytes: Annotated[Any, typer.Option(parser=parse_size, metavar="SIZE", help="Of the pool.")] = "128MiB",
    kv_host: Annotated[Any, typer.Option(parser=parse_size, metavar="SIZE", help="Of the host tier.")] = "0",
    kv_disk: Annotated[Path | None, typer.Option(help="Directory of the disk tier.")] = None,
    kv_disk_bytes: Annotated[Any, typer.Option(parser=parse_size, metavar="SIZE", help="Its cap.")] = "200MiB",
    kv_remote: Annotated[str | None, typer.Option(metavar="URL", help="Redis server of the remote tier.")] = None,
    malloc: Annotated[bool, typer.Option(help="Let the C library give back freed memory at once.")] = True,
) -> None:
    """Our server under valid and invalid requests, disconnects, deadlines, raw bytes and schemathesis; then checks."""
    with needs("dev"):
        from benchmarks.soak.memory import Budgets
        from benchmarks.soak.storm import run

    work = work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    disk = kv_disk.expanduser().resolve() if kv_disk else None
    budgets = Budgets(kv_bytes, kv_host, disk, kv_disk_bytes if disk else 0, kv_remote)
    options = ["--model", model, *OPTIONS, *budgets.options, "--timeout", str(DEADLINE_S)]
    with ended_by(ServerFailed), our_server(work, *options, variables=MALLOC if malloc else {}) as server:
        checks = run(server, minutes * 60, seed, budgets)
    for check in checks:
        typer.echo(f"{'ok  ' if check.holds else 'FAIL'}  {check.name}: {check.found}")
    if failed := [check.name for check in checks if not check.holds]:
        typer.echo(f"does not hold: {'; '.join(failed)} (the server's log: {server.log})", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
