"""Ranks of the native backend (native/ranks.h): one host, shared memory, and no Python inside a pass.

Rank 0 has the checkpoint. While a model is compiled it sends every other rank that rank's rows of each matrix, which
are packed piece by piece, so no process ever holds much more than its part. KV pages are in shared memory, whole, in
the layout that a single process has; each rank writes and reads those heads that are its own. So what is done with
pages (saving, tiers, cutting) does not depend on the number of ranks.
"""

import ctypes
import os
import socket
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.native.library import ThreadTeam, library_path, load
from twostroke.backends.native.weight_sources import ShardSender
from twostroke.backends.page_memory import HostMemory
from twostroke.backends.ranks import processes
from twostroke.backends.ranks.processes import Followers
from twostroke.backends.ranks.sharding import Shard
from twostroke.backends.ranks.shared_memory import SharedMemory
from twostroke.errors import OutOfPages, RankLost
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import PageShape
from twostroke.system.process_exit import free_with
from twostroke.system.scratch import address

PASS_BYTES = 64 << 30  # addresses for activations, of which a step touches some MB
LATE = 1000  # native/ranks.h
MODULE = "twostroke.backends.native.follower"


@dataclass(frozen=True)
class NativeRankSetup:
    """The first message to another rank: what it needs to start."""

    variant: str
    kernels: Path
    threads: int
    share: Shard
    patience_s: float
    cores: list[int]
    fd: int


class SharedMemoryRanks:
    """All ranks of one host, as rank 0 sees them: the other processes, and the memory that they share."""

    def __init__(self, variant: str, threads: int, size: int) -> None:
        """Start `size` - 1 processes of `threads` threads each. Raises InvalidRequest, RankLost."""
        self.library, patience_s = load(variant), processes.RANK_TIMEOUT_S
        self._segment = SharedMemory(PASS_BYTES)
        cores = processes.cores_of(size)
        self.team = _pinned_team(variant, threads, cores[0])  # rank 0's threads
        own = (ctypes.c_int32 * len(cores[0]))(*cores[0])
        memory = address(self._segment.data)
        # of native/ranks.h
        self.handle: int = self.library.twostroke_ranks(
            memory, PASS_BYTES, 0, size, patience_s, ctypes.byref(own), len(own)
        )
        fd = self._segment.fd
        kernels = library_path(variant)
        assert kernels is not None, "this process has loaded them"
        facts = [
            NativeRankSetup(variant, kernels, threads, Shard(i, size, True), patience_s, cores[i], fd)
            for i in range(1, size)
        ]
        lose, handle = self.library.twostroke_lose, self.handle
        self.turn = threading.RLock()  # held for one call of all ranks, or one message and its answers
        self._lost: RankLost | None = None
        self._pools: dict[int, bool] = {}  # number -> whether it is in use
        self.followers = Followers(MODULE, facts, [fd], lambda rank: lose(handle, rank))
        free_with(self, _free, self.followers, self.library.twostroke_ranks_free, handle, self._segment)
        self.followers.receive_all()

    def call(self, function: Callable[..., int], *args: Any) -> None:
        """Call a native function that all ranks take part in. Raises RankLost if one is lost, before or meanwhile."""
        with self.turn:
            lost = function(*args)
        if lost:
            raise self._error(lost)

    @property
    def failure(self) -> RankLost | None:
        """The error of all calls from now on, if a rank is lost."""
        lost: int = self.library.twostroke_lost(self.handle)
        return self._error(lost) if lost else None

    def _error(self, lost: int) -> RankLost:
        if self._lost is None:
            self._lost = self.followers.loss_error(lost - LATE if lost >= LATE else lost - 1)
            self.followers.end()
        return self._lost

    @contextmanager
    def compiling(self, config: ModelConfig, kv_dtype: str, weights: Weights) -> Generator[ShardSender]:
        """Let the other ranks compile a model, while the caller compiles it from the weights that are given."""
        with self.turn:
            self._message("model", config, kv_dtype)
            yield ShardSender(
                self.followers, Shard(0, self.followers.size, together=True), config, weights, self.handle
            )

    def memory(self, num_pages: int, shape: PageShape) -> HostMemory:
        """Zeroed pages that all ranks have. Raises OutOfPages."""
        return HostMemory(num_pages, shape, "pairs", self._pool(num_pages * shape.page_bytes))

    def _pool(self, size: int) -> np.ndarray:
        try:
            segment = SharedMemory(size)
        except (OSError, OverflowError, ValueError):
            raise OutOfPages(f"there is no memory for {size:,} bytes of KV pages: give them less (kv_bytes)") from None
        with self.turn:
            dropped = [number for number, used in self._pools.items() if not used]
            number = dropped[0] if dropped else len(self._pools)
            self._pools[number] = True
            self._message("pool", number, size)
            for rank, peer in enumerate(self.followers.peers, 1):
                self.followers.guarded(rank, socket.send_fds, peer.socket, [b"f"], [segment.fd])
            self.followers.receive_all()
        data = segment.data  # the base of all views, so it goes with the last of them
        self.library.twostroke_pool(self.handle, number, address(data), size, None, 0)
        weakref.finalize(data, self._pools.__setitem__, number, False)
        return data

    def _message(self, *message: object) -> None:
        """Send a message while no pass runs: the others leave their loop for it."""
        self.library.twostroke_listen(self.handle)
        self.followers.send_all(*message)


def _pinned_team(variant: str, threads: int, cores: list[int]) -> ThreadTeam:
    """A team whose threads stay on these cores, if there are any."""
    if not cores:
        return ThreadTeam(variant, threads)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
    try:
        return ThreadTeam(variant, threads)
    finally:
        os.sched_setaffinity(0, before)


def _free(followers: Followers, free: Any, handle: int, _segment: SharedMemory) -> None:
    followers.end()
    free(handle)
