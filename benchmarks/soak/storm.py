"""The storm of all clients at once, and the state of the server afterwards."""

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
from typing import Any

import httpx
import typer

from benchmarks.peer.environments import environment
from benchmarks.server_process import ServerProcess
from benchmarks.soak.memory import Budgets, Watch, planned_bytes
from benchmarks.soak.requests import WITNESS, Ledger, client, text
from benchmarks.soak.sockets import vandal
from benchmarks.soak.verdict import Check, flat, leaks, quiet
from benchmarks.soak.vitals import Vitals, hosted_bytes, read, rss_bytes
from twostroke.server.grammar import MAX_COMPILED

CLIENTS, VANDALS = 12, 4
GUST_S = 20.0  # warm-up storm before the first count
CALM_S = 60.0  # time for running requests to end after the storm


async def storm(server: ServerProcess, seconds: float, seed: int, witness: str, ledger: Ledger) -> dict[str, Any]:
    """Run all clients at once. Returns the fuzzer's report, and samples of RSS without what the host tier holds.

    The host tier fills and is emptied by resets, which would hide a leak.
    """
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
                metrics = (await http.get("/metrics")).text
                samples.append((time.monotonic(), rss_bytes(server.pid) - hosted_bytes(metrics)))
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


def calm(http: httpx.Client, pid: int, like: Vitals | None = None, spare: int = 0) -> Vitals:
    """Reset the prefix index and read the vitals until they equal `like`, for at most `CALM_S`; see `leaks`."""
    end = time.monotonic() + CALM_S
    while True:
        http.post("/reset_prefix_cache")
        seen = read(http, pid)
        still = seen.used == seen.cached == seen.in_flight == 0
        if time.monotonic() > end or (
            still and (like is None or all(check.holds for check in leaks(like, seen, spare)))
        ):
            return seen
        time.sleep(0.5)


def ask(http: httpx.Client) -> str:
    return text(http.post("/v1/completions", json=WITNESS))


def warm_up(http: httpx.Client, seed: int) -> None:
    """Fill the KV pool, whose memory is allocated on first use, and the server's cache of grammars."""
    rng = random.Random(seed)
    for _ in range(4):
        prompt = [rng.randrange(100, 40_000) for _ in range(2000)]
        http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "timeout": 120})
    for number in range(MAX_COMPILED):
        body = {"prompt": "a", "max_tokens": 1, "regex": f"[a-z]{{1,{number + 1}}} [0-9]+"}
        http.post("/v1/completions", json=body)


def log_errors(log: Path) -> list[str]:
    """Lines in the server's log that report an internal error."""
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if re.search(r"Traceback| (ERROR|CRITICAL) |never awaited|was destroyed", line)]


def run(server: ServerProcess, seconds: float, seed: int, budgets: Budgets) -> list[Check]:
    """The whole soak test. It ends the server, and leaves the samples of its memory beside its log."""
    ledger = Ledger()
    # One connection per request, so that no idle connection counts as an open file.
    with httpx.Client(base_url=server.url, timeout=120, headers={"connection": "close"}) as http:
        witness = ask(http)
        with Watch(server.pid, budgets, rss_bytes(server.pid), planned_bytes(http, "a step")) as watch:
            warm_up(http, seed)
            asyncio.run(storm(server, GUST_S, seed + 1, witness, Ledger()))
            before = calm(http, server.pid)
            typer.echo(f"before: {asdict(before)}; {witness!r}")
            found = asyncio.run(storm(server, seconds, seed, witness, ledger))
            after, again = calm(http, server.pid, before, budgets.spare), ask(http)
            watch.note(http)
    fuzz = found["fuzz"]
    server.log.with_suffix(".json").write_text(json.dumps(watch.record()))
    typer.echo(f"RSS: {watch.course}")
    typer.echo(f"tiers: {watch.facts}; remote, keys and bytes: {watch.samples[-1].remote}")
    typer.echo(f"sent: {dict(sorted(ledger.counts.items()))}; fuzz: {fuzz.get('requests')} {fuzz.get('statuses')}")
    status = server.stop()
    mistakes = log_errors(server.log)
    return [
        *leaks(before, after, budgets.spare),
        flat(found["rss"]),
        *watch.checks(),
        quiet("every answer was a right one", ledger.surprised, ledger.surprises),
        quiet("no undocumented 5xx to schemathesis", fuzz["failed"], fuzz["failures"]),
        Check("the same greedy text, to the letter", again == witness, repr(again)),
        quiet("no mistake in the server's log", len(mistakes), mistakes[:5]),
        Check("it ends when told", status in (0, -15, 143), f"exit status {status}"),
    ]
