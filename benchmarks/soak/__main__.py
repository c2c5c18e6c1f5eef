"""The command. Exit status 1, and the line that says why, if anything does not hold at the end."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.peer.environments import environment
from benchmarks.server_process import ServerFailed, ServerProcess
from benchmarks.soak.requests import WITNESS, Ledger, client, text
from benchmarks.soak.sockets import vandal
from benchmarks.soak.verdict import Check, flat, leaks, quiet
from benchmarks.soak.vitals import Vitals, read, rss_bytes
from twostroke.server.grammar import REMEMBERED
from twostroke.system.home import home

WORK = home() / "soak"
CLIENTS, VANDALS = 12, 4
GUST_S = 20.0  # before anything is counted
CALM_S = 60.0  # for what runs to end, once everybody has gone
DEADLINE_S = 8  # of requests that name none: fuzzed ones ask for thousands of tokens
OPTIONS = ["--backend", "native", "--kv-bytes", "128MiB", "--max-running", "24", "--max-queued", "24"]
# What is freed goes back to the system at once. As glibc does it otherwise, with an arena for each thread and large
# blocks kept, the same storm of two minutes ended 40 MiB higher than it began, and a leak could hide in that.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


async def storm(server: ServerProcess, seconds: float, seed: int, witness: str, ledger: Ledger) -> dict[str, Any]:
    """Everybody at once. Returns what the fuzzer says, and samples of RSS."""
    command = [sys.executable, "-m", "benchmarks.soak.fuzz", server.url, str(seed)]
    limits = httpx.Limits(max_connections=None)
    fuzz = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment({}))
    samples: list[tuple[float, int]] = []
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            people = [client(http, random.Random(f"{seed} {i}"), ledger, witness) for i in range(CLIENTS)]
            people += [vandal(server.port, random.Random(f"{seed} v{i}"), ledger) for i in range(VANDALS)]
            tasks, end = [asyncio.create_task(one) for one in people], time.monotonic() + seconds
            while time.monotonic() < end and not any(task.done() for task in tasks):
                samples.append((time.monotonic(), rss_bytes(server.pid)))
                await asyncio.sleep(0.5)
            for task in tasks:
                task.cancel()
            for failure in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(failure, asyncio.CancelledError):
                    ledger.surprise(f"a client failed: {failure!r}")
    finally:
        with suppress(ProcessLookupError):
            fuzz.terminate()
        output, _ = await fuzz.communicate()
    lines = output.decode().splitlines()
    told = json.loads(lines[-1]) if lines else {"failed": 1, "failures": ["the fuzzer ended without a word"]}
    return {"fuzz": told, "rss": samples}


def calm(http: httpx.Client, pid: int, like: Vitals | None = None) -> Vitals:
    """Reset the prefix index and look, until all is as it was, or it has had the time for it."""
    end = time.monotonic() + CALM_S
    while True:
        http.post("/reset_prefix_cache")
        seen = read(http, pid)
        still = seen.used == seen.cached == seen.in_flight == 0
        if time.monotonic() > end or (still and (like is None or all(check.holds for check in leaks(like, seen)))):
            return seen
        time.sleep(0.5)


def ask(http: httpx.Client) -> str:
    return text(http.post("/v1/completions", json=WITNESS))


def warm_up(http: httpx.Client, seed: int) -> None:
    """Fill the KV pool, whose memory comes into being with use, and the server's memory of grammars."""
    rng = random.Random(seed)
    for _ in range(4):
        prompt = [rng.randrange(100, 40_000) for _ in range(2000)]
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "timeout": 120})
    for number in range(REMEMBERED):
        body = {"prompt": "a", "max_tokens": 1, "regex": f"[a-z]{{1,{number + 1}}} [0-9]+"}
        http.post("/v1/completions", json=body)


def log_errors(log: Path) -> list[str]:
    """Lines in the server's log that tell of a mistake of its own."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if re.search(r"Traceback| (ERROR|CRITICAL) |never awaited|was destroyed", line)]


def run(server: ServerProcess, seconds: float, seed: int) -> list[Check]:
    """The whole of it. Ends the server."""
    ledger = Ledger()
    # Each request on a connection of its own, so that none that is kept counts as an open file.
    with httpx.Client(base_url=server.url, timeout=120, headers={"connection": "close"}) as http:
        warm_up(http, seed)
        witness = ask(http)
        asyncio.run(storm(server, GUST_S, seed + 1, witness, Ledger()))
        before = calm(http, server.pid)
        typer.echo(f"before: {asdict(before)}; {witness!r}")
        found = asyncio.run(storm(server, seconds, seed, witness, ledger))
        after, again = calm(http, server.pid, before), ask(http)
    fuzz = found["fuzz"]
    typer.echo(f"sent: {dict(sorted(ledger.counts.items()))}; fuzz: {fuzz.get('requests')} {fuzz.get('statuses')}")
    status = server.stop()
    mistakes = log_errors(server.log)
    return [
        *leaks(before, after),
        flat(found["rss"]),
        quiet("every answer was a right one", ledger.surprised, ledger.surprises),
        quiet("no undocumented 5xx to schemathesis", fuzz["failed"], fuzz["failures"]),
        Check("the same greedy text, to the letter", again == witness, repr(again)),
        quiet("no mistake in the server's log", len(mistakes), mistakes[:5]),
        Check("it ends when told", status in (0, -15, 143), f"exit status {status}"),
    ]


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="How long the storm lasts.")] = 10.0,
    model: Annotated[str, typer.Option(help="Of the catalog.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    work: Annotated[Path, typer.Option(help="Where the server's log is kept.")] = WORK,
) -> None:
    """Our server, right and wrong requests, disconnects, deadlines, raw bytes and schemathesis; then the verdict."""
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
