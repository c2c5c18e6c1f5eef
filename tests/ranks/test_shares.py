"""Who has which part, and which cores."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.ranks import processes
from twostroke.ranks.shares import Share


@given(count=st.integers(0, 5000), unit=st.sampled_from([1, 32, 1024]), size=st.integers(1, 9))
def test_every_thing_has_one_rank(count: int, unit: int, size: int) -> None:
    parts = [Share(rank, size).of(count, unit) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert all(part.start % unit == 0 for part in parts if part)
    units = [-(-len(part) // unit) for part in parts]
    assert max(units) - min(units) <= 1
    assert bool(parts[0]) == bool(count)


def test_cores_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are numbered across nodes on some machines."""
    for core in range(8):
        (tmp_path / f"node{core % 2}" / f"cpu{core}").mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processes.cores_of(2, tmp_path) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert processes.cores_of(3, tmp_path) == [[0, 2], [4, 6], [1, 3]]
    assert processes.cores_of(9, tmp_path) == [[]] * 9
