"""The memory read bandwidth of this machine at the moment. It is the upper bound of decode, and it drifts."""

from __future__ import annotations

import time
from typing import Any

import torch

BYTES = 1 << 30
REPEATS = 5


def memory_read(threads: int) -> dict[str, Any]:
    """Bytes per second of a sum over an array far larger than the caches.

    The best of several repeats is taken, as other processes only slow it down.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        array = torch.ones(BYTES // 4)
        array.sum()
        spans: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            array.sum()
            spans.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    what = f"torch.sum of 1 GiB of float32, {threads} threads, best of {REPEATS}"
    return {"what": what, "bytes_per_second": BYTES / min(spans)}
