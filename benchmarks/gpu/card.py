"""A device's clocks and its ceilings: copy bandwidth and the best rate of a bf16 matrix product."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

CYCLES = 2e6  # of the SM's clock in a millisecond, an upper bound
SQUARES = ((8192, 8192, 8192), (4096, 14336, 4096), (16384, 8192, 4096))  # rows, columns of the result; K


@dataclass(frozen=True)
class Ceilings:
    """What the card reaches: bytes/s of a device-to-device copy, read plus written; FLOP/s of torch.matmul in bf16."""

    bandwidth: float
    flops: float


class Card:
    """One device. On a CPU (dry runs) everything is timed by the wall clock."""

    def __init__(self, device: str) -> None:
        self.device, self.on_cpu = device, torch.device(device).type == "cpu"

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        if not self.on_cpu:
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Bytes of device memory that are free, with those that PyTorch holds and does not use."""
        if self.on_cpu:
            return 1 << 30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def wall(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Seconds of each run, from an idle device until it is idle again."""
        taken = list[float]()
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            taken.append(time.perf_counter() - began)
        return taken

    def on_device(self, run: Callable[[], object], ahead_ms: float, repeats: int) -> list[float]:
        """Seconds between events around each run. The device sleeps `ahead_ms` before, so that the host runs ahead.

        So gaps between kernels count only as far as launching takes longer than that. `run` must not wait.
        """
        if self.on_cpu:
            return self.wall(run, repeats)
        taken = list[float]()
        for _ in range(repeats):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.wait()
            torch.cuda._sleep(int(CYCLES * ahead_ms))
            began.record()
            run()
            ended.record()
            self.wait()
            taken.append(began.elapsed_time(ended) / 1e3)
        return taken

    def kernels(self, run: Callable[[], object], repeats: int) -> list[tuple[str, float, float]]:
        """(name, milliseconds, launches) of every kernel in one run, the longest first; empty on a CPU."""
        if self.on_cpu:
            return []
        from torch.profiler import ProfilerActivity, profile

        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(repeats):
                run()
            self.wait()
        found = [
            (event.key, event.self_device_time_total / 1e3 / repeats, event.count / repeats)
            for event in profiler.key_averages()
        ]
        return sorted((one for one in found if one[1] > 0), key=lambda one: -one[1])

    def ceilings(self, quick: bool = False) -> Ceilings:
        """Measure both, in about a second."""
        size = 1 << 22 if self.on_cpu else 1 << 31 if quick else 1 << 32
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy = min(self.on_device(partial(target.copy_, source), 0.1, 10)[3:])
        del source, target
        best = 0.0
        for m, n, k in [(64, 64, 64)] if self.on_cpu else SQUARES[: 1 if quick else 3]:
            a, b = (torch.randn(shape, dtype=torch.bfloat16, device=self.device) for shape in ((m, k), (k, n)))
            out = torch.empty(m, n, dtype=torch.bfloat16, device=self.device)

            def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
                torch.mm(a, b, out=out)

            best = max(best, 2 * m * n * k / median(self.on_device(product, 0.1, 12)[4:]))
        return Ceilings(2 * size / copy, best)
