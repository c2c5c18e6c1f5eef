"""Keys are replaced without losing pages: the first one seals, and all of them verify."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.kv.tiers.asking import find, read, write
from tests.kv.tiers.pages import prompt
from twostroke.kv.tiers.disk import DiskStore, inspect, verify
from twostroke.kv.tiers.remote import verify as verify_remote

OLD, NEW = "the old secret of all", "the new secret of all"


@pytest.fixture(params=["disk", "remote"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that opens the same store with some keys."""
    if request.param == "disk":
        open_one = request.getfixturevalue("open_disk")
    else:
        url, open_store = request.getfixturevalue("redis_server")().url, request.getfixturevalue("open_store")
        open_one = partial(open_store, url)

    def with_keys(keys: str) -> Any:
        monkeypatch.setenv("TWOSTROKE_KEY", keys)
        return open_one()

    return with_keys


def test_pages_outlive_their_key(opened: Callable[[str], Any]) -> None:
    one = prompt(9)
    assert write(opened(OLD), one[:3]) == 3
    both = opened(f"{NEW},{OLD}")
    assert find(both, one) == read(both, one) == 3
    assert write(both, one[3:6]) == 3, "their parent is under the old key"
    assert find(both, one) == read(both, one) == 6
    behind = opened(f"{OLD},{NEW}")
    assert write(behind, one[6:]) == 3
    assert find(behind, one) == read(behind, one) == 9, "runs of pages under one key and the other"
    assert find(opened(OLD), one) == 3
    assert find(opened(NEW), one) == 0, "of a prompt, the first page is needed"


def test_all_keys_check(opened: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one = prompt(4)
    store = opened(OLD)
    write(store, one[:2])
    both = opened(f"{NEW},{OLD}")
    write(both, one[2:])
    usages = verify(Path(store.where)) if isinstance(store, DiskStore) else verify_remote(store.where)
    assert [(usage.pages, usage.damaged, usage.unchecked) for usage in usages] == [(2, 0, 0), (2, 0, 0)]
    if isinstance(store, DiskStore):
        monkeypatch.setenv("TWOSTROKE_KEY", NEW)
        assert sorted(usage.model for usage in inspect(Path(store.where))) == ["(written with another key)", "a model"]
