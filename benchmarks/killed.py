"""Engines are killed under load, and every answer is compared with that of an undisturbed run: `make bench-killed`.

Each request of a fixed set is answered once while nothing is wrong. Then clients send them at random while the process
of an engine is killed every few seconds. The end tells how many answers differed, which fails, and how long streams
stood still.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.server_process import ServerFailed, our_server
from benchmarks.terminal import ended_by, needs
from twostroke.system.home import home

WORK = home() / "killed"


def main(
    model: Annotated[list[str] | None, typer.Option(help="Of the catalog; may be repeated.")] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the load lasts.")] = 10.0,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two kills.")] = 20.0,
    replicas: Annotated[int, typer.Option(min=1, help="Engines of the one model.")] = 1,
    clients: Annotated[int, typer.Option(min=1, help="How many send requests at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    kv_bytes: Annotated[str, typer.Option(help="Of each pool.")] = "128MiB",
    work: Annotated[Path, typer.Option(help="Where the server's log is kept.")] = WORK,
) -> None:
    """Our server, whose engines are killed under load; fails if any answer is not that of an undisturbed run."""
    with needs("dev"):
        from benchmarks.soak.killing import disturb

    work = work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    named = [part for name in model or ["smollm2-135m"] for part in ("--model", name)]
    options = [*named, "--kv-bytes", kv_bytes, "--replicas", str(replicas)]
    with ended_by(ServerFailed), our_server(work, *options) as server:
        tally = asyncio.run(disturb(server, minutes * 60, every, clients, seed))
    stood = sorted(pause for pause in tally.pauses_s if pause > 0.5)
    gaps = f"; median {median(stood):.1f} s, longest {stood[-1]:.1f} s" if stood else ""
    typer.echo(f"{tally.kills} kills, {tally.answers} answers, {len(stood)} streams stood still for over 0.5 s{gaps}")
    for line in tally.wrong[:10]:
        typer.echo(f"differs: {line}", err=True)
    if tally.wrong or not tally.kills or not tally.answers:
        typer.echo(f"does not hold: {len(tally.wrong)} answers differ (the server's log: {server.log})", err=True)
        raise typer.Exit(1)
    typer.echo("every answer is that of the undisturbed run")


if __name__ == "__main__":
    typer.run(main)
