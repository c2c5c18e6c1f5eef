"""Prefill and decode in two processes against one, behind NVIDIA Dynamo's front end: `make bench-cluster`.

    python -m benchmarks.cluster --model smollm2-135m

On two cores a worker has one thread, and the one process that it is compared with has two. Parts:

    apart      streams decode while long prompts arrive: TTFT, ITL, throughput
    hop        what the way of a request costs by the length of its prompt: one process, a front end before it, KV
               that crosses; and how fast it crosses
    routing    questions about shared documents over two workers: by the prefix indexes, and in turn
    migration  the longest gap of a stream whose worker is killed, in ITLs
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.needs import needs
from benchmarks.results_file import save
from benchmarks.server_process import ServerProcess
from twostroke.cluster.local import LocalCluster, Member
from twostroke.engine.timings import percentile

PARTS = ("apart", "hop", "routing", "migration")
STREAMS, STREAM_TOKENS = 4, 400  # short prompts, which decode all the time
LONG, LONG_OUTPUT, LONG_COUNT, LONG_EVERY_S = 4000, 16, 8, 6.0
LENGTHS = (64, 512, 2048, 4000)
DOCUMENTS, DOCUMENT_TOKENS, QUESTIONS = 8, 1500, 48
DEFINITIONS = {
    "ttft_s": "first token - arrival, of the long prompts in `apart`, else of all",
    "itl_s": "gaps between the tokens of the streams while long prompts are under way",
    "tokens_per_second": "prompt and output tokens of all requests / duration",
    "gigabytes_per_second": "bytes of K and V that crossed / time from the claim to the last page, after the prefill",
    "cached_share": "prompt tokens found in a prefix index / prompt tokens",
    "stall_itls": "longest gap of a stream whose worker is killed / median gap of the undisturbed stream",
}


class Load:
    """Prompts of random ids, which share nothing unless told to."""

    def __init__(self, vocab_size: int, url: str, model: str, seed: int) -> None:
        self.ids, self.url, self.model, self.seed = range(1000, min(vocab_size, 30000)), url, model, seed

    def prompts(self, count: int, length: int, output: int, prefix: int = 0, groups: int = 1) -> list[Any]:
        """Prompts of a length; each begins with one of so many prefixes."""
        from twostroke.traffic.requests import Ask

        self.seed += 1
        rng = np.random.default_rng(self.seed)
        prefixes, chosen = rng.choice(self.ids, (groups, prefix)), rng.integers(groups, size=count)
        return [
            Ask([*prefixes[group].tolist(), *rng.choice(self.ids, length - prefix).tolist()], output)
            for group in chosen
        ]

    def send(self, plan: Sequence[tuple[Any, float]]) -> list[Any]:
        """Send each prompt at its time in seconds, and return the outcomes. Raises RuntimeError if one fails."""

        async def all_of_them() -> list[Any]:
            import httpx

            from twostroke.perf.serving.client import Client, Outcome

            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=self.url, timeout=None, limits=limits) as http:
                client = Client(http, self.model, 600)
                outcomes = [Outcome(len(ask.prompt), ask.output_tokens, due) for ask, due in plan]

                async def one(ask: Any, outcome: Any) -> None:
                    await asyncio.sleep(outcome.due - client.now())
                    await client.send(ask, outcome)

                await asyncio.gather(*(one(ask, outcome) for (ask, _), outcome in zip(plan, outcomes, strict=True)))
                return outcomes

        outcomes = asyncio.run(all_of_them())
        if wrong := [outcome.error for outcome in outcomes if outcome.error]:
            raise RuntimeError(f"{len(wrong)} of {len(outcomes)} requests failed: {wrong[0]}")
        return outcomes


def spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": percentile(values, share) or 0.0 for share in (50, 99)}


def apart(load: Load) -> dict[str, Any]:
    """Streams follow each other in four places, while a long prompt comes every few seconds."""
    duration = LONG_COUNT * LONG_EVERY_S
    load.send([(ask, 0.0) for ask in load.prompts(2, 64, 8)])
    streams = [(ask, 0.0) for ask in load.prompts(STREAMS, 64, STREAM_TOKENS)]
    longs = [(ask, 1.0 + i * LONG_EVERY_S) for i, ask in enumerate(load.prompts(LONG_COUNT, LONG, LONG_OUTPUT))]
    outcomes = load.send([*streams, *longs])
    first, rest = outcomes[: len(streams)], outcomes[len(streams) :]
    under_way = [(one.due, one.tokens[0]) for one in rest]
    gaps = [
        b - a
        for one in first
        for a, b in zip(one.tokens, one.tokens[1:], strict=False)
        if any(start < b and a < end for start, end in under_way)
    ]
    tokens = sum(one.input_tokens + len(one.tokens) for one in outcomes)
    return {
        "ttft_s": spread([one.timings.ttft for one in rest]),
        "itl_s": spread(gaps),
        "tokens_per_second": tokens / max(duration, *(one.end for one in outcomes)),
    }


def hop(load: Load, rounds: int, decode: Member | None) -> dict[str, Any]:
    """TTFT of prompts that come alone, and what crossed for them."""
    found: dict[str, Any] = {}
    load.send([(ask, 0.0) for ask in load.prompts(1, 64, 4)])
    for length in LENGTHS:
        before = len(_crossed(decode)) if decode is not None else 0
        times = [load.send([(ask, 0.0)])[0].timings.ttft for ask in load.prompts(rounds, length, 4)]
        found[str(length)] = {"ttft_s": median(times)}
        if decode is not None and (crossed := _crossed(decode)[before:]):
            size, seconds = crossed[-1][0], median(one for _, one in crossed)
            found[str(length)] |= {"bytes": size, "seconds_with_prefill": seconds}
    return found


def _crossed(worker: Member) -> list[tuple[int, float]]:
    """(bytes, seconds) of each value that came to a decode worker."""
    found = re.findall(r"entries came: (\d+) bytes in ([\d.]+) s", worker.log.read_text(errors="replace"))
    return [(int(size), float(seconds)) for size, seconds in found]


def routing(load: Load) -> dict[str, Any]:
    asks = load.prompts(QUESTIONS, DOCUMENT_TOKENS + 40, 16, DOCUMENT_TOKENS, DOCUMENTS)
    outcomes = [load.send([(ask, 0.0)])[0] for ask in asks]
    cached = sum(one.cached or 0 for one in outcomes)
    return {
        "ttft_s": spread([one.timings.ttft for one in outcomes]),
        "cached_share": cached / sum(one.input_tokens for one in outcomes),
    }


def migration(load: Load, cluster: LocalCluster, start: Callable[[], Any]) -> dict[str, Any]:
    """The same stream undisturbed and with its worker killed in the middle."""
    (ask,) = load.prompts(1, 256, 200)
    (whole,) = load.send([(ask, 0.0)])
    itl = median(whole.timings.itls)
    stalls: list[float] = []
    for _ in range(5):
        (ask,) = load.prompts(1, 256, 200)

        async def killed(ask: Any = ask) -> Any:
            watching = asyncio.create_task(_kill_busiest(cluster, itl * 100))
            (outcome,) = await asyncio.to_thread(load.send, [(ask, 0.0)])
            await watching
            return outcome

        stalls.append(max(asyncio.run(killed()).timings.itls))
        start()
        cluster.ready()
    return {"itl_s": itl, "stall_s": spread(stalls), "stall_itls": median(stalls) / itl}


async def _kill_busiest(cluster: LocalCluster, after_s: float) -> None:
    await asyncio.sleep(after_s)
    workers = cluster.running
    running = [worker.metric("twostroke_requests", state="running") for worker in workers]
    workers[running.index(max(running))].kill()


def measure(model: str, parts: Sequence[str], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    from twostroke.checkpoints.resolve import open_checkpoint

    vocab, found = open_checkpoint(model).config.vocab_size, dict[str, Any]()
    kv = ["--kv-bytes", "2GiB"]
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as scratch:
        folder = Path(scratch)

        def one_process(threads: int) -> ServerProcess:
            command = [sys.executable, "-m", "twostroke", "serve", "--model", model, "--port", "{port}"]
            return ServerProcess("serve", [*command, "--threads", str(threads), *kv], folder)

        def cluster(name: str, roles: Sequence[str], **options: Any) -> LocalCluster:
            made = LocalCluster(folder / name, model, **options)
            made.options = ["--model", model, "--threads", "1", *kv]
            for role in roles:
                made.add("--role", role)
            return made

        def note(part: str, setting: str, figures: dict[str, Any]) -> None:
            found.setdefault(part, {})[setting] = figures
            say(f"{part}, {setting}: {figures}")

        if "apart" in parts:
            with one_process(2) as server:
                note("apart", "one process, two threads", apart(Load(vocab, server.url, model, 1)))
            with cluster("split", ["prefill", "decode"]) as made:
                made.ready()
                note("apart", "prefill and decode apart", apart(Load(vocab, made.url, model, 1)))
        if "hop" in parts:
            with one_process(1) as server:
                note("hop", "one process, one thread", hop(Load(vocab, server.url, model, 100), rounds, None))
            for setting, roles in (("a front end before it", ["both"]), ("KV crosses", ["prefill", "decode"])):
                with cluster(setting.replace(" ", "-"), roles) as made:
                    made.ready()
                    decode = made.workers[1] if len(roles) == 2 else None
                    note("hop", setting, hop(Load(vocab, made.url, model, 100), rounds, decode))
        if "routing" in parts:
            for router, events in (("round-robin", None), ("kv", "zmq")):
                with cluster(router, ["both", "both"], router=router, events=events) as made:
                    made.ready()
                    note("routing", router, routing(Load(vocab, made.url, model, 200)))
        if "migration" in parts:
            with cluster("migration", ["both", "both"]) as made:
                made.ready()
                figures = migration(Load(vocab, made.url, model, 300), made, lambda: made.add("--role", "both"))
                note("migration", "kill -9", figures)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="prompts of each length in `hop`")
    asked = parser.parse_args()
    for extra, package in (("bench", "httpx"), ("dynamo", "dynamo.llm")):
        with needs(extra):
            import_module(package)
    found = measure(asked.model, asked.parts, asked.rounds, lambda line: print(line, flush=True))
    print(f"\nsaved in {save('cluster', DEFINITIONS, asked.model, found)}")


if __name__ == "__main__":
    main()
