"""A rank other than 0 of the reference."""

from __future__ import annotations

from twostroke.backends.interface import Weights
from twostroke.backends.ranks.group import Group
from twostroke.backends.ranks.links import Links, device_of
from twostroke.backends.reference.backend import RankedModel
from twostroke.backends.reference.decoder import Decoder
from twostroke.backends.reference.memory import new_memory
from twostroke.backends.reference.ranks import RankedOperations
from twostroke.backends.torch_follower import Follower, started
from twostroke.models.config import ModelConfig


def main(file: int, parent: int) -> None:
    """A process that rank 0 has started on its host."""
    started(file, parent, follow)


def follow(group: Group, device: str, staged: bool, dtype: str, threads: int) -> None:
    """Do what rank 0 says until the end. Raises RankLost."""
    group.send(None, 0)  # it is there
    links = Links(group, device_of(group.rank, device, staged), staged)
    operations = RankedOperations(links, dtype, threads)

    def compile(config: ModelConfig, weights: Weights) -> RankedModel:
        return RankedModel(Decoder(config, operations, weights), links)

    Follower(links, dtype, new_memory, compile).run()
