"""The sources of a native model's weights: whole matrices from a checkpoint, or a rank's rows of each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from twostroke.backends.interface import Weights
from twostroke.backends.native.library import ThreadTeam
from twostroke.backends.native.weights import EmbeddingTable, MatrixShard, vector
from twostroke.backends.ranks.sharding import Shard
from twostroke.models.config import ModelConfig


class WeightSource(Protocol):
    """The weights of one process. All ranks ask for the same in the same order."""

    share: Shard  # which part it has
    handle: int | None  # the native ranks that its model joins; None for a single process

    def matrix(self, name: str) -> MatrixShard:
        """A matrix of the model, or this rank's rows of it."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """A norm, a bias or a router, float32."""
        ...

    def table(self, team: ThreadTeam, name: str) -> EmbeddingTable | None:
        """An embedding that is only looked up; None if rank 0 looks it up."""
        ...

    def table_format(self, table: EmbeddingTable | None) -> int: ...

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, for each value."""
        ...


class WholeWeights:
    """The checkpoint's tensors, for a single process. Implements `WeightSource`."""

    handle: int | None = None

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights, self.share = config, weights, Shard(0, 1)

    def matrix(self, name: str) -> MatrixShard:
        return MatrixShard.whole(self.weights(name))

    def vector(self, name: str) -> np.ndarray:
        return vector(self.weights(name))

    def table(self, team: ThreadTeam, name: str) -> EmbeddingTable | None:
        return EmbeddingTable(team, self.weights(name))

    def table_format(self, table: EmbeddingTable | None) -> int:
        return 0 if table is None else table.format

    def largest(self, values: Sequence[float]) -> list[float]:
        return list(values)


class MessageChannel(Protocol):
    """Messages to and from another rank, in order."""

    def send(self, message: object) -> None: ...
    def wait(self) -> Any:
        """The next message, which may take any time."""
        ...

    def send_array(self, array: np.ndarray) -> None: ...
    def receive_array(self) -> np.ndarray: ...


class OtherRanks(Protocol):
    """All ranks but rank 0. Every call raises RankLost if one is lost.

    Attributes:
        peers: to each, by rank - 1.
    """

    @property
    def peers(self) -> Sequence[MessageChannel]: ...
    def send_all(self, *message: object) -> None: ...
    def receive_all(self) -> list[Any]: ...
    def guarded(self, rank: int, action: Callable[..., Any], *args: Any) -> Any: ...


class ShardSender(WholeWeights):
    """Rank 0's own part of the weights; sends the other ranks theirs. Implements `WeightSource`."""

    def __init__(self, others: OtherRanks, share: Shard, config: ModelConfig, weights: Weights, handle: int) -> None:
        super().__init__(config, weights)
        self.others, self.share = others, share
        self.handle: int | None = handle

    def matrix(self, name: str) -> MatrixShard:
        whole = MatrixShard.whole(self.weights(name))
        for rank, peer in enumerate(self.others.peers, 1):
            rows = replace(self.share, rank=rank).rows(self.config, name, whole.shape[0])
            self.others.guarded(rank, _send_part, peer, whole.rows(rows))
        return whole.rows(self.share.rows(self.config, name, whole.shape[0]))

    def vector(self, name: str) -> np.ndarray:
        values = super().vector(name)
        self.others.send_all(values)
        return values

    def table_format(self, table: EmbeddingTable | None) -> int:
        format = super().table_format(table)
        self.others.send_all(format)
        return format

    def largest(self, values: Sequence[float]) -> list[float]:
        found = [list(values), *self.others.receive_all()]
        largest = [max(some) for some in zip(*found, strict=True)]
        self.others.send_all(largest)
        return largest


def _send_part(peer: MessageChannel, part: MatrixShard) -> None:
    peer.send(MatrixShard(part.format, part.shape, part.source, part.first, part.count, iter(())))
    for piece in part.pieces:
        peer.send_array(piece)


class ShardReceiver:
    """Receives the weights that rank 0 sends while a model is compiled. Implements `WeightSource`."""

    handle: int | None

    def __init__(self, peer: MessageChannel, handle: int, share: Shard) -> None:
        self.peer, self.share, self.handle = peer, share, handle

    def matrix(self, name: str) -> MatrixShard:
        part: MatrixShard = self.peer.wait()
        return MatrixShard(part.format, part.shape, part.source, part.first, part.count, self._pieces(part))

    def _pieces(self, part: MatrixShard) -> Iterator[np.ndarray]:
        left = part.count
        while left:
            piece = self.peer.receive_array()
            yield piece
            left -= len(piece)

    def vector(self, name: str) -> np.ndarray:
        return self.peer.wait()[0]

    def table(self, team: ThreadTeam, name: str) -> EmbeddingTable | None:
        return None

    def table_format(self, table: EmbeddingTable | None) -> int:
        return self.peer.wait()[0]

    def largest(self, values: Sequence[float]) -> list[float]:
        self.peer.send(list(values))
        return self.peer.wait()[0]
