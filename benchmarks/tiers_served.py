"""What tiers do for a server: a restart, more conversations than the pool holds, and prompts that hit nothing.

    python -m benchmarks.tiers_served

*Restart*: a server with a disk tier answers a long prompt, is killed (SIGKILL), is started again, and is asked again.
*Conversations*: many users, ten times as many as the pool holds, take turns; without lower tiers, with the host, with
the disk, and with a pool that holds them all. *Nothing found*: new prompts only, with and without a disk tier, in turn.
The run fails unless all answers to a prompt are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peer.processes import current_rss_bytes, peak_rss_bytes, tree
from benchmarks.results_file import save
from benchmarks.server_process import ServerFailed, ServerProcess
from twostroke.api.llm import LLM
from twostroke.engine.timings import percentile
from twostroke.study.bench.latency import BatchShape, PromptSource

OUTPUT = 16

DEFINITIONS = {
    "ttft_s": "from sending a request to the first event of its stream that has text",
    "cold": "the first question to a new server with an empty directory",
    "returned": "the same question to the same server again",
    "restarted": "the same question to a new server after the first was killed by SIGKILL",
    "by_tier": "tokens of all timed prompts by where they were found; the rest was computed",
    "tokens_per_second": "prompt and answer tokens of all requests / wall time, one request at a time",
    "filled": "bytes of memory once pool and host tier are full; `before`: RSS after the first answer",
    "peak_rss_bytes": "largest resident memory of the server; weights and pool included",
}


class Differs(Exception):
    """Two answers to one prompt differ: the figures are invalid."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer."""

    ttft_s: float
    seconds: float
    text: str
    usage: dict[str, Any]


def server(model: str, work: Path, *options: str) -> ServerProcess:
    command = [sys.executable, "-m", "twostroke", "serve", "--model", model, "--host", "127.0.0.1", "--port", "{port}"]
    return ServerProcess("tiers", [*command, *options], work)


def ask(url: str, prompt: list[int]) -> Answer:
    """Stream a completion of token ids."""
    body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    began, first, text, usage = time.perf_counter(), None, "", {}
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if choice["text"] and first is None:
                    first = time.perf_counter()
                text += choice["text"]
            usage = event.get("usage") or usage
    ended = time.perf_counter()
    return Answer((first or ended) - began, ended - began, text, usage)


def by_tier(answers: list[Answer]) -> dict[str, int]:
    """Tokens found, by tier."""
    total: dict[str, int] = {}
    for answer in answers:
        for tier, count in answer.usage["prompt_tokens_details"]["cached_tokens_by_tier"].items():
            total[tier] = total.get(tier, 0) + count
    return total


def same(answers: list[Answer], what: str) -> None:
    if len({answer.text for answer in answers}) != 1:
        raise Differs(f"{what}: answers to one prompt differ")


def restart(model: str, prompt: list[int], rounds: int, work: Path) -> list[dict[str, Any]]:
    """TTFT before and after a kill. Raises Differs."""
    found = list[dict[str, Any]]()
    for number in range(rounds):
        options = ["--kv-disk", str(work / f"restart-{number}"), "--kv-disk-bytes", "4GiB", "--kv-bytes", "1GiB"]
        with server(model, work, *options) as first:
            ask(first.url, prompt[:64])  # warm
            cold, returned = ask(first.url, prompt), ask(first.url, prompt)
            time.sleep(2)
            first.kill()
        with server(model, work, *options) as second:
            ask(second.url, prompt[64:128])
            restarted = ask(second.url, prompt)
        same([cold, returned, restarted], "restart")
        turns = {"cold": cold, "returned": returned, "restarted": restarted}
        found.append({n: {"ttft_s": a.ttft_s, "by_tier": by_tier([a])} for n, a in turns.items()})
    return found


def conversations(model: str, prompts: list[list[int]], pool: int, work: Path) -> dict[str, Any]:
    """Everybody asks, twice, in turn; the second round is timed. Raises Differs."""
    everything = 12 * pool
    kinds = {
        "recompute": ["--kv-bytes", str(pool)],
        "host": ["--kv-bytes", str(pool), "--kv-host", str(everything)],
        "disk": ["--kv-bytes", str(pool), "--kv-disk", str(work / "many"), "--kv-disk-bytes", str(2 * everything)],
        "pool that holds all": ["--kv-bytes", str(everything)],
    }
    texts: dict[int, str] = {}
    found: dict[str, Any] = {}
    for kind, options in kinds.items():
        with server(model, work, *options) as one:
            for _ in range(2 if kind == "disk" else 1):  # short prompts go to the disk when they are used again
                for prompt in prompts:
                    ask(one.url, prompt)
            answers = [ask(one.url, prompt) for prompt in prompts]
            rss = peak_rss_bytes(tree(one.pid))
        for number, answer in enumerate(answers):
            if texts.setdefault(number, answer.text) != answer.text:
                raise Differs(f"{kind}: conversation {number} has another answer")
        times = [answer.ttft_s for answer in answers]
        found[kind] = {
            "ttft_p50_s": percentile(times, 50),
            "ttft_p99_s": percentile(times, 99),
            "by_tier": by_tier(answers),
            "peak_rss_bytes": rss,
        }
    return found


def nothing_found(model: str, prompts: list[list[int]], rounds: int, work: Path) -> dict[str, Any]:
    """Throughput of new prompts, with a disk tier and without, in turn."""
    rates: dict[str, list[float]] = {"without": [], "with": []}
    options = {"without": list[str](), "with": ["--kv-disk", str(work / "none"), "--kv-host", "256MiB"]}
    with server(model, work) as plain, server(model, work, *options["with"]) as tiered:
        urls = {"without": plain.url, "with": tiered.url}
        for number in range(rounds + 1):
            for kind in list(urls) if number % 2 else list(urls)[::-1]:
                mine = prompts[number * 8 : (number + 1) * 8]
                began = time.perf_counter()
                for prompt in mine:
                    ask(urls[kind], prompt)
                seconds = time.perf_counter() - began
                rates[kind] += [sum(len(p) + OUTPUT for p in mine) / seconds] if number else []
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    return {"tokens_per_second": {k: median(v) for k, v in rates.items()}, "ratio": median(ratios), "ratios": ratios}


def filled(model: str, pool: int, host: int, work: Path) -> dict[str, Any]:
    """Memory of a server whose pool and host tier are filled by new prompts, half as many again as they hold."""
    length = 2000
    count = 3 * (pool + host) // (2 * _page_bytes(model) * (length // 16))
    with server(model, work, "--kv-bytes", str(pool), "--kv-host", str(host)) as one:
        ask(one.url, [5] * 64)
        before = current_rss_bytes(tree(one.pid))
        for prompt in make_prompts(model, length, count, 1000):
            ask(one.url, prompt)
        peak = peak_rss_bytes(tree(one.pid))
    return {"before": before, "budgets": pool + host, "peak": peak, "of_budgets": peak / (before + pool + host)}


def make_prompts(model: str, length: int, count: int, first: int = 0) -> list[list[int]]:
    with LLM(model, kv_bytes=1 << 22) as llm:
        return [PromptSource().make(llm, BatchShape(length, OUTPUT), first + number)[0] for number in range(count)]


def report(facts: dict[str, Any]) -> str:
    """Markdown, of the parts that were measured."""
    lines = list[str]()
    if turns := facts.get("restart"):
        lines += ["**Restart**", "", "| | TTFT | found |", "|---|---:|---|"]
        for name in ("cold", "returned", "restarted"):
            mine = [turn[name] for turn in turns]
            lines.append(f"| {name} | {1e3 * median(t['ttft_s'] for t in mine):,.0f} ms | {_where(mine[0])} |")
    if kinds := facts.get("conversations"):
        lines += ["", "**Conversations**", "", "| | TTFT p50 | p99 | found | RSS |", "|---|---:|---:|---|---:|"]
        for kind, one in kinds.items():
            times = f"{1e3 * one['ttft_p50_s']:,.0f} ms | {1e3 * one['ttft_p99_s']:,.0f} ms"
            lines.append(f"| {kind} | {times} | {_where(one)} | {one['peak_rss_bytes'] / 2**20:,.0f} MiB |")
    if none := facts.get("nothing_found"):
        lines += ["", f"**Nothing found**: {none['ratio']:.3f} of the throughput without tiers ({none['ratios']})"]
    if full := facts.get("filled"):
        peak, before, budgets = (f"{full[key] / 2**20:,.0f} MiB" for key in ("peak", "before", "budgets"))
        share = f"{full['of_budgets']:.3f} of {before} before and {budgets} of budgets"
        lines += ["", f"**Filled**: RSS of {peak} at most, {share}"]
    return "\n".join(lines)


def _where(one: dict[str, Any]) -> str:
    return ", ".join(f"{n:,} {tier}" for tier, n in one["by_tier"].items() if n) or "nothing"


def _restart(asked: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    (long,) = make_prompts(asked.restart_model, 4000, 1)
    return restart(asked.restart_model, long, asked.rounds, work)


def _conversations(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    pool = 4 * (512 + OUTPUT + 16) // 16 * _page_bytes(asked.model)
    return conversations(asked.model, make_prompts(asked.model, 512, 40), pool, work)


def _nothing_found(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    return nothing_found(asked.model, make_prompts(asked.model, 256, 8 * 8, 100), 7, work)


def _filled(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    return filled(asked.model, asked.pool, 2 * asked.pool, work)


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "restart": _restart,
    "conversations": _conversations,
    "nothing_found": _nothing_found,
    "filled": _filled,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restart-model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--model", default="smollm2-135m", help="of the conversations, and of prompts not found")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--pool", type=int, default=2 << 30, help="bytes, of `filled`; the host tier gets twice as much"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        facts = {name: make(arguments, work) for name, make in PARTS.items() if name in arguments.parts}
    save("tiers-served", DEFINITIONS, arguments.model, facts | {"restart_model": arguments.restart_model})
    print(report(facts))


def _page_bytes(model: str) -> int:
    with LLM(model, kv_bytes=1 << 22) as llm:
        return llm.pool.page_bytes


if __name__ == "__main__":
    try:
        main()
    except (Differs, ServerFailed) as error:
        sys.exit(f"error: {error}")
