"""Tensors between the ranks' devices: by NCCL between GPUs, and by gloo where they are in ordinary memory.

NCCL works on a GPU's stream: a call returns before the other ranks have come, and only the GPU waits for them. It
would wait for ever for a rank that hangs, so `DeviceWatchdog` looks after it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch

from twostroke.backends.ranks.processes import under_torchrun
from twostroke.backends.ranks.rank_group import MEETING_S, RankGroup, dist
from twostroke.backends.ranks.sharding import ColumnSplit

ONE_GPU = False  # for tests: all ranks use cuda:0, and tensors go through the host, since NCCL wants a GPU for each
POLLS_S = 0.1  # how often a device that may wait for ever is looked at


def device_of(rank: int, device: str, staged: bool = False) -> str:
    """The device of a rank: on GPUs, rank r of a host has cuda:r. `staged`: as for `Collectives`."""
    if device != "cuda":
        return device
    number = os.environ["LOCAL_RANK"] if under_torchrun() else rank
    return "cuda:0" if staged else f"cuda:{number}"


class Collectives:
    """Collective operations on tensors, as one rank takes part in them.

    Attributes:
        group: for messages, and for tensors in ordinary memory.
        device: this rank's.
    """

    def __init__(self, group: RankGroup, device: str, staged: bool = False) -> None:
        """Connect the devices of all ranks, which do this at the same time. Raises RankLost.

        `staged`: all ranks use one GPU, and tensors go through ordinary memory.
        """
        self.group, self.device = group, device
        self._nccl: Any = None
        self._watch: DeviceWatchdog | None = None
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(device)
            if not staged:
                self._connect()

    def _connect(self) -> None:
        # A lost rank is told by `RankGroup`. PyTorch would end this process, which is the user's.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        group = self.group
        try:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=MEETING_S)
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", group.store), group.rank, group.size, options)
            self.all_gather(torch.zeros(1, device=self.device))
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise group.lose(f"NCCL cannot connect the GPUs ({str(error).splitlines()[0]})") from None
        self._watch = DeviceWatchdog(
            group.patience.total_seconds(),
            lambda: group.lose(f"a GPU of {group.size} ranks has not answered for too long"),
        )

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, which have one shape: [size, *shape]."""
        mine = mine.contiguous()
        if self._nccl is None:
            parts = self.group.all_gather(mine.cpu().reshape(-1).view(torch.uint8))
            return torch.stack(parts).view(mine.dtype).view(self.group.size, *mine.shape).to(mine.device)
        out = mine.new_empty(self.group.size, *mine.shape)
        self._call(self._nccl._allgather_base, out, mine)
        return out

    def gather_columns(self, x: torch.Tensor, split: ColumnSplit, out: torch.Tensor | None = None) -> torch.Tensor:
        """All columns of an activation, [N, width], of which this rank has x, [N, own]; written to `out` if given."""
        counts = [stop - start for start, stop in pairwise(split.cuts)]
        mine = x
        if x.shape[1] < max(counts):
            mine = x.new_zeros(len(x), max(counts))
            mine[:, : x.shape[1]] = x
        parts = self.all_gather(mine)
        whole = x.new_empty(len(x), split.width) if out is None else out
        if len(set(counts)) == 1:
            whole.view(len(x), len(counts), counts[0]).copy_(parts.transpose(0, 1))
        else:
            for part, start, count in zip(parts, split.cuts, counts, strict=False):
                whole[:, start : start + count] = part[:, :count]
        return whole

    def gather_owned_rows(self, found: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Gather for each of `ids` [N] the row that its owning rank has `found` for it: [N, width].

        `found`: [N, width], whose other rows may be anything. Rank r has the ids below ends[r] that no rank before has.
        """
        owners = torch.bucketize(ids, ends, right=True)
        return self.all_gather(found)[owners, torch.arange(len(ids), device=ids.device)]

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give all other ranks what rank 0 has in a contiguous tensor."""
        if self._nccl is not None:
            self._call(self._nccl.broadcast, [tensor])
            return
        data = tensor.cpu()
        self.group.broadcast(data.view(-1).view(torch.uint8))
        if self.group.rank and data is not tensor:
            tensor.copy_(data)

    def _call(self, begin: Callable[..., Any], *tensors: object) -> None:
        """Put a call of NCCL on the stream."""
        self.group.check()
        try:
            work = begin(*tensors)
            work.wait()  # the stream waits, not this thread
        except RuntimeError as error:
            raise self.group.lose(f"NCCL cannot reach all GPUs ({str(error).splitlines()[0]})") from None
        if self._watch is not None:
            self._watch.mark(work.is_completed)

    def end(self) -> None:
        """Abort calls of devices that wait for others. A second call does nothing."""
        nccl, watch, self._nccl, self._watch = self._nccl, self._watch, None, None
        if watch is not None:
            watch.end()
        if nccl is not None:
            with suppress(RuntimeError):
                nccl.abort()


class DeviceWatchdog:
    """Reports a device that has not reached a mark in time: it waits in a kernel, and no call returns."""

    def __init__(self, patience_s: float, late: Callable[[], object]) -> None:
        """`late` is called once, in another thread."""
        self._marks: deque[tuple[float, Callable[[], bool]]] = deque()
        self._closing = threading.Event()
        args = (self._marks, self._closing, patience_s, late)
        threading.Thread(target=_watch, args=args, name="devices of ranks", daemon=True).start()

    def mark(self, passed: Callable[[], bool]) -> None:
        """Add a mark. `passed` tells whether the device has come to it. Marks are passed in order."""
        self._marks.append((time.monotonic(), passed))

    def end(self) -> None:
        """Stop watching."""
        self._closing.set()


def _watch(
    marks: deque[tuple[float, Callable[[], bool]]],
    closing: threading.Event,
    patience_s: float,
    late: Callable[[], object],
) -> None:
    while not closing.wait(POLLS_S):
        while marks and marks[0][1]():
            marks.popleft()
        if marks and time.monotonic() - marks[0][0] > patience_s:
            late()
            return
