"""Where a model of the native backend gets its weights from: the whole of each matrix, or a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.native.library import Team
from twostroke.backends.native.weights import Part, Table, vector
from twostroke.backends.ranks.shares import Share
from twostroke.models.config import ModelConfig


class Parts(Protocol):
    """The weights of one process. All ranks ask for the same in the same order.

    Attributes:
        share: which part it has.
        handle: the native ranks that its model joins; None for a single process.
    """

    share: Share
    handle: int | None

    def matrix(self, name: str) -> Part:
        """A matrix of the model, or this rank's rows of it."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """A norm, a bias or a router, float32."""
        ...

    def table(self, team: Team, name: str) -> Table | None:
        """An embedding that is only looked up; None if rank 0 looks it up."""
        ...

    def table_format(self, table: Table | None) -> int:
        """The format of its rows."""
        ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """For each value the largest of all ranks."""
        ...


class Alone:
    """A single process: the checkpoint's tensors. Implements `Parts`."""

    handle: int | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights, self.share = config, weights, Share(0, 1)

    def matrix(self, name: str) -> Part:
        return Part.whole(self.weights(name))

    def vector(self, name: str) -> np.ndarray:
        return vector(self.weights(name))

    def table(self, team: Team, name: str) -> Table | None:
        return Table(team, self.weights(name))

    def table_format(self, table: Table | None) -> int:
        return 0 if table is None else table.format

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)


class Voice(Protocol):
    """Messages to and from another rank, in order."""

    def send(self, message: object) -> None: ...
    def wait(self) -> Any:
        """The next message, which may take any time."""
        ...

    def send_array(self, array: np.ndarray) -> None: ...
    def receive_array(self) -> np.ndarray: ...


class Others(Protocol):
    """All ranks but rank 0. Every call raises RankLost if one is lost.

    Attributes:
        peers: to each, by rank - 1.
    """

    @property
    def peers(self) -> Sequence[Voice]: ...
    def tell(self, *message: object) -> None: ...
    def answers(self) -> list[Any]: ...
    def guarded(self, rank: int, action: Callable[..., Any], *args: Any) -> Any: ...


class Leader(Alone):
    """Rank 0 while it compiles a model: sends the others what is theirs."""

    def __init__(self, others: Others, share: Share, config: ModelConfig, weights: Weights, handle: int) -> None:
        super().__init__(config, weights)
        self.others, self.share = others, share
        self.handle: int | None = handle

    def matrix(self, name: str) -> Part:
        whole = Part.whole(self.weights(name))
        for rank, peer in enumerate(self.others.peers, 1):
            rows = replace(self.share, rank=rank).rows(self.config, name, whole.shape[0])
            self.others.guarded(rank, _send_part, peer, whole.rows(rows))
        return whole.rows(self.share.rows(self.config, name, whole.shape[0]))

    def vector(self, name: str) -> np.ndarray:
        values = super().vector(name)
        self.others.tell(values)
        return values

    def table_format(self, table: Table | None) -> int:
        format = super().table_format(table)
        self.others.tell(format)
        return format

    def largest(self, values: Sequence[float]) -> list[float]:
        found = [list(values), *self.others.answers()]
        largest = [max(some) for some in zip(*found, strict=True)]
        self.others.tell(largest)
        return largest


def _send_part(peer: Voice, part: Part) -> None:
    peer.send(Part(part.format, part.shape, part.source, part.first, part.count, iter(())))
    for piece in part.pieces:
        peer.send_array(piece)


class Received:
    """What rank 0 sends while a model is compiled. Implements `Parts`."""

    handle: int | None

    def __init__(self, peer: Voice, handle: int, share: Share) -> None:
        self.peer, self.share, self.handle = peer, share, handle

    def matrix(self, name: str) -> Part:
        part: Part = self.peer.wait()
        return Part(part.format, part.shape, part.source, part.first, part.count, self._pieces(part))

    def _pieces(self, part: Part) -> Iterator[np.ndarray]:
        left = part.count
        while left:
            piece = self.peer.receive_array()
            yield piece
            left -= len(piece)

    def vector(self, name: str) -> np.ndarray:
        return self.peer.wait()[0]

    def table(self, team: Team, name: str) -> Table | None:
        return None

    def table_format(self, table: Table | None) -> int:
        return self.peer.wait()[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        self.peer.send(list(values))
        return self.peer.wait()[0]
