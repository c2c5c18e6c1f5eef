"""Texts and tokens per second of `/v1/embeddings`, ours and llama.cpp's, in turn: `make bench-embeddings`.

Both serve the same GGUF file and get the same texts, a batch in a call, new ones in every round. The embedding is the
last token's hidden state, normalized; how far the two agree is told by the smallest cosine.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.peer.engines import ENGINES, OURS
from benchmarks.peer.environments import WORK, CannotSetUp, ensure_environment, python
from benchmarks.peer.figures import turn_order
from benchmarks.peer.weights import gguf
from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from benchmarks.server_process import ServerFailed, ServerProcess
from benchmarks.terminal import ended_by, markdown, needs
from twostroke.errors import TwostrokeError

THEIRS = "llama.cpp"
WORDS = ("the", "sea", "and", "a", "hill", "of", "stone", "by", "night", "with", "rain", "on", "old", "trees", "while")
DEFINITIONS = {
    "texts_per_s": "texts of all calls by the time of all calls, one call after the other, of each round",
    "tokens_per_s": "the same of their tokens, as our tokenizer counts them",
    "cosine": "the smallest, of our embedding and llama.cpp's, over all texts",
}


def batches(length: int, texts: int, batch: int, seed: int) -> Iterator[list[str]]:
    """Texts of about `length` tokens each; 0: of 10 to 500, as many of each size."""
    draw = random.Random(f"{length} {seed}")
    sizes = [length or round(10 * 50 ** draw.random()) for _ in range(texts)]
    made = [" ".join(draw.choices(WORDS, k=size)) for size in sizes]
    return (made[i : i + batch] for i in range(0, texts, batch))


def measure(server: ServerProcess, asked: list[list[str]]) -> tuple[float, int, np.ndarray]:
    """Seconds, tokens, and the embeddings: [texts, size]. Raises ServerFailed."""
    import httpx

    with httpx.Client(base_url=server.url, timeout=600) as http:
        http.post("/v1/embeddings", json={"input": ["warm", "up"]})
        began = time.perf_counter()
        answers = [http.post("/v1/embeddings", json={"input": texts}) for texts in asked]
        seconds = time.perf_counter() - began
    if refused := next((one for one in answers if one.status_code != 200), None):
        raise ServerFailed(f"{server.name}: {refused.text:.200}")
    made = [one.json() for one in answers]
    rows = [entry["embedding"] for one in made for entry in one["data"]]
    return seconds, sum(one["usage"]["prompt_tokens"] for one in made), np.array(rows)


def command(engine: str, model: str, threads: int, llama_server: str, work: Path) -> list[str]:
    """Starts a server at "{port}". Raises CannotSetUp, or TwostrokeError."""
    path = gguf(model, work)
    if engine == OURS:
        own = ["--threads", str(threads), "--port", "{port}", "--kv-bytes", "1GiB"]
        return [sys.executable, "-m", "twostroke", "serve", path, *own]
    if llama_server:
        own = ["-t", str(threads), "-c", "65536", "-np", "32", "-b", "2048", "-ub", "2048"]
        return [llama_server, "-m", path, "--port", "{port}", "--embedding", "--pooling", "last", *own]
    ensure_environment(ENGINES[THEIRS], work)
    module = "benchmarks.peer.adapters.llama_cpp_embeddings"
    return [str(python(ENGINES[THEIRS], work)), "-m", module, path, "{port}", str(threads)]


def main(
    model: Annotated[str, typer.Option(help="Of the catalog.")] = "smollm2-135m",
    lengths: Annotated[str, typer.Option(help="Tokens of each text; 0: 10 to 500, mixed.")] = "10,50,200,500,0",
    texts: Annotated[int, typer.Option(min=1, help="Of each length and round.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a call.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Each starts both servers.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of each server.")] = 2,
    llama_server: Annotated[str, typer.Option(help="A llama-server; without one, llama.cpp's package serves.")] = "",
    work: Annotated[Path, typer.Option(help="Where other engines are kept.")] = WORK,
) -> None:
    """Our embeddings beside llama.cpp's: medians over rounds, as a table and in benchmarks/results."""
    with needs("bench"):
        import httpx  # noqa: F401  # pyright: ignore[reportUnusedImport]

    work, sizes = work.expanduser().resolve(), [int(one) for one in lengths.split(",")]
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {}
    cosines, cpus = dict.fromkeys(sizes, 1.0), list[float]()
    with ended_by(CannotSetUp, ServerFailed, TwostrokeError):
        for number in range(rounds):
            found: dict[int, np.ndarray] = {}
            for engine in turn_order([OURS, THEIRS], number):
                started = command(engine, model, threads, llama_server, work)
                with ServerProcess(engine, started, work, ENGINES[engine].variables(threads, str(work))) as server:
                    for size in sizes:
                        others = Others()
                        seconds, tokens, rows = measure(server, list(batches(size, texts, batch, number)))
                        cpus.append(others.cpu)
                        figures.setdefault((engine, size), []).append((texts / seconds, tokens / seconds))
                        other = found.setdefault(size, rows)
                        cosines[size] = min(cosines[size], float((rows * other).sum(1).min()))
    facts: dict[str, Any] = {"texts": texts, "batch": batch, "threads": threads, "rounds": rounds, "lengths": {}}
    lines: list[list[str]] = []
    for size in sizes:
        ours, theirs = ([median(column) for column in zip(*figures[one, size], strict=True)] for one in (OURS, THEIRS))
        named = str(size or "10 to 500")
        shown = [*(f"{value:,.0f}" for value in (*ours, *theirs)), f"{ours[0] / theirs[0]:.2f}", f"{cosines[size]:.4f}"]
        lines.append([named, *shown])
        rows = {one: figures[one, size] for one in (OURS, THEIRS)}
        facts["lengths"][named] = {"texts_and_tokens_per_s": rows, "cosine": cosines[size]}
    rates = [f"{one}: texts/s" for one in ("ours", THEIRS)]
    figured = markdown(["tokens", rates[0], "tokens/s", rates[1], "tokens/s", "ratio", "cosine"], lines)
    typer.echo("\n".join([*doubt(cpus), figured, f"written to {save('embeddings', DEFINITIONS, model, facts)}"]))


if __name__ == "__main__":
    typer.run(main)
