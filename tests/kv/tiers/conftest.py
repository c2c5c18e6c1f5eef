"""Redis servers, pages to keep in them, and a user of one's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kv.tiers.redis_server import BINARY, RedisServer
from twostroke.kv.tiers.disk import DiskStore
from twostroke.kv.tiers.remote import RedisStore


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """A function that starts a server with options of its own."""
    if BINARY is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    with ExitStack() as servers:

        def start(*options: str, tls: bool = False) -> RedisServer:
            folder = tmp_path / f"redis-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return servers.enter_context(RedisServer(folder, *options, tls=tls))

        yield start


@pytest.fixture
def open_store() -> Iterator[Callable[..., RedisStore]]:
    with ExitStack() as stores:

        def open_one(url: str, **options: Any) -> RedisStore:
            store = RedisStore.open(url, **options)
            stores.callback(store.close)
            return store

        yield open_one


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def open_disk(disk: Path) -> Iterator[Callable[..., DiskStore]]:
    with ExitStack() as stores:

        def open_one(most_bytes: int = 100 << 20, **options: Any) -> DiskStore:
            store = DiskStore.open(disk, most_bytes, **options)
            stores.callback(store.close)
            return store

        yield open_one
