"""TTFT of the same prompts by where their KV is found, and how quickly each tier gives it.

    python -m benchmarks.tiers --models smollm2-135m qwen2.5-coder-0.5b qwen2.5-coder-1.5b

A model is opened with a disk and a remote tier, and computes each prompt. Then it is opened again for every source, as
after a restart: with an empty pool, and one tier that has the prompt. The run fails unless every answer has the same
tokens and log-probabilities as the computed one, and unless the prompt was found where it should be.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from benchmarks.server_process import free_port
from benchmarks.terminal import command_line, ended_by, markdown, say
from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.study.bench.latency import BatchShape, PromptSource

MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
LENGTHS = [512, 2000, 8000]
SOURCES = ["computed", "pool", "host", "disk cold", "disk warm", "remote"]
OUTPUT = 4  # tokens; their log-probabilities are compared

DEFINITIONS = {
    "ttft_s": "first token - arrival; the median over rounds",
    "found": "tokens of the prompt found in that tier; fewer than all if the cost gate had a part computed",
    "bytes_per_s": "bytes of pages that came from the tier / seconds that reading them took, digests checked",
    "plain": "bytes/s of reading the same files in turn into new memory, as a pool is; nothing checked",
    "disk cold": "the files were dropped from the system's page cache before (posix_fadvise), after a sync",
    "others_cpu": "processor time of everything else on the machine during the turn / wall time; a remote server's too",
}


class Differs(Exception):
    """An answer differs from the computed one, or a prompt was not found where it should be."""


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`."""

    ttft_s: float
    found: int
    others_cpu: float


@dataclass
class Places:
    """Where pages go: a directory, and the URL of a server."""

    disk: Path
    remote: str | None

    def open(self, model: str, pool_bytes: int, source: str) -> LLM:
        """The model with the tier that a source needs; "write": with all."""
        disk = self.disk if source in ("write", "disk cold", "disk warm") else None
        remote = self.remote if source in ("write", "remote") else None
        host = 2 * pool_bytes if source == "host" else None
        most = 40 << 30 if disk else None
        return LLM(model, kv_bytes=pool_bytes, kv_disk=disk, kv_disk_bytes=most, kv_remote=remote, kv_host=host)

    @property
    def files(self) -> list[Path]:
        return [file for file in self.disk.glob("pages/*/*") if file.suffix != ".json"]

    def cool(self) -> None:
        """Drop the files from the system's page cache."""
        for file in self.files:
            with file.open("rb") as one:
                os.fsync(one.fileno())
                os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def plain(self) -> float:
        """Bytes/s of reading all files in turn into new memory."""
        at, memory = 0, mmap.mmap(-1, sum(path.stat().st_size for path in self.files))
        memory.madvise(mmap.MADV_HUGEPAGE)  # as for the pool
        with memory, memoryview(memory) as view:
            began = time.perf_counter()
            for path in self.files:
                with path.open("rb", buffering=0) as file, view[at:] as rest:
                    at += file.readinto(rest) or 0
            return at / (time.perf_counter() - began)


def ask(llm: LLM, prompt: list[int]) -> tuple[Completion, float]:
    """An answer, and the processor time of others meanwhile."""
    others = Others()
    (answer,) = llm.generate([prompt], max_tokens=OUTPUT, logprobs=0, ignore_eos=True)
    return answer, others.cpu


def measure(model: str, lengths: Sequence[int], rounds: int, places: Places) -> dict[str, Any]:
    """All sources of one model. Raises Differs."""
    prompts = {
        (length, number): PromptSource().make(llm, BatchShape(length, OUTPUT), number)[0]
        for llm in [LLM(model, kv_bytes=1 << 20)]
        for length in lengths
        for number in range(rounds)
    }
    pool_bytes = _pool_bytes(model, max(lengths))
    turns: dict[str, dict[int, list[Turn]]] = {source: {length: [] for length in lengths} for source in SOURCES}
    rates: dict[str, Any] = {}
    expected: dict[tuple[int, int], list[Any]] = {}
    for key, prompt in prompts.items():  # one prompt at a time, so that the pool of the largest is enough
        with places.open(model, pool_bytes, "write") as llm:
            answer, crowd = ask(llm, prompt)
            turns["computed"][key[0]].append(_turn(answer, "computed", crowd))
            expected[key] = answer.tokens
            again, crowd = ask(llm, prompt)  # the second touch, which admits short prompts to the disk
            turns["pool"][key[0]].append(_check(again, expected[key], "pool", crowd))
            if not llm.tiers.flush(120.0):
                raise Differs("what was computed was not written within two minutes")
    say(f"{model}: computed {len(prompts)} prompts")
    for source in SOURCES[2:]:
        if source == "remote" and places.remote is None:
            continue
        if source == "disk cold":
            places.cool()
            rates["plain cold"] = places.plain()
            rates["plain warm"] = places.plain()
            places.cool()
        for key, prompt in prompts.items():
            with places.open(model, pool_bytes, source) as llm:
                if source == "host":
                    ask(llm, prompt)
                    index = llm.model.index
                    assert index is not None
                    index.evict(llm.pool.num_pages)
                    if index.num_in_pool:
                        raise Differs(f"{index.num_in_pool} pages did not leave the pool")
                answer, crowd = ask(llm, prompt)
                turns[source][key[0]].append(_check(answer, expected[key], source, crowd))
                traffic = llm.tiers.by_name[source.split()[0]].counters if source != "host" else llm.tiers.host_counters
                one = traffic.read()
                if one.seconds_in:
                    rates.setdefault(source, []).append((key[0], one.bytes_in / one.seconds_in))
        say(f"{model}: {source}")
    cells = {
        source: {
            length: {"ttft_s": median(t.ttft_s for t in some), "turns": [asdict(t) for t in some]}
            for length, some in by_length.items()
            if some
        }
        for source, by_length in turns.items()
    }
    longest = {name: median(r for n, r in rate if n == max(lengths)) for name, rate in rates.items() if name in SOURCES}
    return {"cells": cells, "bytes_per_s": longest | {k: v for k, v in rates.items() if k.startswith("plain")}}


def _turn(answer: Completion, source: str, crowd: float) -> Turn:
    assert answer.timings.ttft is not None
    found = answer.cached_by_tier.get(source.split()[0], 0)
    return Turn(answer.timings.ttft, found, crowd)


def _check(answer: Completion, expected: list[Any], source: str, crowd: float) -> Turn:
    if answer.tokens != expected:
        raise Differs(f"an answer from {source} differs from the computed one")
    return _turn(answer, source, crowd)


def _pool_bytes(model: str, longest: int) -> int:
    with LLM(model, kv_bytes=1 << 20) as llm:
        return (longest // llm.pool.page_size + 40) * llm.pool.page_bytes


def table(model: str, facts: dict[str, Any]) -> str:
    """A Markdown table: ms by source and length, and the tiers' rates."""
    cells = facts["cells"]
    lengths = list(cells["computed"])
    rows: list[list[str]] = []
    for source, by_length in cells.items():
        if by_length:
            rate = facts["bytes_per_s"].get(source)
            times = [f"{1e3 * by_length[n]['ttft_s']:,.0f} ms" for n in lengths]
            rows.append([source, *times, f"{rate / 1e9:.2f}" if rate else ""])
    for name in ("plain cold", "plain warm"):
        rate = facts["bytes_per_s"][name]
        rows.append([f"({name} read of the files)", *[""] * len(lengths), f"{rate / 1e9:.2f}"])
    columns = ["source", *(f"{n:,} tokens" for n in lengths), "GB/s"]
    return f"**{model}**\n\n{markdown(columns, rows)}"


@contextmanager
def redis(folder: Path) -> Generator[str | None]:
    """A server on loopback, or None if there is none on this machine."""
    binary = shutil.which("redis-server")
    if binary is None:
        say("no redis-server on this machine: the remote tier is left out")
        yield None
        return
    port = free_port()
    at = ["--port", str(port), "--bind", "127.0.0.1"]
    server = subprocess.Popen([binary, *at, "--save", "", "--dir", str(folder), "--logfile", str(folder / "log")])
    try:
        time.sleep(0.5)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the disk tier lies (default: a temporary directory)")
    arguments = parser.parse_args()
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name, redis(Path(name)) as remote:
            facts = measure(model, arguments.lengths, arguments.rounds, Places(Path(name) / "kv", remote))
        save("tiers", DEFINITIONS, model, facts)
        crowds = [t["others_cpu"] for s in SOURCES[:2] for c in facts["cells"][s].values() for t in c["turns"]]
        print("\n".join([table(model, facts), "", *doubt(crowds)]), flush=True)


if __name__ == "__main__":
    with ended_by(Differs):
        main()
