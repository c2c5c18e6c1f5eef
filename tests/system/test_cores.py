"""The number of threads: a container's limit, and refused values. Threads that move off a core."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.llm import LLM
from twostroke.system.cores import MOST, count_threads, current_core, moving_aside, usable_cores

T = TypeVar("T")
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
    with pytest.raises(InvalidRequest, match="threads must be from 1 to"):
        LLM(str(tmp_path), threads=threads)  # pyright: ignore[reportArgumentType]


def test_one_for_each_core() -> None:
    assert count_threads(None) == usable_cores()
    assert count_threads(MOST * usable_cores()) == MOST * usable_cores()
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
    library.Team(library.variants()[0], 16)
except InvalidRequest as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (
        "the system cannot start 16 threads and as many in reserve: ask for fewer\n",
        "",
        0,
    )


def in_a_thread(job: Callable[[], T]) -> T:
    """What a job returns, in a thread of its own: what it does to that thread ends with it."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(job).result()


def test_a_thread_knows_its_core() -> None:
    def cores() -> list[int | None]:
        found: list[int | None] = []
        for core in usable:
            os.sched_setaffinity(0, {core})
            found.append(current_core())
        return found

    usable = sorted(os.sched_getaffinity(0))
    assert in_a_thread(cores) == usable


def test_a_thread_moves_aside_while_it_is_asked_to() -> None:
    def masks() -> list[set[int]]:
        found: list[set[int]] = []
        with moving_aside() as aside:
            for core in (None, *sorted(own), max(own) + 1):
                aside(core)
                found.append(os.sched_getaffinity(0))
        return [*found, os.sched_getaffinity(0)]

    own = os.sched_getaffinity(0)
    each = [own - {core} or own for core in sorted(own)]
    assert in_a_thread(masks) == [own, *each, each[-1], own]
    assert os.sched_getaffinity(0) == own


def test_a_thread_with_one_core_stays_there() -> None:
    def masks() -> list[set[int]]:
        os.sched_setaffinity(0, {core})
        with moving_aside() as aside:
            aside(core)
            return [os.sched_getaffinity(0)]

    core = min(os.sched_getaffinity(0))
    assert in_a_thread(masks) == [{core}]
