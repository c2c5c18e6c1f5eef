"""The longest gap of a running stream while bad and huge requests arrive.

    python -m benchmarks.stream_gaps --model smollm2-135m

A client reads one stream, at rest first, and then while `--requests` calls arrive at once, again and again: too long,
damaged, too deep, with too many items, hostile patterns, and huge ones that are accepted. `/health` is asked all the
while. A gap is the time between two pieces of the stream; the first one, which is the prefill, does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from benchmarks.needs import needs
from benchmarks.results_file import save
from benchmarks.server_process import ServerFailed, ServerProcess
from twostroke.system.home import home
from twostroke.system.priority import yield_cpu

if TYPE_CHECKING:
    import httpx

DEFINITIONS = {
    "gaps": "milliseconds between pieces of one stream: median, p99, longest",
    "health": "milliseconds until /health has answered: median, p99, longest",
    "answers": "number of answers by HTTP status, of the calls that arrive meanwhile",
}
WORK = home() / "stream_gaps"
ACCEPTED = {  # of `bodies`; the others are refused
    "280,000 items",
    "18,000 lists",
    "pattern that explodes",
    "choice of 9,000",
    "5,000 biases",
    "schema of 5 MB",
    "schema of 240 KB",
    "5 MB that nobody reads",
}
PAUSE_S = 0.02  # between two looks at /health


def asked(content: str = "hi", **fields: Any) -> bytes:
    """The body of a chat."""
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields).encode()


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    """A response format."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def bodies() -> dict[str, bytes]:
    """One body of each kind."""
    described = {f"k{i}": {"type": "string", "description": "x" * 5000} for i in range(1000)}
    return {
        "text of 6 MB": asked("the quick brown fox " * 300_000),
        "text of 60 KB": asked("the quick brown fox " * 3000),
        "cut off": asked("x" * 2_000_000)[:-20],
        "nested 100,000 deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "1.6 million items": asked(x=[5] * 1_600_000),
        "280,000 items": asked(x=[5] * 280_000),
        "150,000 lists": asked(x=[[]] * 150_000),
        "18,000 lists": asked(x=[[]] * 18_000),
        "20,000 messages": json.dumps({"messages": [{"role": "user", "content": "hi"}] * 20_000}).encode(),
        "halves of surrogate pairs": asked("x" * 1_000_000).replace(b"xxx", b"\\ud800", 1),
        "escapes": asked().replace(b"hi", b"\\u00e9" * 700_000),
        "pattern of 15,000 characters": asked(regex="(a|b)*" * 2500),
        "pattern that explodes": asked(regex="((a{0,50}){0,50}){0,50}"),
        "choice of 9,000": asked(choice=[f"number {i}" for i in range(9000)]),
        "5,000 biases": asked(logit_bias={str(i): 1 for i in range(5000)}),
        "grammar of 1 MB": asked(grammar="root ::= " + ' | '.join(f'"word{i}"' for i in range(70_000))),
        "schema of 5 MB": asked(**formatted({"type": "object", "properties": described})),
        "schema of 240 KB": asked(**formatted({"enum": [f"number {i}" for i in range(14_000)]})),
        "schema of 2,500 properties": asked(
            **formatted({"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(2500)}})
        ),
        "tools of 200 KB": asked(
            tools=[
                {"type": "function", "function": {"name": f"f{i}", "description": "x" * 1900, "parameters": {}}}
                for i in range(100)
            ]
        ),
        "5 MB that nobody reads": asked(metadata={"note": "x" * 5_000_000}),
    }  # fmt: skip


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, p99 and longest, in milliseconds."""
    p99 = quantiles(seconds, n=100, method="inclusive")[98]
    return {key: round(value * 1e3, 1) for key, value in zip(
        ("median", "p99", "longest"), (median(seconds), p99, max(seconds)), strict=True
    )}  # fmt: skip


async def read_stream(http: httpx.AsyncClient, gaps: list[float], stop: asyncio.Event) -> None:
    """Read streams, one after the other, and note the gaps in each."""
    while not stop.is_set():
        body = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            before = None
            async for _ in answer.aiter_bytes():
                now = time.perf_counter()
                if before is not None:
                    gaps.append(now - before)
                before = now
                if stop.is_set():
                    return


async def look(http: httpx.AsyncClient, seconds: list[float], stop: asyncio.Event) -> None:
    """Ask /health again and again."""
    while not stop.is_set():
        began = time.perf_counter()
        (await http.get("/health")).raise_for_status()
        seconds.append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE_S)


async def send(http: httpx.AsyncClient, body: bytes) -> str:
    """The status of the answer."""
    sent = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    return str(sent.status_code)


async def storm(url: str, kinds: list[bytes], at_once: int, seconds: float) -> Counter[str]:
    """Send calls, `at_once` of them together, again and again. Returns the answers by status."""
    import httpx

    answers, until = Counter[str](), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        while time.monotonic() < until:
            order = [kinds[i % len(kinds)] for i in range(at_once)]
            answers.update(await asyncio.gather(*(send(http, body) for body in order)))
    return answers


def in_a_process(url: str, kinds: list[bytes], at_once: int, seconds: float) -> Counter[str]:
    """The storm, for a process of its own: beside it in one process, the client would stop its own stream."""
    os.setsid()
    yield_cpu(19)  # clients are on other machines
    if not at_once:
        time.sleep(seconds)
        return Counter()
    return asyncio.run(storm(url, kinds, at_once, seconds))


async def measure(url: str, kinds: dict[str, bytes], at_once: int, seconds: float) -> dict[str, Any]:
    """Gaps while the calls arrive, for `seconds`; with no calls at once, at rest."""
    import httpx

    gaps, health, stop = list[float](), list[float](), asyncio.Event()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(time.sleep, 0).result()  # it has started
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            tasks = [asyncio.create_task(read_stream(http, gaps, stop)), asyncio.create_task(look(http, health, stop))]
            sent = process.submit(in_a_process, url, list(kinds.values()), at_once, seconds)
            answers = await asyncio.wrap_future(sent)
            stop.set()
            await asyncio.gather(*tasks)
    return {"gaps": summary(gaps), "health": summary(health), "answers": dict(answers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=100, help="that arrive at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--each", action="store_true", help="also every kind of call by itself, four at once")
    options = parser.parse_args()
    with needs("dev"):
        import_module("httpx")
    WORK.mkdir(parents=True, exist_ok=True)
    kinds, facts = bodies(), dict[str, Any]()
    bad = {kind: body for kind, body in kinds.items() if kind not in ACCEPTED}
    plan = [("at rest", kinds, 0), (f"{options.requests} bad calls at once", bad, options.requests)]
    plan += [(f"{options.requests} at once, a third of them accepted", kinds, options.requests)]
    plan += [(kind, {kind: body}, 4) for kind, body in kinds.items() if options.each]
    command = [sys.executable, "-m", "twostroke", "serve", "--model", options.model, "--port", "{port}"]
    print("| beside | gaps: median | p99 | longest | /health: longest | answers |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    try:
        with ServerProcess("twostroke", command, WORK) as server:
            for name, chosen, at_once in plan:
                found = asyncio.run(measure(server.url, chosen, at_once, options.seconds))
                facts[name], gaps = found, found["gaps"]
                counts = ", ".join(f"{status}: {count}" for status, count in sorted(found["answers"].items()))
                cells = [gaps["median"], gaps["p99"], gaps["longest"], found["health"]["longest"], counts]
                print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
    except ServerFailed as failure:
        sys.exit(str(failure))
    save("stream-gaps", DEFINITIONS, options.model, facts)


if __name__ == "__main__":
    main()
