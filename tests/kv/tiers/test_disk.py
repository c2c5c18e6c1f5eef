"""The disk tier: what is written is found, by later processes too; what is not exactly that page is a miss."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.tiers.pages import NAMESPACE, Prompt, content, prompt
from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv.tiers.disk import DiskStore
from twostroke.kv.tiers.names import private_name
from twostroke.system.user_key import user_key

QUOTA = 100 << 20
Open = Callable[..., DiskStore]


def write(store: DiskStore, one: Prompt) -> int:
    return store.write(one.namespace, one.names, one.pages)


def find(store: DiskStore, one: Prompt) -> int:
    return store.find(one.namespace, one.names)


def read(store: DiskStore, one: Prompt) -> int:
    """Read the pages, and check those that are said to be right."""
    room = one.room()
    count = store.read(one.namespace, one.names, room, 60.0)
    for name, view in zip(one.names[:count], room, strict=False):
        assert bytes(view) == content(one.namespace, name)
    return count


def taken(path: Path) -> int:
    """What a directory takes, as du says."""
    return int(subprocess.check_output(["du", "-s", "--block-size=1", path]).split()[0])


def page_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("pages/*/*") if len(file.name) == 64)


def test_pages_are_found_and_read(open_disk: Open) -> None:
    store, one = open_disk(), prompt(5)
    assert find(store, one) == read(store, one) == 0
    assert write(store, one[:3]) == 3
    assert find(store, one) == read(store, one) == 3
    assert write(store, one[3:]) == 2
    assert find(store, one) == read(store, one) == 5
    assert find(store, prompt(5, seed=1)) == 0


def test_another_process_finds_them(open_disk: Open) -> None:
    first, second, one = open_disk(), open_disk(), prompt(5)
    write(first, one)
    assert read(second, one) == 5
    first.close()
    second.close()
    assert read(open_disk(), one) == 5


def test_a_page_goes_in_only_after_the_one_before_it(open_disk: Open) -> None:
    store, one = open_disk(), prompt(5)
    assert write(store, one[2:]) == 0
    assert write(store, one[:1]) == 1
    assert write(store, one[2:]) == 0
    assert write(store, one) == 5


def test_pages_of_other_models_are_not_found(open_disk: Open) -> None:
    store, one = open_disk(), prompt(3)
    write(store, one)
    for other in (replace(NAMESPACE, identity="other weights"), replace(NAMESPACE, layout="another")):
        assert find(store, prompt(3, namespace=other)) == 0
    same = replace(NAMESPACE, model="another name of the same weights")
    assert find(store, prompt(3, namespace=same)) == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_changed_file_is_a_miss(open_disk: Open, disk: Path, seed: int) -> None:
    store, one, draw = open_disk(), prompt(3), random.Random(seed)
    write(store, one)
    file = draw.choice(page_files(disk))
    data = bytearray(file.read_bytes())
    if seed % 4 == 0:
        data = data[: draw.randrange(len(data))]
    elif seed % 4 == 1:
        data += b"\0"
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    right = [name.key.hex() for name in one.names].index(file.name)
    assert find(store, one) == 3
    assert read(store, one) == right
    assert store.counters.read().reasons == {"corrupt": 1}
    assert not file.exists()
    assert write(store, one) == read(store, one) == 3


def test_a_file_under_another_name_is_a_miss(open_disk: Open, disk: Path) -> None:
    store, one = open_disk(), prompt(2)
    write(store, one)
    first, second = (disk / "pages" / page_files(disk)[0].parent.name / name.key.hex() for name in one.names)
    shutil.copy(first, second)
    assert read(store, one) == 1
    assert store.counters.read().reasons == {"corrupt": 1}


def test_what_is_no_file_is_a_miss(open_disk: Open, disk: Path) -> None:
    store, one = open_disk(), prompt(3)
    write(store, one)
    files = [page_files(disk)[0].parent / name.key.hex() for name in one.names]
    files[2].unlink()
    os.mkfifo(files[2])
    assert read(store, one) == 2
    files[1].rename(disk / "elsewhere")
    files[1].symlink_to(disk / "elsewhere")
    assert read(store, one) == 1


def test_pages_of_another_key_are_not_trusted(open_disk: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(open_disk(), prompt(3))
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "another home"))
    store = open_disk()
    assert find(store, prompt(3)) == 0
    assert write(store, prompt(3)) == read(store, prompt(3)) == 3


def test_the_directory_takes_what_it_says(open_disk: Open, disk: Path) -> None:
    store, other = open_disk(), open_disk()
    for seed in range(100):
        write(other if seed % 3 else store, prompt(3, seed, namespace=replace(NAMESPACE, identity=str(seed % 4))))
        if seed % 10 == 0:
            assert store.used_bytes == other.used_bytes == taken(disk)
    store.close()
    assert other.used_bytes == taken(disk)


def test_the_quota_holds_and_the_oldest_go(open_disk: Open, disk: Path) -> None:
    quota = 1 << 20
    store, other = open_disk(most_bytes=quota), open_disk(most_bytes=quota)
    for seed in range(100):
        one = prompt(3, seed)
        assert write((store, other)[seed % 2], one) == 3
        store.touch(one.namespace, prompt(3, 0).names)
        assert taken(disk) == store.used_bytes
        assert taken(disk) <= quota
    assert find(store, prompt(3, 0)) == find(store, prompt(3, 99)) == 3
    assert find(store, prompt(3, 1)) == 0
    assert sum(one.counters.read().reasons["evicted"] for one in (store, other)) > 100


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_page_is_left_without_the_one_before_it(open_disk: Open, disk: Path, data: st.DataObject) -> None:
    shutil.rmtree(disk, ignore_errors=True)
    store = open_disk(most_bytes=300_000)
    for _ in range(data.draw(st.integers(1, 30))):
        one = prompt(data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5)))
        if data.draw(st.booleans()):
            write(store, one)
        else:
            store.touch(one.namespace, one.names[: find(store, one)])
    there = {file.name for file in page_files(disk)}
    for seed in range(6):
        names = [name.key.hex() for name in prompt(8, seed).names]
        assert sum(name in there for name in names) == find(store, prompt(8, seed))
    assert store.used_bytes == taken(disk)
    store.close()


def test_the_day_has_its_budget(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = open_disk(day_bytes=50_000), open_disk(day_bytes=50_000)
    written = sum(write((store, other)[seed % 2], prompt(1, seed)) for seed in range(20))
    assert written == 9  # of 4,096 + 1,000 bytes each
    assert store.counters.read().reasons["budget"] > 0
    assert find(store, prompt(1, 0)) == 1
    tomorrow = time.time() + 86400
    monkeypatch.setattr("time.time", lambda: tomorrow)
    assert write(open_disk(day_bytes=50_000), prompt(1, 19)) == 1


def test_private_pages_live_as_long_as_their_process(open_disk: Open, disk: Path) -> None:
    store, one = open_disk(), prompt(1)
    name = private_name()
    store.keep(one.namespace, name, one.pages[0])
    into = one.room()[0]
    store.fetch(one.namespace, name, into)
    assert into == one.pages[0]
    assert store.used_bytes == taken(disk)
    other = open_disk()  # does not delete what belongs to a living process
    store.fetch(one.namespace, name, into)
    with pytest.raises(PageLost, match="gone"):
        other.fetch(one.namespace, name, into)
    store.discard(one.namespace, [name])
    with pytest.raises(PageLost, match="gone"):
        store.fetch(one.namespace, name, into)
    store.keep(one.namespace, name, one.pages[0])
    store.close()
    assert len(list(disk.glob("owners/*"))) == 1
    assert other.used_bytes == taken(disk)


def test_a_damaged_private_page_is_lost(open_disk: Open, disk: Path) -> None:
    store, one = open_disk(), prompt(1)
    name = private_name()
    store.keep(one.namespace, name, one.pages[0])
    (file,) = disk.glob("owners/*/*-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(PageLost, match="damaged"):
        store.fetch(one.namespace, name, one.room()[0])


def test_values_fill_the_disk_and_say_so(open_disk: Open, disk: Path) -> None:
    store, one = open_disk(most_bytes=200_000), prompt(1)
    write(store, prompt(5))
    kept = 0
    with suppress(OutOfPages):
        for kept in range(100):  # noqa: B007
            store.keep(one.namespace, private_name(), one.pages[0])
    assert 10 < kept < 50
    with pytest.raises(OutOfPages, match="is full"):
        store.keep(one.namespace, private_name(), one.pages[0])
    assert find(store, prompt(5)) == 0  # prompts can be computed again, values cannot
    assert taken(disk) == store.used_bytes


def test_a_full_device(open_disk: Open, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = open_disk(), prompt(3)
    write(store, one[:1])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    assert write(store, one) == 1
    assert store.counters.read().reasons == {"full": 2}
    assert read(store, one) == 1
    with pytest.raises(OutOfPages, match="is full"):
        store.keep(one.namespace, private_name(), one.pages[0])
    assert store.used_bytes == taken(disk)
    assert write(store, one) == 0  # it rests
    assert store.counters.read().reasons["open"] == 3


@pytest.mark.parametrize("call", ["os.pwritev", "os.rename", "os.utime"])
def test_a_device_that_fails(open_disk: Open, disk: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store, one = open_disk(), prompt(3)
    write(store, one[:1])
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(call, fail)
        assert write(store, one[1:]) == 0
    assert store.counters.read().reasons == {"error": 2}
    assert read(store, one) == 1
    store.failures.rest_until = 0.0
    assert write(store, one) == 3  # what the failure left goes, too
    assert not list(disk.glob("owners/*/*.partial"))
    assert store.used_bytes == taken(disk)


def test_files_that_cannot_be_opened_now_stay(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = open_disk(), prompt(3)
    write(store, one)
    opened = os.open
    with monkeypatch.context() as patch:

        def fail(path: str, *rest: int) -> int:
            if path.endswith(one.names[1].key.hex()):
                raise OSError(24, "Too many open files")
            return opened(path, *rest)

        patch.setattr("os.open", fail)
        assert read(store, one) == 1
    assert read(store, one) == 3
    assert store.counters.read().reasons == {"error": 1}


def test_a_directory_that_can_only_be_read(open_disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one = prompt(3)
    write(open_disk(), one[:2])
    monkeypatch.setattr("os.access", lambda *_: False)
    store = open_disk()
    assert read(store, one) == 2
    assert write(store, one) == 2
    assert store.counters.read().reasons == {"error": 1}
    with pytest.raises(OutOfPages, match="cannot be written to"):
        store.keep(one.namespace, private_name(), one.pages[0])


def test_directories_that_are_something_else(open_disk: Open, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    for path, text in ((file, "is no directory"), (file / "below", "Not a directory"), (tmp_path, "other files in it")):
        with pytest.raises(KVError, match=text):
            DiskStore.open(path, QUOTA)
    assert file.read_text() == "no directory"
    future = tmp_path / "future"
    future.mkdir()
    (future / "FORMAT").write_text("twostroke pages 99\n")
    with pytest.raises(KVError, match="another version"):
        DiskStore.open(future, QUOTA)


def test_no_key_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.setenv("TWOSTROKE_HOME", str(home))
    assert user_key(make=True) is None
    with pytest.raises(KVError, match="key"):
        DiskStore.open(tmp_path / "disk", QUOTA)


def test_a_damaged_ledger_is_counted_again(open_disk: Open, disk: Path) -> None:
    store = open_disk()
    write(store, prompt(3))
    for damage in (b"", b"nonsense" * 4):
        (disk / "ledger").write_bytes(damage)
        write(store, prompt(3, seed=1 + len(damage)))
        assert store.used_bytes == taken(disk)


def test_reading_ends_at_its_limit(open_disk: Open) -> None:
    """Reads that have begun end, and count; the others are not begun."""
    store, one = open_disk(), prompt(50)
    write(store, one)
    count = store.read(one.namespace, one.names, one.room(), 0.0)
    assert count < 50
    assert store.counters.read().reasons["late"] == 50 - count


def test_a_deleted_directory_is_made_again(
    open_disk: Open, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the rest that follows a failure; whether all of it is gone, or parts, or an empty one is in its place."""
    store, later = open_disk(), prompt(2, seed=9)
    kept = private_name()
    store.keep(NAMESPACE, kept, later.pages[0])
    for seed, damage in enumerate(
        (
            lambda: shutil.rmtree(disk),
            lambda: (shutil.rmtree(disk), disk.mkdir()),
            lambda: shutil.rmtree(disk / "owners"),
            lambda: shutil.rmtree(disk / "pages"),
        )
    ):
        assert store.answering
        damage()
        assert not store.answering
        one = prompt(3, seed=seed)
        assert write(store, one) == 0
        assert find(store, one) == 0, "it rests"
        monkeypatch.setattr(time, "monotonic", partial(float, time.monotonic() + 11.0))
        assert write(store, one) == 3
        assert read(store, one) == 3
        assert store.answering
        assert store.used_bytes == taken(disk)
    with pytest.raises(PageLost):
        store.fetch(NAMESPACE, kept, memoryview(bytearray(NAMESPACE.page_bytes)))
    store.keep(NAMESPACE, kept, later.pages[0])
    assert "it was made again" in caplog.text


def test_a_tier_is_not_answering_while_it_is_full(open_disk: Open) -> None:
    store = open_disk(1 << 20)
    with suppress(OutOfPages):
        while True:
            store.keep(NAMESPACE, private_name(), prompt(1).pages[0])
    assert store.answering, "it has refused a value, and pages may still go"
    assert write(store, prompt(40)) < 40
    assert not store.answering


def test_the_budget_of_a_day_is_no_failure(open_disk: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = open_disk(day_bytes=3 << 14)
    written = write(store, prompt(30))
    assert 0 < written < 30
    assert write(store, prompt(30, seed=1)) == write(store, prompt(30, seed=2)) == 0
    assert store.counters.read().reasons == {"budget": 30 - written + 60}
    assert store.answering
    assert caplog.text.count("the day's budget of writes is used up") == 1


def test_what_is_left_free_for_others_is_told_or_refused(
    disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = os.statvfs("/")
    blocks = 4096, 4096

    def small(whole: int, free: int) -> None:
        made = os.statvfs_result((*blocks, whole >> 12, free >> 12, free >> 12, *tuple(system)[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: made)

    small(60 << 20, 60 << 20)
    with pytest.raises(KVError, match="file system of 60 MiB, and 256 MiB are left free for others"):
        DiskStore.open(disk, QUOTA)
    small(1 << 30, 100 << 20)
    store = DiskStore.open(disk, QUOTA)
    assert caplog.text.count("100 MiB are free on its file system, and 256 MiB are left free for others") == 1
    assert write(store, prompt(1)) == 0
    store.close()


def test_what_is_no_file_is_damage(open_disk: Open, disk: Path) -> None:
    """A directory, a pipe or a link in a page's place is a miss, and goes; an eviction passes what it cannot delete."""
    store, one = open_disk(), prompt(4)
    for make in (os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        write(store, one)
        path = page_files(disk)[0]
        path.unlink()
        make(path)
        assert read(store, one) < 4
        assert not os.path.lexists(path)
    assert store.counters.read().reasons == {"corrupt": 3}
