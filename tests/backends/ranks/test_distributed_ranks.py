"""Ranks without common memory, as on several hosts: those that `torchrun` starts. They have the bits of one process."""

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ranks.scenario import UNEVEN, differences, finite, record
from tests.cli.test_serve import address_of, wait_for
from tests.patience import PATIENCE_S
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library

needs_native = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}"
)
# What torchrun does, but its own store would listen to all interfaces.
MEET = """
import os, pickle, sys
from pathlib import Path
from torch import distributed
from twostroke.backends.ranks import rank_group
path, backend, directory, threads = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
rank_group.dist.rendezvous = lambda _: iter([(distributed.FileStore(str(directory / "store"), size), rank, size)])
"""
OPEN = """
from tests.backends.ranks.scenario import record
from twostroke.errors import RankLost
from twostroke.kv.cache import KVCache
from twostroke.api.llm import LLM
llm = LLM(path, backend=backend, threads=threads, tp=size, kv_bytes=16 << 20)
"""
SEEN = """
with llm:
    there = KVCache.load(directory / "alone.kv", llm)
    there.save(directory / "again.kv")
    seen = record(llm, long=backend == "native")
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
SERVE = """
from twostroke.backends import choose
from twostroke.backends.ranks import processes
from twostroke.cli import main
processes.RANK_TIMEOUT_S = choose.RANK_TIMEOUT_S = float(os.environ["PATIENCE"])
options = f"--tp {size} --threads {threads} --kv-bytes 16MiB --itl-ms off --port 0"
sys.argv[1:] = ["serve", "--model", path, "--backend", backend, *options.split()]
main()
"""


def started(script: str, path: Path, backend: str, directory: Path, size: int, threads: int, **more: Any) -> list[Any]:
    """The processes, by rank. `more`: options of Popen."""
    command = [sys.executable, "-c", MEET + script, str(path), backend, str(directory), str(threads)]
    found = {**os.environ, "TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    found |= more.pop("env", {})
    return [
        subprocess.Popen(command, env={**found, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True, **more)
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
    pytest.param("native", "qwen3moe", 3, 2, marks=needs_native),
    pytest.param("native", "llama", 2, 1, marks=[needs_native, pytest.mark.nightly]),
    pytest.param("native", "olmo2", 2, 1, marks=[needs_native, pytest.mark.nightly]),
    pytest.param("native", "qwen2moe", 3, 1, marks=[needs_native, pytest.mark.nightly]),
    ("reference", "llama", 2, 1),
])  # fmt: skip
def test_the_bits_of_one(backend: str, family: str, size: int, threads: int, tmp_path: Path) -> None:
    """Every rank runs the same program, and only rank 0 gets beyond the opening of the model."""
    path = tmp_path / "model"
    path.mkdir()
    write_model(family, path, head_dim=32, **UNEVEN)
    expected = alone(path, backend, tmp_path, backend == "native")
    assert finite(expected)
    ranks = started(OPEN + SEEN, path, backend, tmp_path, size, threads)
    assert [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks] == [""] * size
    assert [rank.returncode for rank in ranks] == [0] * size
    seen = pickle.loads((tmp_path / "seen0").read_bytes())
    assert differences(expected, seen) == []
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "alone.kv").read_bytes()
    assert not (tmp_path / "seen1").exists()


@needs_native
def test_a_rank_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    leader, other = started(OPEN + LOST, write_model("llama", path, head_dim=32), "native", tmp_path, 2, 1)
    assert leader.stdout.readline() == "streams\n"
    other.kill()
    lines = leader.communicate(timeout=PATIENCE_S)[0].splitlines()
    other.communicate()
    assert lines == ["a rank of 2 has ended, or has not answered for too long: open the model again"]


@pytest.mark.thinned
@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "reference"])
@pytest.mark.parametrize(("sent", "patience_s"), [(signal.SIGKILL, 600), (signal.SIGSTOP, 5)])
def test_an_idle_server_that_loses_a_rank(sent: int, patience_s: float, backend: str, tmp_path: Path) -> None:
    """One that ends is noticed long before its patience is over; one that hangs, then. Nothing was ever asked."""
    path = tmp_path / "model"
    path.mkdir()
    write_model("llama", path, head_dim=32)
    env = {"PATIENCE": str(patience_s)}
    leader, other = started(SERVE, path, backend, tmp_path, 2, 1, stderr=subprocess.PIPE, env=env)
    try:
        url, _ = address_of(leader)
        wait_for(leader, url, 200)
        other.send_signal(sent)
        failure = wait_for(leader, url, 503).json()["failure"]
        assert failure == "a rank of 2 has ended, or has not answered for too long: open the model again"
        _, errors = leader.communicate(timeout=PATIENCE_S)
        assert leader.returncode == 1
        assert "Traceback" not in errors
    finally:
        for process in (leader, other):
            process.kill()
            process.communicate()
