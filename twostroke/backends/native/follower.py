"""A rank other than 0: it receives its part of the weights, and then follows rank 0's orders in native code."""

import os
import socket

from twostroke.backends.native import library as kernels
from twostroke.backends.native.library import ThreadTeam, load
from twostroke.backends.native.model import NativeModel
from twostroke.backends.native.shared_memory_ranks import PASS_BYTES, NativeRankSetup
from twostroke.backends.native.statistics import NativeStatistics
from twostroke.backends.native.weight_sources import ShardReceiver
from twostroke.backends.ranks import processes
from twostroke.backends.ranks.processes import PipeChannel
from twostroke.backends.ranks.shared_memory import SharedMemory
from twostroke.errors import RankLost
from twostroke.system.scratch import address


def main(file: int, parent: int) -> None:
    """Follow rank 0 until it has ended, or a rank is lost."""
    processes.exit_with_parent(parent)
    peer = PipeChannel(socket.socket(fileno=file))
    try:
        _follow(peer, peer.wait())
    except (EOFError, OSError, RankLost):
        os._exit(1)


def _follow(peer: PipeChannel, facts: NativeRankSetup) -> None:
    if facts.cores:
        os.sched_setaffinity(0, facts.cores)
    kernels.use(facts.variant, facts.kernels)
    library, share = load(facts.variant), facts.share
    if not library.twostroke_usable():  # a process has to ask Linux for AMX's tiles before it uses them
        os._exit(1)
    segment = SharedMemory(PASS_BYTES, facts.fd)
    team = ThreadTeam(facts.variant, facts.threads)
    handle: int = library.twostroke_ranks(
        address(segment.data), PASS_BYTES, share.rank, share.size, facts.patience_s, None, 0
    )
    models: list[NativeModel] = []
    pools: dict[int, SharedMemory] = {}
    peer.send(None)
    while not (lost := library.twostroke_follow(handle)):
        match peer.wait():
            case ("model", config, kv_dtype):
                try:
                    parts = ShardReceiver(peer, handle, share)
                    models.append(NativeModel(team, NativeStatistics(team), config, kv_dtype, parts))
                except MemoryError as error:
                    peer.send(error)
                    os._exit(1)
            case ("pool", number, size):
                _, (fd,), _, _ = socket.recv_fds(peer.socket, 1, 1)
                pools[number] = SharedMemory(size, fd)
                library.twostroke_pool(handle, number, address(pools[number].data), size, None, 0)
                peer.send(None)
            case message:
                raise AssertionError(message)
    os._exit(1 if lost else 0)
