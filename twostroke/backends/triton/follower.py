"""A rank other than 0 of the GPU backend."""

from twostroke.backends.interface import Weights
from twostroke.backends.ranks.collectives import Collectives, device_of
from twostroke.backends.ranks.rank_group import RankGroup
from twostroke.backends.reference.memory import DeviceMemory
from twostroke.backends.torch_follower import Follower, started
from twostroke.backends.triton.backend import unavailable
from twostroke.backends.triton.sharded import ShardedTritonModel
from twostroke.errors import InvalidRequest
from twostroke.models.config import ModelConfig


def main(file: int, parent: int) -> None:
    """A process that rank 0 has started on its host."""
    started(file, parent, follow)


def follow(group: RankGroup, device: str, staged: bool, kv_dtype: str) -> None:
    """Do what rank 0 says until the end. Raises RankLost."""
    own = device_of(group.rank, device, staged)
    reason = unavailable(own)
    group.send(reason and InvalidRequest(f"rank {group.rank} cannot compute: {reason}"), 0)
    if reason:
        return
    links = Collectives(group, own, staged)

    def compile(config: ModelConfig, weights: Weights) -> ShardedTritonModel:
        return ShardedTritonModel(config, links, weights, kv_dtype)

    Follower(links, DeviceMemory, compile).run()
