"""Who has which part, and which cores."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.backends.ranks import processes
from twostroke.backends.ranks.sharding import Shard


@given(count=st.integers(0, 5000), unit=st.sampled_from([1, 32, 1024]), size=st.integers(1, 9))
def test_every_thing_has_one_rank(count: int, unit: int, size: int) -> None:
    parts = [Shard(rank, size).of(count, unit) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert all(part.start % unit == 0 for part in parts if part)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1
    assert bool(parts[0]) == bool(count)


@given(kv_heads=st.integers(1, 9), repeat=st.integers(1, 4), size=st.integers(1, 9), together=st.booleans())
def test_every_head_has_one_rank(kv_heads: int, repeat: int, size: int, together: bool) -> None:
    """Where pages are in memory of all ranks, no rank has more than three heads more than another."""
    attention = SimpleNamespace(num_heads=kv_heads * repeat, num_kv_heads=kv_heads, head_dim=32)
    config: Any = SimpleNamespace(layers=[SimpleNamespace(attention=attention)])
    shares = [Shard(rank, size, together) for rank in range(size)]
    made = [0] * size
    for name, heads in (("q", kv_heads * repeat), ("k", kv_heads), ("v", kv_heads)):
        parts = [share.rows(config, f"layers.0.{name}", 32 * heads) for share in shares]
        assert [row for part in parts for row in part] == list(range(32 * heads))
        made = [some + len(part) // 32 for some, part in zip(made, parts, strict=True)]
    if together:
        assert max(made) - min(made) <= 3


def test_cores_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are numbered across nodes on some machines."""
    for core in range(8):
        (tmp_path / f"node{core % 2}" / f"cpu{core}").mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processes.cores_of(2, tmp_path) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert processes.cores_of(3, tmp_path) == [[0, 2], [4, 6], [1, 3]]
    assert processes.cores_of(9, tmp_path) == [[]] * 9
