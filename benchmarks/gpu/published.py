"""The tables of the documents that this project was built from, as they were published.

Their figures are for another model and often for another card, and some are impossible: docs/results, "The figures of
the sources, derived again". They stand beside ours to compare how times grow, not how long they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One table: `rows` by its first column."""

    source: str
    what: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]


ARTICLE = "source 002, on prefill and TTFT: Llama 70B on one A100-80GB, FP16"
SIMULATION = "source 004, prefill and decode in LLM inference: Llama 3 70B on one H100, FP16"
PTDO = "source 000, Prefill Twice, Decode Once, table 2: Llama-3.1-8B, NameIndex, 100 prompts, batch 1, 256 tokens each"

PREFILL_A100 = Published(
    ARTICLE, "prefill by prompt length", ("prefill ms", "TTFT ms", "TFLOPs"),
    {"128": (45, 52, 1.7), "512": (120, 130, 6.8), "1024": (210, 225, 13.7), "2048": (390, 410, 27.7),
     "4096": (780, 810, 57.5), "8192": (1800, 1850, 125), "32768": (12500, 12600, 920)},
)  # fmt: skip
PREFILL_H100 = Published(
    SIMULATION, "prefill by prompt length", ("prefill ms",),
    {"128": (8,), "512": (25,), "2048": (85,), "4096": (180,), "8192": (450,), "32768": (3500,)},
)  # fmt: skip
CHUNKS_A100 = Published(
    f"{ARTICLE}, 200 concurrent users", "chunk sizes",
    ("median TTFT ms", "p99 TBT ms", "tokens/s", "GPU %"),
    {"none": (1200, 1180, 3200, 72), "256": (1800, 28, 3050, 88), "512": (1400, 35, 3180, 91),
     "1024": (1250, 52, 3250, 93), "2048": (1180, 85, 3280, 94), "4096": (1150, 142, 3300, 95)},
)  # fmt: skip
BATCH_H100 = Published(
    SIMULATION, "decode after 4,096 entries by users", ("GB a step", "intensity", "ms a token", "tokens/s"),
    {"1": (131, 0.41, 40, 25), "8": (140, 3.1, 42, 190), "32": (172, 10.1, 51, 627)},
)  # fmt: skip
REPEATED = Published(
    PTDO, "KV and speed by what is kept", ("KV MB", "decode tok/s", "total tok/s", "peak GB", "prefill s of all"),
    {"P": (193.2, 34.61, 33.95, 15.58, 13.23), "P P": (381.7, 35.27, 29.01, 16.12, 25.07),
     "PTDO": (193.2, 34.92, 28.74, 16.12, 25.24)},
)  # fmt: skip
TABLES = (PREFILL_A100, PREFILL_H100, CHUNKS_A100, BATCH_H100, REPEATED)
