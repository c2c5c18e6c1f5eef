"""A rank other than 0: it receives its part of the weights, and then follows rank 0's orders in native code."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from twostroke.backends.native import library as kernels
from twostroke.backends.native.compiled import NativeModel
from twostroke.backends.native.library import Team, load
from twostroke.backends.native.ranks import PASS_BYTES, Facts
from twostroke.backends.native.statistics import NativeStatistics
from twostroke.backends.native.weights import Part, Table
from twostroke.errors import RankLost
from twostroke.ranks import processes
from twostroke.ranks.processes import Peer
from twostroke.ranks.segment import Segment
from twostroke.ranks.shares import Share
from twostroke.system.reuse import address


class Received:
    """What rank 0 sends while a model is compiled. Implements `Parts`."""

    handle: int | None

    def __init__(self, peer: Peer, handle: int, share: Share) -> None:
        self.peer, self.share, self.handle = peer, share, handle

    def matrix(self, name: str) -> Part:
        part: Part = self.peer.wait()
        return Part(part.format, part.shape, part.source, part.first, part.count, self._pieces(part))

    def _pieces(self, part: Part) -> Iterator[np.ndarray]:
        left = part.count
        while left:
            shape = self.peer.wait()
            piece = np.empty(shape, np.uint8)
            self.peer.receive_into(piece.data.cast("B"))
            yield piece
            left -= shape[0]

    def vector(self, name: str) -> np.ndarray:
        return self.peer.wait()[0]

    def table(self, team: Team, name: str) -> Table | None:
        return None

    def table_format(self, table: Table | None) -> int:
        return self.peer.wait()[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        self.peer.send(list(values))
        return self.peer.wait()[0]


def main(file: int, parent: int) -> None:
    """Follow rank 0 until it has ended, or a rank is lost."""
    processes.end_with(parent)
    peer = Peer(socket.socket(fileno=file))
    try:
        _follow(peer, peer.wait())
    except (EOFError, OSError, RankLost):
        os._exit(1)


def _follow(peer: Peer, facts: Facts) -> None:
    if facts.cores:
        os.sched_setaffinity(0, facts.cores)
    kernels.use(facts.variant, facts.kernels)
    library, share = load(facts.variant), facts.share
    if not library.twostroke_usable():  # a process has to ask Linux for AMX's tiles before it uses them
        os._exit(1)
    segment = Segment(PASS_BYTES, facts.fd)
    team = Team(facts.variant, facts.threads)
    handle: int = library.twostroke_ranks(
        address(segment.data), PASS_BYTES, share.rank, share.size, facts.patience_s, None, 0
    )
    models: list[NativeModel] = []
    pools: dict[int, Segment] = {}
    peer.send(None)
    while not (lost := library.twostroke_follow(handle)):
        match peer.wait():
            case ("model", config):
                try:
                    models.append(NativeModel(team, NativeStatistics(team), config, Received(peer, handle, share)))
                except MemoryError as error:
                    peer.send(error)
                    os._exit(1)
            case ("pool", number, size):
                _, (fd,), _, _ = socket.recv_fds(peer.socket, 1, 1)
                pools[number] = Segment(size, fd)
                library.twostroke_pool(handle, number, address(pools[number].data), size)
                peer.send(None)
            case message:
                raise AssertionError(message)
    os._exit(1 if lost else 0)
