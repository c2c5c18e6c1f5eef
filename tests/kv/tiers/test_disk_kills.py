"""A process that is killed at any moment leaves no wrong page, loses none that was written, and no space."""

import os
import random
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kv.tiers.pages import prompt
from tests.kv.tiers.test_disk import find, read, taken, write
from tests.thinning import examples
from twostroke.kv.tiers.disk import DiskStore
from twostroke.kv.tiers.names import private_name

KILLS = examples(20)
STRIDE = 7 if examples(1) == 1 else 1
PAGE = 100_000


def child(act: Callable[[int], None]) -> tuple[int, int]:
    """Run a forked process. Returns (its id, the reading end of what it tells)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        act(writing)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def test_killed_at_any_moment(disk: Path) -> None:
    draw, known, lost = random.Random(1), set[int](), 0
    DiskStore.open(disk, 1 << 30).close()
    for turn in range(KILLS):

        def work(tell: int, turn: int = turn) -> None:
            store = DiskStore.open(disk, 1 << 30)
            name = private_name()
            for seed in range(turn * 100, turn * 100 + 100):
                one = prompt(2, seed, PAGE)
                store.keep(one.namespace, name, one.pages[0])
                if write(store, one) == 2:
                    os.write(tell, seed.to_bytes(4, "little"))
                store.discard(one.namespace, [name])

        pid, tells = child(work)
        first = os.read(tells, 4) if turn % 2 else b""  # some are killed while they open the directory
        time.sleep(draw.random() * 0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while told := os.read(tells, 4):
            first += told
        os.close(tells)
        known |= {int.from_bytes(first[i : i + 4], "little") for i in range(0, len(first), 4)}
    assert len(known) > KILLS // 2

    store = DiskStore.open(disk, 1 << 30)
    assert len(list(disk.glob("owners/*"))) == 1
    assert store.used_bytes == taken(disk)
    for turn in range(KILLS):
        for seed in range(turn * 100, turn * 100 + 100):
            one = prompt(2, seed, PAGE)
            there = read(store, one)  # compares what it reads
            lost += seed in known and there != 2
            if there == 0 and seed not in known and find(store, prompt(1, seed + 1, PAGE)) == 0:
                break
    assert lost == 0
    assert not store.counters.read().reasons
    store.close()


CALLS = ("open", "posix_fallocate", "pwritev", "pwrite", "rename", "unlink", "mkdir", "utime", "rmdir")


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_call(disk: Path, after: bool) -> None:
    """The process ends before, or after, its n-th call that changes something, for every n at night and
    every seventh by day; half of a write is done."""
    n, done = 0, b""
    while not done:
        n, count = n + STRIDE, 0

        def work(tell: int, n: int = n) -> None:
            nonlocal count

            def deadly(name: str) -> Callable[..., object]:
                call = getattr(os, name)

                def deadly_call(*args: object, **options: object) -> object:
                    nonlocal count
                    count += 1
                    if count == n and not after:
                        if name == "pwritev":
                            os.ftruncate(int(str(args[0])), 5000)
                        os._exit(1)
                    try:
                        return call(*args, **options)
                    finally:
                        if count == n:
                            os._exit(1)

                return deadly_call

            for name in CALLS:
                setattr(os, name, deadly(name))
            store = DiskStore.open(disk, 100_000, day_bytes=1 << 40)  # so small that something goes for every prompt
            for seed in range(n, n + 3):
                write(store, prompt(4, seed, 10_000))
                store.keep(prompt(1).namespace, private_name(), prompt(1).pages[0])
            store.close()
            os.write(tell, b"done")

        pid, tells = child(work)
        os.waitpid(pid, 0)
        done = os.read(tells, 4)
        os.close(tells)
        store = DiskStore.open(disk, 100_000)
        assert store.used_bytes == taken(disk) <= 100_000 + 8192
        assert len(list(disk.glob("owners/*"))) == 1
        for seed in range(n + 3):
            one = prompt(4, seed, 10_000)
            assert read(store, one) == find(store, one)
        assert not store.counters.read().reasons
        store.close()
    assert n > 50


def test_processes_that_share_a_directory(disk: Path) -> None:
    """Several processes write, read and evict the same prompts. None reads wrong pages, and the quota holds."""
    quota = 2 << 20

    def work(tell: int) -> None:
        store, draw = DiskStore.open(disk, quota, day_bytes=1 << 40), random.Random(os.getpid())
        hits = 0
        for _ in range(300):
            one = prompt(draw.randint(1, 5), draw.randrange(20), 50_000)
            if draw.random() < 0.5:
                write(store, one)
            else:
                hits += read(store, one)
                store.touch(one.namespace, one.names)
            assert (store.used_bytes or 0) <= quota
        reasons = set(store.counters.read().reasons)
        store.close()
        os.write(tell, f"{hits} {reasons - {'evicted'}}".encode())

    children = [child(work) for _ in range(3)]
    largest = 0
    for pid, tells in children:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            with suppress(subprocess.CalledProcessError):  # something went while it was counted
                largest = max(largest, taken(disk))
        hits, _, reasons = os.read(tells, 1000).decode().partition(" ")
        os.close(tells)
        assert int(hits) > 20
        assert reasons == "set()"
    assert quota / 2 < largest <= quota + 3 * 60_000  # a file that is renamed meanwhile may be counted twice
    store = DiskStore.open(disk, quota)
    assert store.used_bytes == taken(disk)
    store.close()


def test_directories_that_grow_are_within_the_quota(tmp_path: Path) -> None:
    """A directory takes another block, or two, for some file: here it is the last that has room for some quotas."""
    for pages in range(60, 160):
        store, quota = DiskStore.open(tmp_path / str(pages), pages * 8192, day_bytes=1 << 40), pages * 8192
        for seed in range(pages):
            write(store, prompt(1, seed, 4000))
            assert (store.used_bytes or 0) <= quota
        store.close()


def test_a_stopped_process_stops_no_other(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was stopped while it held the ledger: others read, write nothing, and go on once it does."""
    monkeypatch.setattr("twostroke.kv.tiers.disk.ledger.LIMIT_S", 0.1)
    monkeypatch.setattr("twostroke.kv.tiers.disk.limits.REST_S", 0.0)
    store, one = DiskStore.open(disk, 1 << 30), prompt(3)
    write(store, one[:2])

    def work(tell: int) -> None:
        other = DiskStore.open(disk, 1 << 30)
        with other._directory.ledger.locked():  # pyright: ignore[reportPrivateUsage]
            os.write(tell, b"held")
            signal.pause()

    pid, tells = child(work)
    assert os.read(tells, 4) == b"held"
    assert read(store, one) == 2
    assert write(store, one) == 2
    assert store.counters.read().reasons == {"error": 1}
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert write(store, one) == 3
    os.close(tells)
    store.close()
