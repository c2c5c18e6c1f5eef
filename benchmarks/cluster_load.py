"""The requests that `benchmarks.cluster` sends, and what it measures of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.local_cluster import ClusterProcess, LocalCluster
from twostroke.engine.timings import percentile
from twostroke.study.traffic.requests import TokenRequest

if TYPE_CHECKING:  # they need httpx, which `terminal.needs` looks for first
    from twostroke.study.bench.serving.client import Client, Outcome

STREAMS, STREAM_TOKENS = 4, 200  # short prompts, of which so many decode all the time
LONG, LONG_OUTPUT, LONG_EVERY_S = 4000, 16, 6.0
LENGTHS = (64, 512, 2048, 4000)
DOCUMENTS, DOCUMENT_TOKENS = 8, 1500
LIMIT_S = 120.0  # for one request


class Load:
    """Sends prompts of random ids, which share nothing unless told to."""

    def __init__(self, vocab_size: int, url: str, model: str, seed: int) -> None:
        self._ids, self._url, self._model, self._seed = range(1000, min(vocab_size, 30000)), url, model, seed

    def prompts(self, count: int, length: int, output: int, prefix: int = 0, groups: int = 1) -> list[TokenRequest]:
        """Prompts of a length; each begins with one of so many prefixes."""
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        prefixes, chosen = rng.choice(self._ids, (groups, prefix)), rng.integers(groups, size=count)
        return [
            TokenRequest([*prefixes[group].tolist(), *rng.choice(self._ids, length - prefix).tolist()], output)
            for group in chosen
        ]

    def endless(self, length: int, output: int) -> Iterator[TokenRequest]:
        """Prompts of a length, as many as are wanted."""
        while True:
            yield from self.prompts(64, length, output)

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        """What `answer` needs; its clock starts now."""
        import httpx

        from twostroke.study.bench.serving.client import Client

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:
            yield Client(http, self._model, LIMIT_S)

    def one(self, ask: TokenRequest) -> Outcome:
        """The outcome of a request that comes alone. Raises RuntimeError if it fails."""

        async def alone() -> Outcome:
            async with self.client() as client:
                return await answer(client, ask, 0.0)

        return asyncio.run(alone())


async def answer(client: Client, ask: TokenRequest, due: float) -> Outcome:
    """Send a request at its time, in seconds of the client's clock. Raises RuntimeError if it fails."""
    from twostroke.study.bench.serving.client import Outcome

    outcome = Outcome(len(ask.prompt), ask.output_tokens, due)
    await asyncio.sleep(due - client.now())
    await client.send(ask, outcome)
    if outcome.error:
        raise RuntimeError(f"a request failed: {outcome.error}")
    return outcome


def spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": percentile(values, share) or 0.0 for share in (50, 99)}


def apart(load: Load, count: int) -> dict[str, Any]:
    """Streams follow each other in some places, while a long prompt comes every few seconds."""
    shorts = load.endless(64, STREAM_TOKENS)
    longs = load.prompts(count, LONG, LONG_OUTPUT)
    load.one(next(shorts))

    async def run() -> tuple[list[Outcome], list[Outcome]]:
        async with load.client() as client:
            asked = [asyncio.create_task(answer(client, ask, 1.0 + i * LONG_EVERY_S)) for i, ask in enumerate(longs)]

            async def place() -> list[Outcome]:
                outcomes: list[Outcome] = []
                while not all(task.done() for task in asked):
                    outcomes.append(await answer(client, next(shorts), client.now()))
                return outcomes

            places = await asyncio.gather(*(place() for _ in range(STREAMS)))
            return await asyncio.gather(*asked), [outcome for some in places for outcome in some]

    answered, streams = asyncio.run(run())
    end = max(one.end for one in answered)
    under_way = [(one.due, one.tokens[0]) for one in answered]
    gaps = [
        b - a
        for one in streams
        for a, b in zip(one.tokens, one.tokens[1:], strict=False)
        if any(start < b and a < stop for start, stop in under_way)
    ]
    counted = [
        one.input_tokens + sum(at <= end for at in one.tokens) for one in (*answered, *streams) if one.tokens[0] <= end
    ]
    return {
        "ttft_s": spread([one.timings.ttft or 0.0 for one in answered]),
        "itl_s": spread(gaps),
        "tokens_per_second": sum(counted) / end,
    }


def hop(load: Load, rounds: int, decode: ClusterProcess | None) -> dict[str, Any]:
    """TTFT of prompts that come alone, by their length, and what crossed for them."""
    found: dict[str, Any] = {}
    load.one(load.prompts(1, 64, 4)[0])
    for length in LENGTHS:
        before = len(_crossed(decode)) if decode is not None else 0
        times = [load.one(ask).timings.ttft or 0.0 for ask in load.prompts(rounds, length, 4)]
        found[str(length)] = {"ttft_s": median(times)}
        if decode is not None and (crossed := _crossed(decode)[before:]):
            size, seconds = crossed[-1][0], median(one for _, one in crossed)
            found[str(length)] |= {"bytes": size, "seconds_with_prefill": seconds}
    return found


def _crossed(worker: ClusterProcess) -> list[tuple[int, float]]:
    """(bytes, seconds) of each value that came to a decode worker."""
    found = re.findall(r"entries came: (\d+) bytes in ([\d.]+) s", worker.log.read_text(errors="replace"))
    return [(int(size), float(seconds)) for size, seconds in found]


def routing(load: Load, questions: int) -> dict[str, Any]:
    """Questions about shared documents, one after another."""
    asks = load.prompts(questions, DOCUMENT_TOKENS + 40, 16, DOCUMENT_TOKENS, DOCUMENTS)
    outcomes = [load.one(ask) for ask in asks]
    cached = sum(one.cached or 0 for one in outcomes)
    return {
        "ttft_s": spread([one.timings.ttft or 0.0 for one in outcomes]),
        "cached_share": cached / sum(one.input_tokens for one in outcomes),
    }


def migration(load: Load, kills: int, cluster: LocalCluster, replace: Callable[[], object]) -> dict[str, Any]:
    """Streams undisturbed, and with their worker killed in the middle; `replace` starts another worker."""
    itl = median(load.one(load.prompts(1, 256, 200)[0]).timings.itls)
    stalls: list[float] = []
    for _ in range(kills):
        cluster.ready(forgotten=True)  # a retry that goes to a dead worker counts against the limit
        (ask,) = load.prompts(1, 256, 200)

        async def killed(ask: TokenRequest = ask) -> Outcome:
            async with load.client() as client:
                stream = asyncio.create_task(answer(client, ask, 0.0))
                await asyncio.sleep(itl * 100)
                await asyncio.to_thread(_kill_busiest, cluster)
                return await stream

        stalls.append(max(asyncio.run(killed()).timings.itls))
        replace()
    return {"itl_s": itl, "stall_s": spread(stalls), "stall_itls": median(stalls) / itl}


def _kill_busiest(cluster: LocalCluster) -> None:
    workers = cluster.running
    running = [worker.metric("twostroke_requests", state="running") for worker in workers]
    if not max(running):
        raise RuntimeError("the stream had ended before its worker was to be killed")
    workers[running.index(max(running))].kill()
