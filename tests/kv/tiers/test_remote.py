"""The remote tier beside a real server: what goes in comes out, under whose name, for how long."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kv.tiers.asking import Open, Server, client, find, key_of, read, write
from tests.kv.tiers.pages import NAMESPACE, Prompt, content, prompt
from tests.patience import PATIENCE_S
from twostroke.errors import KVError, PageLost
from twostroke.kv.tiers.names import PageName, private_name
from twostroke.kv.tiers.remote import RedisStore, clear, inspect, verify
from twostroke.kv.tiers.store import StoreUsage


@pytest.mark.parametrize(("count", "page_bytes"), [(1, 1), (1500, 40), (30, 1000), (3, 9 << 20)])
def test_pages_come_back(redis_server: Server, open_store: Open, count: int, page_bytes: int) -> None:
    server, one = redis_server(), prompt(count, page_bytes=page_bytes)
    store, other = open_store(server.url), open_store(server.url)
    assert (find(store, one), read(store, one)) == (0, 0)
    assert write(store, one) == count
    assert (find(other, one), read(other, one)) == (count, count)
    assert write(other, one) == count, "there already"
    out, back = store.counters.read(), other.counters.read()
    assert (out.pages_out, out.bytes_out, back.pages_out) == (count, count * page_bytes, 0)
    assert (back.pages_in, back.bytes_in) == (count, count * page_bytes)
    assert out.reasons == back.reasons == {}
    assert store.where == f"redis://127.0.0.1:{server.port}/0"


def test_only_leading_pages_count(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(10)
    store = open_store(server.url)
    assert write(store, one[:4]) == 4
    assert (find(store, one), read(store, one)) == (4, 4)
    assert write(store, one[3:]) == 7, "one is there"
    client(server).delete(key_of(store, one, 5))  # as a server does that lacks memory
    assert (find(store, one), read(store, one)) == (5, 5)
    assert write(store, one[2:]) == 8, "the hole is filled"
    assert read(store, one) == 10


def test_a_page_goes_in_only_with_its_parent(redis_server: Server, open_store: Open) -> None:
    one, store = prompt(6), open_store(redis_server().url)
    assert write(store, one[2:]) == 0
    assert find(store, one[2:]) == 0
    assert write(store, one[:2]) == 2
    assert write(store, one[2:]) == 4


@pytest.mark.parametrize(
    "other", [{"identity": "another"}, {"geometry": "another"}, {"layout": "another"}, {"page_size": 2}]
)
def test_namespaces_never_meet(redis_server: Server, open_store: Open, other: dict[str, Any]) -> None:
    one, store = prompt(3), open_store(redis_server().url)
    assert write(store, one) == 3
    theirs = Prompt(replace(NAMESPACE, **other), one.names)  # even under the same keys
    assert (find(store, theirs), read(store, theirs)) == (0, 0)
    renamed = Prompt(replace(NAMESPACE, model="a copy"), one.names)
    assert read(store, renamed) == 3, "a model's name is not what it computes"


def test_users_never_meet(
    redis_server: Server, open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, one = redis_server(), prompt(3)
    mine = open_store(server.url)
    assert write(mine, one) == 3
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "another"))
    theirs = open_store(server.url)
    assert (find(theirs, one), read(theirs, one)) == (0, 0)
    assert write(theirs, one[:1]) == 1
    assert inspect(server.url) == [StoreUsage("a model", 1, 0, inspect(server.url)[0].bytes)]
    assert clear(server.url)[0].pages == 1
    assert (read(theirs, one), read(mine, one)) == (0, 3)


def test_pages_live_for_a_time_after_their_last_use_and_the_deepest_go_first(
    redis_server: Server, open_store: Open
) -> None:
    server, one = redis_server(), prompt(5)
    store, raw = open_store(server.url, ttl_s=1000.0), client(server)

    def left() -> list[int]:
        return [raw.pttl(key_of(store, one, number)) for number in range(5)]

    assert write(store, one) == 5
    fresh = left()
    assert fresh == sorted(fresh, reverse=True)
    assert len(set(fresh)) == 5
    assert 900_000 < fresh[-1] < fresh[0] <= 1_000_000
    for use in (lambda: store.touch(one.namespace, one.names), lambda: write(store, one)):
        for number in range(5):
            raw.pexpire(key_of(store, one, number), 60_000)
        use()
        assert min(left()) > 900_000
    raw.pexpire(key_of(store, one, 1), 60_000)
    assert write(store, one[2:]) == 3
    assert left()[1] > 900_000, "the parent lives on with its children"
    assert all(raw.pttl(name) > 0 for name in raw.scan_iter("*")), "nothing stays for ever"


def test_private_pages(redis_server: Server, open_store: Open) -> None:
    server = redis_server()
    store, raw = open_store(server.url, refresh_s=0.05), client(server)
    names = [private_name() for _ in range(3)]

    def fetch(name: PageName) -> None:
        into = bytearray(NAMESPACE.page_bytes)
        store.fetch(NAMESPACE, name, memoryview(into))
        assert into == content(NAMESPACE, name)

    for name in names:
        store.keep(NAMESPACE, name, memoryview(content(NAMESPACE, name)))
    for name in names:
        fetch(name)
    assert store.find(NAMESPACE, names) == 0, "no prompt finds them"
    key = store.page_format(NAMESPACE).key(names[0], "private")
    assert 0 < raw.pttl(key) <= 600_000, "gone soon after this process"
    raw.pexpire(key, 60_000)
    until = time.monotonic() + PATIENCE_S
    while raw.pttl(key) <= 60_000:  # a thread lets them live on
        assert time.monotonic() < until
        time.sleep(0.01)
    store.discard(NAMESPACE, names[:1])
    with pytest.raises(PageLost, match=f"gone in redis://127.0.0.1:{server.port}/0"):
        fetch(names[0])
    fetch(names[1])
    store.close()
    assert not list(raw.scan_iter("*:private:*"))


def test_the_thread_that_refreshes_ends_with_the_store(redis_server: Server) -> None:
    store = RedisStore.open(redis_server().url, refresh_s=0.01)
    name = private_name()
    store.keep(NAMESPACE, name, memoryview(content(NAMESPACE, name)))
    thread = store.refresher.thread
    assert thread is not None
    del store
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_closed_store_does_nothing(redis_server: Server) -> None:
    one, store = prompt(3), RedisStore.open(redis_server().url)
    assert write(store, one) == 3
    store.close()
    store.close()
    assert (find(store, one), read(store, one), write(store, one)) == (0, 0, 0)


def test_many_threads(redis_server: Server, open_store: Open) -> None:
    store = open_store(redis_server().url)
    prompts = [prompt(20, seed % 12, 3000) for seed in range(48)]

    def work(one: Prompt) -> None:
        write(store, one[:10])
        write(store, one[10:])
        assert (find(store, one), read(store, one)) == (20, 20)
        store.touch(one.namespace, one.names)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, prompts))
    assert store.counters.read().reasons == {}
    assert len(store.connections.idle) <= 8


FORKED = """
import os, sys
from tests.kv.tiers.pages import NAMESPACE, prompt
from twostroke.kv.tiers.remote import RedisStore
store, one = RedisStore.open(sys.argv[1]), prompt(40)
assert store.write(NAMESPACE, one.names, one.pages) == 40
children = []
for _ in range(3):
    if not (child := os.fork()):
        for _ in range(30):
            room = one.room()
            if store.read(NAMESPACE, one.names, room, 30) != 40 or room != one.pages:
                os._exit(1)
        os._exit(0)
    children.append(child)
for _ in range(30):
    room = one.room()
    assert store.read(NAMESPACE, one.names, room, 30) == 40
    assert room == one.pages
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
assert not store.counters.read().reasons, store.counters.read()
"""


def test_forked_processes_do_not_share_connections(redis_server: Server) -> None:
    url = redis_server().url
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", FORKED, url], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inspect_verify_and_clear(redis_server: Server, open_store: Open) -> None:
    server = redis_server()
    store, raw = open_store(server.url), client(server)
    small = prompt(3, namespace=replace(NAMESPACE, model="small", identity="another"))
    one, name = prompt(6), private_name()
    assert (write(store, one), write(store, small)) == (6, 3)
    store.keep(NAMESPACE, name, memoryview(content(NAMESPACE, name)))
    raw.set("somebody else's", 1)
    found = inspect(server.url)
    assert [(each.model, each.pages, each.private, each.damaged) for each in found] == [
        ("a model", 6, 1, 0),
        ("small", 3, 0, 0),
    ]
    lengths = [raw.strlen(each) for each in raw.scan_iter("twostroke:*") if not each.endswith(b"about")]
    assert sum(each.bytes for each in found) == sum(lengths)
    assert verify(server.url) == found
    key = key_of(store, one, 4)
    raw.setrange(key, 300, b"x")
    raw.set(key_of(store, one, 5), raw.get(key_of(store, one, 3)))
    assert [(each.model, each.pages, each.damaged) for each in verify(server.url)] == [
        ("a model", 4, 2),
        ("small", 3, 0),
    ]
    assert find(store, one) == 4
    assert clear(server.url, "nobody") == []
    assert [(each.model, each.pages) for each in clear(server.url, "small")] == [("small", 3)]
    assert [each.pages for each in inspect(server.url)] == [4]
    assert [each.pages for each in clear(server.url)] == [4]
    assert inspect(server.url) == [StoreUsage("a model", 0, 1, inspect(server.url)[0].bytes)]
    store.fetch(NAMESPACE, name, memoryview(bytearray(1000)))
    assert raw.get("somebody else's") == b"1"


def test_upkeep_of_a_server_that_is_not_there(open_store: Open) -> None:
    open_store("redis://127.0.0.1:1")  # makes the key
    for work in (inspect, verify, clear):
        with pytest.raises(KVError, match=r"redis://127\.0\.0\.1:1/0 does not answer: .*refused"):
            work("redis://:secret@127.0.0.1:1")
