"""What it costs a server to be watched: its throughput with 0, 1 and 10 watchers of `/watch`, in turn.

    python -m benchmarks.watching --model smollm2-135m

A watcher reads everything that the server sends it, as a browser's tab does. Every round has one turn with each number
of watchers, in an order that rotates, and a turn is compared with the turn without watchers of the same round.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

from benchmarks.peer.figures import turn_order
from benchmarks.results_file import save
from benchmarks.server_process import ServerProcess
from twostroke.api.llm import LLM
from twostroke.study.bench.latency import BatchShape, PromptSource

WATCHERS = (0, 1, 10)

DEFINITIONS = {
    "tokens_per_second": "tokens of all answers / wall time of the turn, prompts prefilled in it",
    "server_cpu": "processor time of the server / wall time",
    "received_bytes": "bytes that all watchers received during the turn",
    "loss": "1 - tokens_per_second / that of the turn without watchers of the same round; its median counts",
}


class Watchers:
    """A context manager: inside of it, so many connections read the server's feed."""

    def __init__(self, port: int, count: int) -> None:
        self._selector, self._sockets = selectors.DefaultSelector(), list[socket.socket]()
        self.received = 0
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(b"GET /watch HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, one)
            self._sockets.append(one)
        self._over = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watchers:
        self._thread.start()
        time.sleep(0.5)  # every watcher has its first messages
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._thread.join()
        for one in self._sockets:
            one.close()
        time.sleep(0.5)  # the server notices

    def _read(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.1):
                self.received += len(key.data.recv(1 << 16))


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`."""

    tokens_per_second: float
    server_cpu: float
    received_bytes: int


def take_turn(server: ServerProcess, watchers: int, prompts: Sequence[Sequence[int]], output: int) -> Turn:
    """Ask all prompts at once, and wait for the answers."""

    def ask(prompt: Sequence[int]) -> int:
        body = {"prompt": list(prompt), "max_tokens": output, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    with Watchers(server.port, watchers) as watching, ThreadPoolExecutor(len(prompts)) as clients:
        before, cpu, began = watching.received, server.cpu_seconds(), time.perf_counter()
        tokens = sum(clients.map(ask, prompts))
        seconds = time.perf_counter() - began
        return Turn(tokens / seconds, (server.cpu_seconds() - cpu) / seconds, watching.received - before)


def losses(turns: dict[int, list[Turn]], watchers: int) -> list[float]:
    """The loss of each round with so many watchers."""
    pairs = zip(turns[watchers], turns[0], strict=True)
    return [1 - turn.tokens_per_second / alone.tokens_per_second for turn, alone in pairs]


def table(model: str, turns: dict[int, list[Turn]]) -> str:
    """A Markdown table."""
    lines = [
        f"**{model}**: medians of {len(turns[0])} rounds",
        "",
        "| watchers | tokens/s | loss | loss of the rounds | server's CPU | sent KB |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for watchers, taken in turns.items():
        rate, cpu, sent = (median(getattr(turn, name) for turn in taken) for name in DEFINITIONS if name != "loss")
        lost = losses(turns, watchers)
        spread = f"{min(lost):.1%} to {max(lost):.1%}"
        lines.append(f"| {watchers} | {rate:.1f} | {median(lost):.2%} | {spread} | {cpu:.2f} | {sent / 1e3:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs a server to be watched.")
    parser.add_argument("--model", default="smollm2-135m", help="(default smollm2-135m)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take medians over (default 9)")
    parser.add_argument("--streams", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--output", type=int, default=256, help="tokens (default 256)")
    options = parser.parse_args()
    source, shape = PromptSource(), BatchShape(options.prompt, options.output, options.streams)
    llm = LLM(options.model, kv_bytes=64 << 20)  # for its tokens alone
    rounds = [source.make(llm, shape, number) for number in range(3 * (options.rounds + 1))]
    llm.close()
    turns: dict[int, list[Turn]] = {watchers: [] for watchers in WATCHERS}
    command = [sys.executable, "-m", "twostroke", "serve", "--model", options.model, "--host", "127.0.0.1"]
    with (
        tempfile.TemporaryDirectory() as work,
        ServerProcess("watched", [*command, "--port", "{port}", "--itl-ms", "off"], Path(work)) as server,
    ):
        for number in range(options.rounds + 1):  # round 0 warms up
            for label in turn_order([str(watchers) for watchers in WATCHERS], number):
                turn = take_turn(server, int(label), rounds.pop(), options.output)
                turns[int(label)] += [turn] if number else []
                print(f"round {number}, {label} watchers: {turn.tokens_per_second:.1f} tokens/s", file=sys.stderr)
    print(table(options.model, turns))
    rows = [
        {"watchers": watchers, "loss": median(losses(turns, watchers)), "turns": [asdict(turn) for turn in taken]}
        for watchers, taken in turns.items()
    ]
    facts = {"streams": options.streams, "prompt": options.prompt, "output": options.output, "cases": rows}
    print(save("watching", DEFINITIONS, options.model, facts), file=sys.stderr)


if __name__ == "__main__":
    main()
