"""Ranks that end or hang: every request fails in one line, nothing waits for ever, and no process is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.cli.test_serve import serving, wait_for
from tests.patience import PATIENCE_S
from tests.server.conftest import eventually
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.backends.native.shared_memory_ranks import SharedMemoryRanks
from twostroke.backends.ranks import processes
from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.engine.engine_thread import EngineThread
from twostroke.errors import InvalidRequest, RankLost

needs_native = pytest.mark.skipif(
    library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}"
)
BACKENDS = [pytest.param("native", marks=needs_native), "reference"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen3", tmp_path_factory.mktemp("qwen3"), head_dim=32)


def pids_of(llm: LLM) -> list[int]:
    if isinstance(llm.backend, NativeBackend):
        assert isinstance(llm.backend.ranks, SharedMemoryRanks)
        return llm.backend.ranks.followers.pids
    assert isinstance(llm.backend, ReferenceBackend)
    assert llm.backend.ranks is not None
    assert llm.backend.ranks.followers is not None
    return llm.backend.ranks.followers.pids


def ended(pid: int) -> bool:
    """Soon. A zombie has ended."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_ends(backend: str, path: Path) -> None:
    with LLM(str(path), backend=backend, threads=1, tp=3, kv_bytes=16 << 20) as llm:
        pids = pids_of(llm)
        stream, other = (llm.stream("the quick brown", max_tokens=1000, ignore_eos=True) for _ in range(2))
        for _ in range(5):
            next(stream)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"^[^\n]*(rank|ranks)[^\n]*: open the model again$"):
            list(stream)
        with pytest.raises(RankLost):
            list(other)
        with pytest.raises(RankLost):  # from now on
            llm.generate(["the"], max_tokens=1)
        assert isinstance(llm.engine.failure, RankLost)
    del llm, stream, other
    assert all(ended(pid) for pid in pids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_hangs(backend: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RANK_TIMEOUT_S", 2.0)
    monkeypatch.setattr(processes.PipeChannel, "receive", processes.PipeChannel.wait)  # its start may take longer
    llm = LLM(str(path), backend=backend, threads=1, tp=2, kv_bytes=16 << 20)
    (pid,) = pids_of(llm)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match="has not answered for too long"):
        llm.generate(["the quick brown"], max_tokens=4)
    llm.close()
    del llm
    assert ended(pid)


SCRIPT = """
import sys, time
from twostroke.api.llm import LLM
llm = LLM(sys.argv[1], backend=sys.argv[2], threads=1, tp=2, kv_bytes=16 << 20)
print("open", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_0_that_is_killed(backend: str, path: Path) -> None:
    """The others end by themselves."""
    command = [sys.executable, "-c", SCRIPT, str(path), backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        pid = follower_of(process.pid)
        process.kill()
        process.wait()
        assert ended(pid)


def test_what_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tp": 0}, "tp must be from 1 to 64 ranks, not 0"),
        ({"tp": True}, "tp must be from 1 to 64 ranks, not True"),
        ({"tp": 4, "device": "cuda"}, "tp=4 needs 4 GPUs, and this machine has 1"),
        ({"tp": 2, "device": "cuda", "backend": "reference"}, "tp=2 needs 2 GPUs, and this machine has 1"),
        ({"tp": 2, "device": "cuda:1"}, "tp=2 computes on CPUs, or with device cuda on a GPU for each rank, not on"),
    ]
    for options, message in refused:
        with pytest.raises(InvalidRequest, match=message):
            LLM(str(path), **options)


def follower_of(process: int) -> int:
    """The process id of the only other rank of a process, or of its engine's process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = parent_of(stat.parent)
            if b"follower" in stat.with_name("cmdline").read_bytes() and process in (parent, parent_of(parent)):
                return int(stat.parent.name)
    raise AssertionError("it has no rank")


def parent_of(process: Path | int) -> int:
    """The process id of a process' parent."""
    return int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])


@needs_native
def test_serve(path: Path) -> None:
    """An outside client; then a rank is killed while it streams, and the stream goes on with new ranks."""
    with serving(str(path), "--tp", "2", "--itl-ms", "off", "--backend", "native") as (process, url):
        wait_for(process, url, 200)
        body: dict[str, Any] = {"prompt": "the quick", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        made = httpx.post(f"{url}/v1/completions", json=body).json()
        with LLM(str(path), backend="native", threads=1, kv_bytes=16 << 20) as alone:
            short, whole = (
                alone.generate(["the quick"], max_tokens=count, ignore_eos=True)[0].text for count in (8, 1900)
            )
        assert made["choices"][0]["text"] == short
        long = body | {"max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long) as stream:
            events = (line[6:] for line in stream.iter_lines() if line.startswith("data: {"))
            parts = [next(events)]
            os.kill(lost := follower_of(process.pid), signal.SIGKILL)
            parts += events
        assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == whole
        wait_for(process, url, 200)
        assert follower_of(process.pid) != lost
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert "rank 1 of 2 has ended" in errors
    assert "Traceback" not in errors


@needs_native
def test_a_rank_that_ends_while_nothing_is_computed(path: Path) -> None:
    """A server's thread finds out."""
    with LLM(str(path), backend="native", threads=1, tp=2, kv_bytes=16 << 20) as llm:
        thread = EngineThread(llm.engine)
        thread.start(lambda _: None)
        os.kill(pids_of(llm)[0], signal.SIGKILL)
        eventually(lambda: thread.failure is not None)
        thread.stop()
        assert isinstance(thread.failure, RankLost)
        assert not thread.alive
