"""The number of threads: a container's limit, and refused values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.system.limits import MAX_THREADS_PER_CORE, count_threads, usable_cores

SECOND, FIRST = "0::/system/a.service", "4:cpu,cpuacct:/docker/a\n3:memory:/b"
V1 = "cpu,cpuacct/docker/a/cpu.cfs_"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("", {}, 64),
        (SECOND, {"system/a.service/cpu.max": "max 100000\n"}, 64),
        (SECOND, {"system/a.service/cpu.max": "250000 100000\n"}, 2),
        (SECOND, {"system/a.service/cpu.max": "900000 100000\n", "system/cpu.max": "400000 100000"}, 4),
        (SECOND, {"unified/system/a.service/cpu.max": "300000 100000\n"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),  # in a container: less than a core gives one thread
        ("0::/", {"cpu.max": "9000000 100000"}, 64),
        (FIRST, {f"{V1}quota_us": "-1", f"{V1}period_us": "100000"}, 64),
        (FIRST, {f"{V1}quota_us": "500000", f"{V1}period_us": "100000"}, 5),
        (FIRST, {"cpu/cpu.cfs_quota_us": "600000", "cpu/cpu.cfs_period_us": "100000"}, 6),  # mounted from there on
    ],
)
def test_control_groups(
    groups: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path) == cores
    assert usable_cores(tmp_path / "nothing") == 64


@pytest.mark.parametrize("threads", [0, -1, 999, 1 << 31, 10**20, 1.5, "2", True])
def test_too_many_or_none(threads: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"threads must be (from 1 to|an integer)"):
        LLM(str(tmp_path), threads=threads)  # pyright: ignore[reportArgumentType]


def test_one_for_each_core() -> None:
    assert count_threads(None) == usable_cores()
    assert count_threads(MAX_THREADS_PER_CORE * usable_cores()) == MAX_THREADS_PER_CORE * usable_cores()
    assert LLM("smollm2-135m", kv_bytes=1 << 26).backend.threads == usable_cores()


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_no_more_threads() -> None:
    """If the system allows no more threads, an error is raised, and the threads that were started end."""
    script = """
import resource
from twostroke.errors import InvalidRequest
from twostroke.backends.native import library
library.load(library.variants()[0])
taken = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (taken + (40 << 20),) * 2)  # stacks have 8 MiB each
try:
    library.ThreadTeam(library.variants()[0], 16)
except InvalidRequest as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (
        "the system cannot start 16 threads and as many in reserve: ask for fewer\n",
        "",
        0,
    )
