"""A rank other than 0 of the reference."""

from twostroke.backends.interface import Weights
from twostroke.backends.ranks.collectives import Collectives, device_of
from twostroke.backends.ranks.rank_group import RankGroup
from twostroke.backends.reference.backend import ShardedReferenceModel
from twostroke.backends.reference.decoder import ReferenceDecoder
from twostroke.backends.reference.memory import new_memory
from twostroke.backends.reference.sharded import ShardedOperations
from twostroke.backends.torch_follower import Follower, started
from twostroke.models.config import ModelConfig


def main(file: int, parent: int) -> None:
    """A process that rank 0 has started on its host."""
    started(file, parent, follow)


def follow(group: RankGroup, device: str, staged: bool, dtype: str, threads: int, kv_dtype: str) -> None:
    """Do what rank 0 says until the end. Raises RankLost."""
    group.send(None, 0)  # it is there
    links = Collectives(group, device_of(group.rank, device, staged), staged)
    operations = ShardedOperations(links, dtype, threads, kv_dtype)

    def compile(config: ModelConfig, weights: Weights) -> ShardedReferenceModel:
        return ShardedReferenceModel(ReferenceDecoder(config, operations, weights), links)

    Follower(links, new_memory, compile).run()
