"""Passes captured as CUDA graphs: a replay costs the host a few microseconds, where a launch costs twenty.

A graph is captured when its shape is first needed. It reads one array of integers and writes buffers that all graphs
share. Without CUDA (in Triton's interpreter) nothing is captured and kernels are launched one by one.
"""

from collections.abc import Callable
from typing import Any

import torch

MAX_GRAPH_ROWS = 1024  # rows of a pass that is captured
MAX_GRAPH_ENTRIES = 1 << 20  # entries of all tables of a captured pass
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, *range(64, 512, 64), *range(512, MAX_GRAPH_ROWS + 1, 128))
MAX_GRAPHS = 96  # kept; the oldest goes first


def bucket(rows: int) -> int:
    """The number of rows that a captured pass of `rows` rows is padded to."""
    return next(size for size in BUCKETS if size >= rows)


class CudaGraphs:
    """Captured launches by key, each with the array that it reads."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kept: dict[object, torch.cuda.CUDAGraph] = {}
        self._inputs: dict[object, torch.Tensor] = {}
        self._pool: Any = None  # PyTorch's handle of the memory that graphs share

    def input(self, key: object, values: torch.Tensor) -> torch.Tensor:
        """The array that the graph of a key reads, which now has these values (pinned)."""
        if (there := self._inputs.get(key)) is None:
            there = self._inputs[key] = torch.empty_like(values, device=self.device)
        there.copy_(values, non_blocking=True)
        return there

    def replay(self, key: object, launch: Callable[[], object]) -> None:
        """Run `launch`: captured if it is new, else replayed.

        It is run once before it is captured, so that everything is compiled, and its results are there.
        """
        if (graph := self.kept.pop(key, None)) is None:
            launch()
            graph = self._captured(launch)
            if len(self.kept) >= MAX_GRAPHS:
                oldest = next(iter(self.kept))
                del self.kept[oldest]
                self._inputs.pop(oldest, None)
        else:
            graph.replay()
        self.kept[key] = graph

    def clear(self) -> None:
        """Forget all graphs: something that they point to has moved."""
        self.kept.clear()

    def _captured(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may use the device meanwhile: they copy pages of tiers.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            launch()
        return graph
