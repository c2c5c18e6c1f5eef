"""What tests do with a remote store."""

from collections.abc import Callable
from typing import Any

from tests.kv.tiers.pages import Prompt
from tests.kv.tiers.redis_server import RedisServer
from twostroke.kv.tiers.remote import RedisStore
from twostroke.kv.tiers.remote.circuit_breaker import CircuitBreaker

Server = Callable[..., RedisServer]
Open = Callable[..., RedisStore]


def read(store: RedisStore, one: Prompt, limit_s: float = 30.0) -> int:
    """How many leading pages come; they must be right."""
    room = one.room()
    count = store.read(one.namespace, one.names, room, limit_s)
    assert room[:count] == one.pages[:count]
    return count


def write(store: RedisStore, one: Prompt) -> int:
    return store.write(one.namespace, one.names, one.pages)


def find(store: RedisStore, one: Prompt) -> int:
    return store.find(one.namespace, one.names)


def client(server: RedisServer) -> Any:
    """The server's other client, which sees and changes everything."""
    import redis

    return redis.Redis(port=server.port)


def key_of(store: RedisStore, one: Prompt, number: int) -> bytes:
    return store.page_format(one.namespace).key(one.names[number])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def clocked(store: RedisStore) -> Clock:
    """Let the circuits of a store go by a clock of ours."""
    clock = Clock()
    store.connections.circuit, store.connections.writing = CircuitBreaker(clock), CircuitBreaker(clock)
    return clock


def reasons(store: RedisStore) -> dict[str, int]:
    return store.counters.read().reasons
