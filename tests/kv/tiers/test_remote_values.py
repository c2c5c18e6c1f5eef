"""The remote tier beside a server that lies: a value that is not the page, or bytes that are no reply, are a miss."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.tiers.asking import Open, Server, client, clocked, find, key_of, read, reasons, write
from tests.kv.tiers.fake_server import fake_server
from tests.kv.tiers.pages import NAMESPACE, content, prompt
from twostroke.errors import OutOfPages, PageLost
from twostroke.kv.tiers.names import private_name


def flipped(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "magic": lambda value: flipped(value, 0),
    "version": lambda value: flipped(value, 8),
    "number": lambda value: flipped(value, 12),
    "namespace": lambda value: flipped(value, 30),
    "key": lambda value: flipped(value, 50),
    "tokens": lambda value: flipped(value, 110),
    "payload": lambda value: flipped(value, 700),
    "digest": lambda value: flipped(value, len(value) - 1),
    "truncated": lambda value: value[:-1],
    "longer": lambda value: value + b"x",
    "empty": lambda value: b"",
    "zeros": lambda value: bytes(len(value)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_value_that_was_changed_is_deleted_and_a_miss(redis_server: Server, open_store: Open, wrong: str) -> None:
    server, one = redis_server(), prompt(6)
    store, raw = open_store(server.url), client(server)
    assert write(store, one) == 6
    key = key_of(store, one, 2)
    raw.set(key, WRONG[wrong](raw.get(key)))
    assert read(store, one) == 2
    assert reasons(store) == {"corrupt": 1}
    assert not raw.exists(key)
    assert read(store, one) == 2
    assert write(store, one) == 6
    assert read(store, one) == 6


def test_values_under_each_others_keys(redis_server: Server, open_store: Open) -> None:
    server, one = redis_server(), prompt(6)
    store, raw = open_store(server.url), client(server)
    assert write(store, one) == 6
    raw.set(key_of(store, one, 3), raw.get(key_of(store, one, 4)))
    assert read(store, one) == 3
    assert reasons(store) == {"foreign": 1}
    assert find(store, one) == 3


def test_private_pages_that_were_changed_or_evicted(redis_server: Server, open_store: Open) -> None:
    server, names = redis_server(), [private_name() for _ in range(3)]
    store, raw = open_store(server.url), client(server)
    for name in names:
        store.keep(NAMESPACE, name, memoryview(content(NAMESPACE, name)))
    keys = [store.page_format(NAMESPACE).key(name, "private") for name in names]
    raw.setrange(keys[0], 500, b"xx")
    raw.delete(keys[1])
    room = memoryview(bytearray(1000))
    with pytest.raises(PageLost, match="damaged in redis://"):
        store.fetch(NAMESPACE, names[0], room)
    with pytest.raises(PageLost, match="gone in redis://"):
        store.fetch(NAMESPACE, names[1], room)
    store.fetch(NAMESPACE, names[2], room)
    assert room == content(NAMESPACE, names[2])


def test_shifted_replies(open_store: Open) -> None:
    """Each answer is that to the question before, as when a connection was given back too early."""
    values, late = dict[bytes, bytes](), [b"$-1\r\n"]

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"SET":
            values[command[1]] = command[2]
            return b"+OK\r\n"
        if command[0] == b"GET":
            value = values[command[1]]
            late.append(b"$%d\r\n%s\r\n" % (len(value), value))
            return late.pop(0)
        return b":0\r\n" if command[0] == b"PEXPIRE" else b"+OK\r\n"

    one = prompt(6)
    with fake_server(answer) as url:
        store = open_store(url)
        assert write(store, one) == 6
        assert read(store, one) == 0, "the first answer is of an earlier question"
        assert read(store, one[1:]) == 0
        assert reasons(store).keys() <= {"foreign"}


def chosen(reply: bytes) -> Callable[[list[bytes]], bytes]:
    def answer(command: list[bytes]) -> bytes:
        return b"+OK\r\n" if command[0] in (b"AUTH", b"CLIENT", b"SELECT") else reply

    return answer


NONSENSE = {
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no line": b"x" * 100_000,
    "a negative size": b"$-7\r\n",
    "a size that is none": b"$many\r\n",
    "a huge size": b"$99999999999999\r\n",
    "an array": b"*2\r\n:1\r\n:2\r\n",
    "an array of arrays": b"*1\r\n" * 5000,
    "no array": b"*x\r\n",
    "a number": b":1\r\n",
    "a number that is none": b":x\r\n",
    "a status": b"+OK\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "an error that is not of its protocol": b"-\xff\r\n",
    "an end": b"",
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense(open_store: Open, name: str) -> None:
    one, private = prompt(3), private_name()
    with fake_server(chosen(NONSENSE[name])) as url:
        store = open_store(url)
        clocked(store)
        for _ in range(3):
            store.find(one.namespace, one.names)
            assert read(store, one, 1.0) == 0
            store.touch(one.namespace, one.names)
            assert write(store, one) in (0, 3)
        with suppress(OutOfPages):
            store.keep(NAMESPACE, private, memoryview(content(NAMESPACE, private)))
        with pytest.raises(PageLost):
            store.fetch(NAMESPACE, private, memoryview(bytearray(1000)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    reply=st.one_of(
        st.binary(min_size=1, max_size=60),
        st.builds(lambda a, b: a + b, st.sampled_from([b"$", b"*", b":"]), st.binary(max_size=20)),
    )
)
def test_any_bytes_are_a_miss(open_store: Open, reply: bytes) -> None:
    one = prompt(2)
    with fake_server(chosen(reply + b"\r\n")) as url:
        store = open_store(url)
        assert read(store, one, 0.05) == 0
