"""Conversations that come back, and a restart: our server with tiers beside llama.cpp's with `--cache-ram` and slots.

    python -m benchmarks.tiers_peer --llama-server PATH

Both serve the same GGUF file, one after the other, with the same prompts in tokens, one request at a time.
*Return*: conversations take turns, more than the pool (ours) or the slot (llama.cpp's) holds; the first round computes,
the later ones are timed. *Restart*: one conversation is asked, the server is ended and started again. Ours is killed,
and finds it in its directory. llama.cpp's slot must be saved by a call before the end, and restored by another one
after the start; the time of the latter is part of the TTFT. llama.cpp's server is built by its users:

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-server
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results_file import save
from benchmarks.server_process import ServerFailed, ServerProcess
from benchmarks.tiers_served import Differs, ask, make_prompts, same, server
from twostroke.models.checkpoints.resolve import open_checkpoint

DEFINITIONS = {
    "cold": "TTFT in seconds of each conversation's first question",
    "returned": "TTFT in seconds of the same questions in later rounds",
    "restarted": "TTFT in seconds of a question after the restart; `restored` of it is the call that restores a slot",
    "saved": "seconds of the call that saves a slot before the end",
}
SLOT = "conversation.bin"


class Ours:
    """Our server; the pool holds two conversations, tiers hold the rest."""

    name = "twostroke"

    def __init__(self, model: str, work: Path, pool: str) -> None:
        self._model, self._work = model, work
        self._options = ["--kv-bytes", pool, "--kv-host", "4GiB", "--kv-disk", str(work / "kv")]
        self._options += ["--kv-disk-bytes", "8GiB"]

    def start(self) -> ServerProcess:
        return server(self._model, self._work, *self._options)

    def end(self, one: ServerProcess) -> float:
        time.sleep(2)  # pages are written when a prompt is entered
        one.kill()
        return 0.0

    def restored(self, url: str) -> float:
        return 0.0


class Llama:
    """llama.cpp's server with one slot, which keeps earlier conversations in RAM."""

    name = "llama.cpp"

    def __init__(self, binary: Path, file: Path, work: Path, context: int, threads: int) -> None:
        self._work = work
        self._command = [str(binary), "-m", str(file), "--host", "127.0.0.1", "--port", "{port}", "-np", "1"]
        self._command += ["-c", str(context), "-t", str(threads), "--cache-ram", "4096"]
        self._command += ["--slot-save-path", f"{work}/"]

    def start(self) -> ServerProcess:
        return ServerProcess("llama", self._command, self._work)

    def end(self, one: ServerProcess) -> float:
        seconds = _slot(one.url, "save")
        one.stop()
        return seconds

    def restored(self, url: str) -> float:
        return _slot(url, "restore")


def _slot(url: str, action: str) -> float:
    """Seconds that a call about the slot takes."""
    body = json.dumps({"filename": SLOT}).encode()
    request = urllib.request.Request(f"{url}/slots/0?action={action}", body, {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return time.perf_counter() - began


def returned(engine: Ours | Llama, prompts: list[list[int]], rounds: int) -> dict[str, Any]:
    """All conversations in turn, again and again. Raises Differs."""
    with engine.start() as one:
        ask(one.url, prompts[0][:64])  # warm
        answers = [[ask(one.url, prompt) for prompt in prompts] for _ in range(rounds + 1)]
    if isinstance(engine, Ours):  # llama.cpp's may differ: behind a prefix that was found it computes in other batches
        for turns in zip(*answers, strict=True):
            same(list(turns), "return")
    later = [answer.ttft_s for turn in answers[1:] for answer in turn]
    return {"cold": [answer.ttft_s for answer in answers[0]], "returned": later}


def restarted(engine: Ours | Llama, prompt: list[int], rounds: int) -> dict[str, Any]:
    """TTFT after the server was ended and started again."""
    found: dict[str, list[float]] = {"restarted": [], "restored": [], "saved": []}
    for _ in range(rounds):
        with engine.start() as one:
            ask(one.url, prompt)
            found["saved"].append(engine.end(one))
        with engine.start() as again:
            seconds = engine.restored(again.url)
            found["restored"].append(seconds)
            found["restarted"].append(seconds + ask(again.url, prompt).ttft_s)
    return found


def row(name: str, facts: dict[str, Any]) -> str:
    """Markdown."""
    middle = [1e3 * median(facts[key]) for key in ("cold", "returned")]
    last = [1e3 * max(facts["returned"]), 1e3 * median(facts["restarted"]), 1e3 * median(facts["saved"])]
    return f"| {name} | " + " | ".join(f"{value:,.0f}" for value in (*middle, *last)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's server")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="a GGUF model of the catalog")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=3300, help="of each conversation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", default="96MiB", help="of our server; a conversation of the 0.5B takes 40 MB")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    file = open_checkpoint(asked.model).files[0]
    prompts, facts = make_prompts(asked.model, asked.tokens, asked.conversations), dict[str, Any]()
    print("| ms | cold | on return | longest | after a restart | saving |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        work, context = Path(folder), asked.tokens + 512
        for engine in (
            Ours(asked.model, work, asked.pool),
            Llama(asked.llama_server, file, work, context, asked.threads),
        ):
            facts[engine.name] = returned(engine, prompts, asked.rounds)
            facts[engine.name] |= restarted(engine, prompts[0], asked.rounds)
            print(row(engine.name, facts[engine.name]), flush=True)
    save("tiers-peer", DEFINITIONS, asked.model, facts)


if __name__ == "__main__":
    try:
        main()
    except (Differs, ServerFailed) as error:
        sys.exit(f"error: {error}")
