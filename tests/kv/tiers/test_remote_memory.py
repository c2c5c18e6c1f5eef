"""Pages on their way to a remote server take no second copy of all of them."""

import tracemalloc

from tests.kv.tiers.asking import Open, Server
from tests.kv.tiers.pages import prompt

PAGE_BYTES = 1 << 20


def test_writing_holds_one_value_at_a_time(redis_server: Server, open_store: Open) -> None:
    store, one = open_store(redis_server().url), prompt(8, page_bytes=PAGE_BYTES)
    pages = one.pages
    store.find(one.namespace, one.names)  # connects
    tracemalloc.start()
    try:
        assert store.write(one.namespace, one.names, pages) == len(one)
        assert tracemalloc.get_traced_memory()[1] < 2 * PAGE_BYTES
    finally:
        tracemalloc.stop()
