"""Kills engines under load, and compares every answer with that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import typer

from benchmarks.peer.processes import tree
from benchmarks.server_process import ServerFailed, ServerProcess
from benchmarks.soak.vitals import rss_bytes

LOADED_BYTES = 100 << 20  # of RSS: a process with a model has more, one that waits for a model less
LEFT_OUT = {"id", "created", "created_at", "timings", "prompt_tokens_details", "model", "system_fingerprint"}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LOOK = {"type": "object", "properties": {"at": {"type": "string", "minLength": 20, "maxLength": 40}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": LOOK}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"temperature": 1.1, "seed": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": 2},
    "penalties": {"temperature": 1, "seed": 1, "presence_penalty": 0.9, "repetition_penalty": 1.2},
    "choices": {"temperature": 1.1, "seed": 7, "n": 3, "ignore_eos": True},
    "grammar": {"temperature": 1.5, "seed": 3, "regex": "[a-f]{60}"},
    "tools": {"temperature": 1.2, "seed": 5, "tools": [TOOL], "tool_choice": "required"},
    "technique": GREEDY | {"method": {"name": "repeat"}},
    "stop": {"temperature": 0.8, "seed": 9, "stop": ["sea", " the "]},
    "salt": GREEDY | {"cache_salt": "mine"},
}


@dataclass
class Tally:
    """What came of the load. `pauses_s`: the longest time without news of each stream; `wrong`: what differed."""

    answers: int = 0
    kills: int = 0
    pauses_s: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])


def bodies(model: str, rng: random.Random) -> list[dict[str, Any]]:
    """Requests of every kind, whole and streamed, with prompts of several lengths."""
    made: list[dict[str, Any]] = []
    for kind in KINDS.values():
        text = " ".join(
            rng.choices(["rivers", "the", "sea", "and", "light", "of", "seven"], k=rng.choice((6, 60, 300)))
        )
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 150, **kind}
        made += [body | {"stream": streamed} for streamed in (False, True)]
    return made


def plain(value: Any) -> Any:
    """JSON without ids, times and what was found in the cache."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key not in LEFT_OUT}
    return value


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Any, float]:
    """The answer, and the longest time without an event."""
    last, pause, events = time.monotonic(), 0.0, list[Any]()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200 or not body["stream"]:
            return plain(json.loads(await answer.aread())), 0.0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(plain(json.loads(line[6:])))
                now = time.monotonic()
                last, pause = now, max(pause, now - last) if len(events) > 1 else pause
    return sorted(events, key=_choice), pause


def _choice(event: dict[str, Any]) -> int:
    """The choice that an event is of: those of one keep their order, and nothing is promised between two."""
    return event["choices"][0]["index"] if event.get("choices") else -1


async def client(
    http: httpx.AsyncClient, known: list[tuple[dict[str, Any], Any]], rng: random.Random, tally: Tally, end: float
) -> None:
    """Send requests until the time is over."""
    while time.monotonic() < end:
        body, expected = rng.choice(known)
        try:
            found, pause = await ask(http, body)
        except (httpx.HTTPError, ValueError) as error:
            found, pause = f"{type(error).__name__}: {error}", 0.0
        tally.answers += 1
        tally.pauses_s.append(pause)
        if found != expected:
            tally.wrong.append(f"{json.dumps(body)[:200]}: {json.dumps(found)[-300:]}")


async def killer(
    server: ServerProcess, http: httpx.AsyncClient, every_s: float, rng: random.Random, tally: Tally, end: float
) -> None:
    """Kill one engine each time, once all are there: five that die before their first step are rightly given up."""
    while time.monotonic() + every_s < end:
        await asyncio.sleep(every_s)
        while not await _all_there(http) and time.monotonic() < end:
            await asyncio.sleep(0.2)
        engines = [pid for pid in tree(server.pid)[1:] if _is_engine(pid)]
        if engines:
            os.kill(rng.choice(engines), signal.SIGKILL)
            tally.kills += 1


async def _all_there(http: httpx.AsyncClient) -> bool:
    """Whether no engine is being started."""
    health = (await http.get("/health")).json()
    starting = any(one["restarting"] for one in health.get("replicas", ()))
    return health["ready"] and not starting and "loading" not in health.get("models", {}).values()


def _is_engine(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"engine_process" in command and rss_bytes(pid) > LOADED_BYTES
    except OSError:
        return False


async def disturb(server: ServerProcess, seconds: float, every_s: float, clients: int, seed: int) -> Tally:
    """The undisturbed run, and then the load."""
    rng, tally = random.Random(seed), Tally()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        models = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        asked = [body for model in models for body in bodies(model, rng)]
        known = [(body, (await ask(http, body))[0]) for body in asked]
        if failed := [answer for _, answer in known if isinstance(answer, dict) and "error" in answer]:
            raise ServerFailed(f"refused before anything was killed: {failed[0]}")
        typer.echo(f"{len(known)} answers of {', '.join(models)} known; {clients} clients, a kill every {every_s:g} s")
        end = time.monotonic() + seconds
        people = [client(http, known, random.Random(f"{seed} {i}"), tally, end) for i in range(clients)]
        await asyncio.gather(*people, killer(server, http, every_s, rng, tally, end))
    return tally
