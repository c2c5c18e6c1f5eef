"""All requests of a load test: in open loop, at times drawn beforehand, or in closed loop, each after another's end."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from twostroke.study.bench.serving.client import Client, Outcome
from twostroke.study.traffic.requests import ClosedLoop, OpenLoop, Replay, TokenRequest


@dataclass(frozen=True)
class LoadTest:
    """Every request that was sent. `cpu_s` is the processor time of this process during the test."""

    outcomes: list[Outcome]
    interrupted: bool
    cpu_s: float


async def drive(
    client: Client,
    asks: Sequence[TokenRequest],
    pattern: OpenLoop | Replay | ClosedLoop,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> LoadTest:
    """Send all. If cancelled (Ctrl-C), it returns the outcomes so far; requests in flight count as interrupted."""
    outcomes = [Outcome(len(ask.prompt), ask.output_tokens) for ask in asks]

    async def one(ask: TokenRequest, outcome: Outcome) -> None:
        await client.send(ask, outcome)
        progress()

    async def worker(pairs: Iterator[tuple[TokenRequest, Outcome]]) -> None:
        for ask, outcome in pairs:
            outcome.due = client.now()
            await one(ask, outcome)

    pairs = zip(asks, outcomes, strict=True)
    used, client.began, interrupted = time.process_time(), time.perf_counter(), False
    try:
        async with asyncio.TaskGroup() as tasks:
            if isinstance(pattern, ClosedLoop):
                for _ in range(pattern.concurrency):
                    tasks.create_task(worker(pairs))
            else:
                for due, (ask, outcome) in zip(pattern.times(len(asks), seed), pairs, strict=True):
                    outcome.due = due
                    await asyncio.sleep(due - client.now())
                    tasks.create_task(one(ask, outcome))
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
    return LoadTest([one for one in outcomes if one.sent is not None], interrupted, time.process_time() - used)
