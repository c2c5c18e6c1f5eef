"""What links join and give, over gloo; and who notices a device that waits for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.patience import PATIENCE_S
from twostroke.backends.ranks.collectives import Collectives, DeviceWatchdog, device_of
from twostroke.backends.ranks.rank_group import RankGroup, dist
from twostroke.backends.ranks.sharding import ColumnSplit


def columns(x: torch.Tensor, split: ColumnSplit) -> torch.Tensor:
    return x[:, split.start : split.start + split.own]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("cuts", [(0, 4, 8, 12), (0, 5, 5, 12)])
def test_joined(dtype: torch.dtype, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of three ranks, also if one has none; the rows of all; and what rank 0 has."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, whole = dist.HashStore(), torch.arange(36).view(3, 12).to(dtype)

    def rank(number: int) -> None:
        links, split = Collectives(RankGroup(store, number, 3, PATIENCE_S), "cpu"), ColumnSplit(cuts, number)
        mine = columns(whole, split)
        assert torch.equal(links.gather_columns(mine, split), whole)
        room = torch.zeros(5, 12, dtype=dtype)
        links.gather_columns(mine, split, room[:3])
        assert torch.equal(room[:3], whole)
        assert not room[3:].any()
        own = torch.full((2, 3), number, dtype=dtype)
        assert links.all_gather(own)[:, 0, 0].tolist() == [0, 1, 2]
        links.broadcast(own[1:])
        assert own.tolist() == [[number] * 3, [0] * 3]

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(rank, number) for number in range(3)]:
            done.result(PATIENCE_S)


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device_of(rank, "cpu") for rank in (0, 1)] == ["cpu", "cpu"]
    assert [device_of(rank, "cuda") for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    assert device_of(1, "cuda", staged=True) == "cuda:0"
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    assert device_of(7, "cuda") == "cuda:3"


def test_a_device_that_waits_for_ever() -> None:
    late = threading.Event()
    watch = DeviceWatchdog(0.3, late.set)
    for _ in range(3):
        watch.mark(lambda: True)
    assert not late.wait(0.8)
    began = time.monotonic()
    watch.mark(lambda: False)
    assert late.wait(PATIENCE_S)
    assert time.monotonic() - began > 0.3


def test_nobody_watches_after_the_end() -> None:
    late = threading.Event()
    watch = DeviceWatchdog(0.1, late.set)
    watch.mark(lambda: False)
    watch.end()
    assert not late.wait(0.5)
    assert not [thread for thread in threading.enumerate() if thread.name == "devices of ranks"]
