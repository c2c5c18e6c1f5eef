"""The remote tier when the server or the way to it fails: a miss in time, and it heals by itself."""

import logging
import threading

import pytest

from tests.kv.tiers.asking import Open, Server, client, clocked, find, read, reasons, write
from tests.kv.tiers.pages import NAMESPACE, content, prompt
from tests.kv.tiers.redis_server import Proxy
from tests.patience import PATIENCE_S
from twostroke.errors import OutOfPages, PageLost
from twostroke.kv.tiers.names import private_name
from twostroke.kv.tiers.remote.circuit_breaker import IN_A_ROW


def test_a_server_that_is_down_at_start(
    redis_server: Server, open_store: Open, caplog: pytest.LogCaptureFixture
) -> None:
    server, one = redis_server(), prompt(4)
    server.kill()
    store = open_store(server.url)
    clock = clocked(store)
    for _ in range(10):
        assert (find(store, one), read(store, one), write(store, one)) == (0, 0, 0)
    assert reasons(store)["error"] == 4 * IN_A_ROW
    assert reasons(store)["open"] == 4 * (30 - IN_A_ROW)
    assert not store.answering
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
    server.start()
    clock.now += 1.0
    assert (write(store, one), read(store, one)) == (4, 4)
    assert store.answering


def test_a_restart_is_not_a_failure(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(4)
    store = open_store(server.url)
    for _ in range(3):
        assert (write(store, one), read(store, one)) == (4, 4)
        server.kill()
        server.start()
        assert (find(store, one), read(store, one)) == (0, 0)
    assert reasons(store) == {}


def test_a_server_that_hangs(redis_server: Server, open_store: Open) -> None:
    server, one, private = redis_server(), prompt(4), private_name()
    store = open_store(server.url)
    clock = clocked(store)
    assert write(store, one) == 4
    store.keep(NAMESPACE, private, memoryview(content(NAMESPACE, private)))
    server.pause()  # until the end of this test: who waited for an answer would wait for ever
    for _ in range(IN_A_ROW):
        assert read(store, one, 0.25) == 0
    assert reasons(store) == {"error": 4 * IN_A_ROW}
    assert not store.answering
    with pytest.raises(PageLost, match=r"does not answer.*try again"):
        store.fetch(NAMESPACE, private, memoryview(bytearray(1000)))
    with pytest.raises(OutOfPages, match="does not answer"):
        store.keep(NAMESPACE, private_name(), memoryview(bytes(1000)))
    server.pause(False)
    clock.now += 1.0
    assert read(store, one) == 4
    room = memoryview(bytearray(1000))
    store.fetch(NAMESPACE, private, room)
    assert room == content(NAMESPACE, private)
    assert store.answering


def test_short_limits_do_not_condemn_the_server(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(40, page_bytes=1 << 18)
    store = open_store(server.url)
    assert write(store, one) == 40
    for limit_s in [0.0, -1.0, 1e-6, 1e-5, 1e-4] * 4:
        read(store, one, limit_s)
    assert store.answering
    assert reasons(store).keys() <= {"late"}
    assert read(store, one) == 40


def test_a_server_killed_in_mid_read(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(32, page_bytes=100_000)
    assert write(open_store(server.url), one) == 32
    with Proxy(server.port) as proxy:
        store = open_store(proxy.url)
        for cut_after in (50, 100_100, 1_234_567, 3_199_999):
            proxy.cut_after = cut_after
            count = read(store, one)
            assert count <= cut_after // 100_000
        assert count > 0
        proxy.cut_after = None
        assert read(store, one) == 32
        threads = [threading.Thread(target=read, args=(store, one)) for _ in range(4)]
        for thread in threads:
            thread.start()
        server.kill()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert read(store, one) == 0


def test_a_slow_link_gives_what_came_in_time(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(100, page_bytes=100_000)
    assert write(open_store(server.url), one) == 100
    with Proxy(server.port) as proxy:
        store = open_store(proxy.url)
        assert read(store, one[:1]) == 1
        proxy.bytes_per_s = 2e6
        count = read(store, one, 1.0)  # 5 s of bytes are asked for
        assert 0 < count < 100
        assert reasons(store) == {"late": 100 - count}
        assert store.answering
        proxy.bytes_per_s = None
        assert read(store, one) == 100


def test_a_silent_link(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(8)
    with Proxy(server.port) as proxy:
        store = open_store(proxy.url)
        clock = clocked(store)
        assert write(store, one) == 8
        proxy.silent = True
        for _ in range(IN_A_ROW):
            assert find(store, one) == 0
        assert not store.answering
        asked = proxy.connections
        for _ in range(20):
            assert read(store, one) == 0
        assert proxy.connections == asked, "an open circuit asks nobody"
        proxy.silent = False
        proxy.drop()
        clock.now += 1.0
        assert read(store, one) == 8


def test_a_full_server_is_still_read(redis_server: Server, open_store: Open) -> None:
    server = redis_server("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    store, one, more = open_store(server.url), prompt(8, page_bytes=100_000), prompt(200, 1, page_bytes=100_000)
    clock = clocked(store)
    assert write(store, one) == 8
    count = write(store, more)
    assert 0 < count < 200
    assert reasons(store) == {"full": 200 - count}
    assert read(store, more) == count
    raw = client(server)
    assert raw.dbsize() == 8 + count + 1, "no page without its parent"
    with pytest.raises(OutOfPages, match="full"):
        store.keep(NAMESPACE, private_name(), memoryview(bytes(1000)))
    assert write(store, prompt(1, 2)) == 0, "it is not asked to write"
    assert reasons(store)["open"] == 2
    assert read(store, one) == 8
    assert store.answering
    raw.flushall()
    clock.now += 1.0
    assert write(store, one) == 8
    assert read(store, one) == 8


def test_a_server_that_evicts(redis_server: Server, open_store: Open) -> None:
    server = redis_server("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    store = open_store(server.url)
    prompts = [prompt(20, seed, page_bytes=50_000) for seed in range(12)]
    for one in prompts:
        assert write(store, one) in range(21)
    for _ in range(3):
        for one in prompts:
            there = find(store, one)
            assert read(store, one) <= 20
            assert write(store, one) >= min(there, 1)
    assert reasons(store) == {}


def test_a_server_that_may_not_be_written_to(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(4)
    store = open_store(server.url)
    assert write(store, one) == 4
    raw = client(server)
    raw.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+get", "+exists", "+client"])
    reader = open_store(f"redis://reader:pw@127.0.0.1:{server.port}")
    for _ in range(10):
        assert write(reader, one) == 0
        reader.touch(one.namespace, one.names)
        assert read(reader, one) == 4
    assert reader.answering
