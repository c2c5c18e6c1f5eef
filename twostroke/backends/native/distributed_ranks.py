"""Ranks of the native backend without common memory, which `torchrun` has started on one host or several.

Each has the memory of a pass for itself. At every meeting in a pass they exchange what they have changed in it
(native/mirrored_memory.h) by `torch.distributed`, so kernels and bits are those of ranks on one host. A rank has the
pages of its KV heads; rank 0 puts whole pages together.
"""

import ctypes
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.native import library
from twostroke.backends.native.library import EXCHANGE, TELL, ThreadTeam, array_strides, load
from twostroke.backends.native.model import NativeModel
from twostroke.backends.native.shared_memory_ranks import PASS_BYTES
from twostroke.backends.native.statistics import NativeStatistics
from twostroke.backends.native.weight_sources import ShardReceiver, ShardSender
from twostroke.backends.page_memory import HostMemory
from twostroke.backends.ranks import processes
from twostroke.backends.ranks.rank_group import ANY_TIME, RankGroup
from twostroke.backends.ranks.sharding import Shard
from twostroke.backends.ranks.shared_memory import SharedMemory
from twostroke.backends.sharded_memory import PageShards, ShardedMemory, act_on_shard
from twostroke.errors import InvalidRequest, OutOfPages, RankLost
from twostroke.models.config import ModelConfig
from twostroke.models.layer_groups import PageShape
from twostroke.system.process_exit import free_with
from twostroke.system.scratch import address


class GroupChannel:
    """Messages to and from one rank by `torch.distributed`; implements `MessageChannel`."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def send(self, message: object) -> None:
        self.group.send(message, self.rank)

    def receive(self) -> Any:
        return self.group.receive(self.rank)

    def wait(self) -> Any:
        return self.group.receive(self.rank, ANY_TIME)

    def send_array(self, array: np.ndarray) -> None:
        self.group.send(np.ascontiguousarray(array), self.rank)

    def receive_array(self) -> np.ndarray:
        return self.wait()


class DistributedRank:
    """One rank: its memory of passes, and the callbacks by which native code reaches the other ranks."""

    def __init__(self, group: RankGroup, variant: str) -> None:
        self.group, self.library = group, load(variant)
        self._memory = SharedMemory(2 * PASS_BYTES)  # and as much for the copy of the meeting before
        memory = address(self._memory.data)
        # of native/ranks.h
        self.handle: int = self.library.twostroke_ranks(
            memory, PASS_BYTES, group.rank, group.size, processes.RANK_TIMEOUT_S, None, 0
        )
        self._calls = EXCHANGE(self._exchange), TELL(self._tell)
        self.library.twostroke_part(self.handle, memory + PASS_BYTES, *self._calls)
        free_with(self, self.library.twostroke_ranks_free, self.handle)

    def _exchange(self, changes: int, size: int) -> int:
        def exchange() -> None:
            mine = np.frombuffer(ctypes.string_at(changes, size), np.uint8)
            for rank, theirs in enumerate(self.group.exchange(mine)):
                if rank != self.group.rank:
                    self.library.twostroke_apply(self.handle, address(theirs), len(theirs))

        return self._guarded(exchange)

    def _tell(self, command: int, command_size: int, data: int, size: int) -> int:
        return self._guarded(
            lambda: self.group.send_all("order", ctypes.string_at(command, command_size), ctypes.string_at(data, size))
        )

    def _guarded(self, action: Callable[[], None]) -> int:
        """0, or 1 if a rank is lost: native code cannot raise."""
        try:
            action()
        except RankLost:
            return 1
        except Exception as error:
            self.group.lose(f"rank {self.group.rank} cannot exchange activations ({error})")
            return 1
        return 0


class DistributedRanks:
    """All ranks without common memory, as rank 0 sees them. The counterpart of `SharedMemoryRanks`."""

    def __init__(self, variant: str, threads: int, size: int) -> None:
        """Meet the ranks that `torchrun` has started. Raises InvalidRequest, RankLost."""
        self.group = RankGroup.of_torchrun(processes.RANK_TIMEOUT_S, size)
        self.turn, self.size = self.group.turn, size
        self.peers = [GroupChannel(self.group, rank) for rank in range(1, size)]  # lines to the others, by rank - 1
        self.send_all("native", variant, library.digest(variant), threads)
        weakref.finalize(self, _end, self.group)
        self.receive_all()
        # team: rank 0's threads
        self.team, self._link = ThreadTeam(variant, threads), DistributedRank(self.group, variant)
        self.handle = self._link.handle  # of native/ranks.h
        self._pools: dict[int, bool] = {}  # number -> whether it is in use

    @property
    def failure(self) -> RankLost | None:
        """The error of all calls from now on, if a rank is lost."""
        return self.group.failure

    def send_all(self, *message: object) -> None:
        """Send a message to all. Raises RankLost."""
        self.group.send_all(*message)

    def receive_all(self) -> list[Any]:
        """One answer of each. Raises RankLost, or the error that one answers with."""
        return self.group.receive_all()

    def guarded(self, rank: int, action: Callable[..., Any], *args: Any) -> Any:
        """The result of an action with a rank's line, which raises RankLost by itself."""
        return action(*args)

    def call(self, function: Callable[..., int], *args: Any) -> None:
        """Call a native function that all ranks take part in. Raises RankLost if one is lost, before or meanwhile."""
        with self.turn:
            lost = self.failure is not None or function(*args)
        if lost:
            raise self.failure or self.group.lose(f"a rank of {self.size} is lost")

    @contextmanager
    def compiling(self, config: ModelConfig, kv_dtype: str, weights: Weights) -> Generator[ShardSender]:
        """Let the other ranks compile a model, while the caller compiles it from the weights that are given."""
        with self.turn:
            self.send_all("model", config, kv_dtype)
            yield ShardSender(self, Shard(0, self.size), config, weights, self.handle)

    def memory(self, num_pages: int, shape: PageShape) -> ShardedMemory:
        """Zeroed pages. Raises OutOfPages."""
        shapes = PageShards(num_pages, shape, self.size, "pairs")
        with self.turn:
            number = next((one for one, used in self._pools.items() if not used), len(self._pools))
            self.group.ask("memory", number, num_pages, shape)
            self._pools[number] = True
            made = ShardedMemory(self.group, number, shapes, own := shapes.memory(0))
        _lend(self._link, number, own, 0)
        weakref.finalize(made, self._pools.__setitem__, number, False)
        return made


def _lend(link: DistributedRank, number: int, memory: HostMemory, first_head: int) -> None:
    """Let native code have the pages of a rank's heads, which begin with `first_head`."""
    start = memory.address - first_head * memory.storages[0].strides[3]
    strides = array_strides(memory.storages)
    link.library.twostroke_pool(link.handle, number, start, memory.nbytes, strides, len(memory.storages))


def _end(group: RankGroup) -> None:
    if group.failure is None:
        with suppress(RankLost):
            group.send_all("end")
    group.close()


def follow(group: RankGroup, _: str, variant: str, digest: str, threads: int) -> None:
    """A rank other than 0: do what rank 0 says until the end. Raises RankLost."""
    if reason := library.unavailable(variant):
        group.send(InvalidRequest(f"rank {group.rank} cannot run native-{variant}, as rank 0 does: {reason}"), 0)
        return
    if library.digest(variant) != digest:
        reason = (
            f"rank {group.rank} has another build of the kernels than rank 0: install the same package on all hosts"
        )
        group.send(InvalidRequest(reason), 0)
        return
    group.send(None, 0)
    link, team, line = DistributedRank(group, variant), ThreadTeam(variant, threads), GroupChannel(group, 0)
    models: list[NativeModel] = []
    pools: dict[int, HostMemory] = {}
    while (message := group.receive(limit=ANY_TIME)) != ("end",):
        match message:
            case ("order", command, data):
                link.library.twostroke_obey(link.handle, command, data, len(data))
            case ("model", config, kv_dtype):
                parts = ShardReceiver(line, link.handle, Shard(group.rank, group.size))
                models.append(NativeModel(team, NativeStatistics(team), config, kv_dtype, parts))
            case ("memory", number, num_pages, shape):
                shapes = PageShards(num_pages, shape, group.size, "pairs")
                try:
                    pools[number] = shapes.memory(group.rank)
                except OutOfPages as error:
                    group.send(error, 0)
                    continue
                _lend(link, number, pools[number], shapes.heads[group.rank].start)
                group.send(None, 0)
            case (action, number, *places):
                group.send(act_on_shard(pools[number], group.rank, action, places), 0)
            case _:
                raise AssertionError(message)
