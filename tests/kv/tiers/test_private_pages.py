"""Private pages: deleted by a thread, so that nobody waits for it."""

import gc
import threading
import weakref

import pytest

from tests.kv.tiers.memory_store import MemoryStore
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.private_pages import PrivatePages

NAMESPACE = Namespace("", "", "geometry", "plain", 4, 8)


def test_a_page_comes_back_and_is_deleted() -> None:
    store = MemoryStore()
    pages = PrivatePages(store, NAMESPACE)
    assert pages.settle(0)  # nothing was kept yet
    one, other = pages.keep(memoryview(b"12345678")), pages.keep(memoryview(b"abcdefgh"))
    found = bytearray(8)
    pages.fetch(one, memoryview(found))
    assert found == b"12345678"
    pages.forget(one)
    assert pages.settle(60)
    assert list(store.private) == [other.key]


def test_forgetting_does_not_wait_and_survives_failures(caplog: pytest.LogCaptureFixture) -> None:
    store, hangs, goes_on = MemoryStore(), threading.Event(), threading.Event()
    pages = PrivatePages(store, NAMESPACE)
    names = [pages.keep(memoryview(b"12345678")) for _ in range(3)]

    def before(what: str) -> None:
        if what == "discard" and not goes_on.is_set():
            hangs.set()
            goes_on.wait(60)
            raise RuntimeError("a store that breaks its promise")

    store.before = before
    pages.forget(names[0])
    assert hangs.wait(60)
    pages.forget(names[1])  # while the store hangs
    assert not pages.settle(0)
    assert pages.keep(memoryview(b"abcdefgh")).key in store.private
    goes_on.set()
    pages.forget(names[2])
    assert pages.settle(60)
    assert "1 pages could not be deleted in memory:disk" in caplog.text
    assert set(store.private) & {name.key for name in names} == {names[0].key}


def test_the_thread_ends_with_the_pages() -> None:
    store = MemoryStore()
    pages = PrivatePages(store, NAMESPACE)
    name: PageName = pages.keep(memoryview(b"12345678"))
    pages.forget(name)
    thread, gone = pages.thread, weakref.ref(pages)
    assert thread is not None
    del pages
    gc.collect()
    thread.join(60)
    assert (thread.is_alive(), gone(), store.private) == (False, None, {})
