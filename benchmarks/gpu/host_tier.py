"""Pages between the card and pinned host memory through the backend's memory, against the link.

    python3 -m benchmarks.gpu.host_tier --models llama-3.1-8b --out host_tier.json

The link is a copy of 1 GiB between the card and pinned memory. Pages go out by `read_pages` and in by `filling`. Both
are timed with the host's own copy from or to ordinary memory, as the host tier has it, and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, markdown, open_backend, parser
from benchmarks.gpu.card import Card
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.steps import new_memory
from twostroke.backends.page_memory import PageMemory

CALLS = (1, 16, 128)  # pages in a call of read_pages
DEFINITIONS = {
    "bytes_per_second": "bytes of the pages / median wall time, until the device is idle",
    "link": "the same for one copy of pinned memory; `page` is a copy of one page at a time, each waited for",
    "read_pages": "bytes are in host memory; +copy: and copied to ordinary memory from there",
    "filling": "the context entered and left; +copy: and filled from ordinary memory in between",
    "of_link": "bytes_per_second / that of the link in the same direction",
}


def rate(card: Card, run: Callable[[], object], size: int, repeats: int) -> float:
    """Bytes per second of `run`, which moves `size` bytes, after one run that does not count."""
    run()
    return size / median(card.wall(run, repeats))


def link(card: Card, page_bytes: int, repeats: int) -> dict[str, float]:
    """Bytes per second of pinned copies, by direction."""
    size = (1 << 24 if card.on_cpu else 1 << 30) // page_bytes * page_bytes or page_bytes
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not card.on_cpu)
    there = torch.randint(0, 256, (size,), dtype=torch.uint8, device=card.device)

    def by_page(to: torch.Tensor, source: torch.Tensor) -> None:
        for at in range(0, min(size, 64 * page_bytes), page_bytes):
            to[at : at + page_bytes].copy_(source[at : at + page_bytes], non_blocking=True)
            card.wait()

    moved = min(size, 64 * page_bytes)
    return {
        "out": rate(card, lambda: host.copy_(there, non_blocking=True), size, repeats),
        "in": rate(card, lambda: there.copy_(host, non_blocking=True), size, repeats),
        "out, page": rate(card, lambda: by_page(host, there), moved, repeats),
        "in, page": rate(card, lambda: by_page(there, host), moved, repeats),
    }


def measure(bench: Bench, card: Card, model: str, memory: PageMemory, pages: int, repeats: int) -> None:
    """Both directions through the memory's interface."""
    size, rng = memory.page_bytes, np.random.default_rng(1)
    frames: list[int] = rng.permutation(pages).tolist()
    ordinary = rng.integers(0, 256, (pages, size), np.uint8)
    pinned_link = link(card, size, repeats)
    for name, found in pinned_link.items():
        bench.add(model=model, path=f"link, {name}", bytes_per_second=found, page_bytes=size)

    def add(path: str, way: str, run: Callable[[], object]) -> None:
        if not bench.over:
            found = rate(card, run, pages * size, repeats)
            bench.add(model=model, path=path, bytes_per_second=found, of_link=found / pinned_link[way], page_bytes=size)

    def read(count: int, copies: bool) -> None:
        for first in range(0, pages, count):
            for at, page in enumerate(memory.read_pages(frames[first : first + count])):
                if copies:
                    ordinary[first + at] = np.frombuffer(page, np.uint8)

    def fill(copies: bool) -> None:
        for at, frame in enumerate(frames):
            with memory.filling(frame) as page:
                if copies:
                    np.frombuffer(page, np.uint8)[:] = ordinary[at]

    for count in (one for one in CALLS if one <= pages):
        add(f"read_pages, {count} a call", "out", lambda count=count: read(count, copies=False))
        add(f"read_pages, {count} a call, +copy", "out", lambda count=count: read(count, copies=True))
    add("filling", "in", lambda: fill(copies=False))
    add("filling, +copy", "in", lambda: fill(copies=True))
    check(memory, frames, ordinary)


def check(memory: PageMemory, frames: Sequence[int], expected: np.ndarray) -> None:
    """What was written is what is read, byte for byte; raises RuntimeError if not."""
    for frame, page in zip(frames[:4], expected, strict=False):
        memory.write_page(frame, page.data)
        if bytes(memory.read_pages([frame])[0]) != page.tobytes():
            raise RuntimeError(f"frame {frame} does not hold what was written to it")


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        (one["model"], one["path"], one["page_bytes"] / 1e6, one["bytes_per_second"] / 1e9,
         f"{one['of_link']:.0%}" if "of_link" in one else "")
        for one in found
    ]  # fmt: skip
    return markdown(("model", "path", "page MB", "GB/s", "of link"), rows)


def main() -> None:
    made = parser("host_tier", __doc__ or "", ["llama-3.1-8b", "qwen2.5-0.5b"])
    made.add_argument("--pages", type=int, default=256, help="pages that are moved (default 256)")
    options = made.parse_args()
    bench, card = Bench("host_tier", options, DEFINITIONS), Card(options.device)
    backend = open_backend(options.backend, options.device)
    for name in options.models:
        if bench.over:
            break
        bench.say(name)
        began = time.perf_counter()
        memory = new_memory(backend, MODELS[name], options.pages, options.page_size)
        measure(bench, card, name, memory, options.pages, 3 if options.quick else 7)
        bench.say(f"{name}: {time.perf_counter() - began:.1f} s")
    bench.show(*table(bench.cases))


if __name__ == "__main__":
    main()
