"""Ranks without common memory, as on several hosts: those that `torchrun` starts. They have the bits of one process."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ranks.scenario import UNEVEN, differences, finite, record
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library

needs_native = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}"
)
# What torchrun does, but its own store would listen to all interfaces.
OPEN = """
import os, pickle, sys
from pathlib import Path
from torch import distributed
from tests.backends.ranks.scenario import record
from twostroke.errors import RankLost
from twostroke.kv.cache import KVCache
from twostroke.api.llm import LLM
from twostroke.backends.ranks import rank_group
path, backend, directory, threads = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
group.dist.rendezvous = lambda _: iter([(distributed.FileStore(str(directory / "store"), size), rank, size)])
llm = LLM(path, backend=backend, threads=threads, tp=size, kv_bytes=16 << 20)
"""
SEEN = """
with llm:
    there = KVCache.load(directory / "alone.kv", llm)
    there.save(directory / "again.kv")
    seen = record(llm, long=size == 2 and backend == "native")
    seen["loaded"] = [token.id for token in llm.decode(there, max_tokens=4, ignore_eos=True)]
    (directory / f"seen{rank}").write_bytes(pickle.dumps(seen))
"""
LOST = """
stream = llm.stream("the quick brown", max_tokens=1900, ignore_eos=True)
next(stream)
print("streams", flush=True)
try:
    list(stream)
except RankLost as error:
    print(error)
"""


def started(script: str, path: Path, backend: str, directory: Path, size: int, threads: int) -> list[Any]:
    command = [sys.executable, "-c", OPEN + script, str(path), backend, str(directory), str(threads)]
    found = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(command, env={**found, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def alone(path: Path, backend: str, directory: Path, long: bool) -> dict[str, Any]:
    with LLM(str(path), backend=backend, threads=1, kv_bytes=16 << 20) as llm:
        value = llm.prefill(list(range(2, 60)))
        value.save(directory / "alone.kv")
        seen = record(llm, long=long)
        seen["loaded"] = [token.id for token in llm.decode(value, max_tokens=4, ignore_eos=True)]
        return seen


@pytest.mark.parametrize(("backend", "family", "size", "threads"), [
    pytest.param("native", "llama", 2, 1, marks=needs_native),
    pytest.param("native", "qwen3moe", 3, 2, marks=needs_native),
    ("reference", "llama", 2, 1),
])  # fmt: skip
def test_the_bits_of_one(backend: str, family: str, size: int, threads: int, tmp_path: Path) -> None:
    """Every rank runs the same program, and only rank 0 gets beyond the opening of the model."""
    path = tmp_path / "model"
    path.mkdir()
    write_model(family, path, head_dim=32, **UNEVEN)
    expected = alone(path, backend, tmp_path, size == 2 and backend == "native")
    assert finite(expected)
    ranks = started(SEEN, path, backend, tmp_path, size, threads)
    assert [rank.communicate(timeout=100)[0] for rank in ranks] == [""] * size
    assert [rank.returncode for rank in ranks] == [0] * size
    seen = pickle.loads((tmp_path / "seen0").read_bytes())
    assert differences(expected, seen) == []
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "alone.kv").read_bytes()
    assert not (tmp_path / "seen1").exists()


@needs_native
def test_a_rank_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    leader, other = started(LOST, write_model("llama", path, head_dim=32), "native", tmp_path, 2, 1)
    assert leader.stdout.readline() == "streams\n"
    other.kill()
    lines = leader.communicate(timeout=60)[0].splitlines()
    other.communicate()
    assert lines == ["a rank of 2 has ended, or has not answered for too long: open the model again"]
