"""Stores that hang, lie and lose, and what is under way when something else ends."""

import functools
import threading

import pytest

from tests.engine.tiered import PAGE_BYTES, Opener, lower, over, without_tiers
from tests.kv.tiers.memory_store import MemoryStore, Pages
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine import page_load as load
from twostroke.engine.request import Request
from twostroke.errors import EngineStopped, PageLost
from twostroke.kv.cache import KVCache
from twostroke.kv.tiers.tiers import Tiers
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
LIMIT_S = 60


def tokens_of(number: int, length: int = 100) -> list[int]:
    return [100 + (number * 31 + 7 * i) % 389 for i in range(length)]


@functools.cache
def plain() -> LLM:
    return without_tiers(64)


@functools.cache
def expected(number: int, length: int = 100) -> tuple[int, ...]:
    (answer,) = plain().generate([tokens_of(number, length)], PARAMS)
    return tuple(token.id for token in answer.tokens)


def ids(request: Request) -> tuple[int, ...]:
    return tuple(token.id for token in request.events)


def ask(llm: LLM, number: int, length: int = 100) -> Request:
    """Answer a prompt, rightly."""
    request = llm.request(tokens_of(number, length), PARAMS)
    llm.engine.run([request])
    assert ids(request) == expected(number, length)
    return request


def written(opener: Opener, *numbers: int) -> Pages:
    """The pages of prompts, as another process has written them."""
    pages: Pages = {}
    with opener(over("disk", pages)) as llm:
        for number in numbers:
            ask(llm, number)
    return pages


class Hanging:
    """Calls of a store hang until `go`."""

    def __init__(self, store: MemoryStore, what: str) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.calls = 0
        self._store, self._what = store, what
        store.before = self._call

    def _call(self, what: str) -> None:
        if what == self._what and not self.go.is_set():
            self.calls += 1
            self.began.set()
            self.go.wait(LIMIT_S)


def continued(llm: LLM, kv: KVCache) -> Request:
    return llm.engine.submit(llm.decode_request(kv, PARAMS))


def test_a_value_on_a_store_that_hangs(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends with one error, others never wait, and the value is usable when the store answers again."""
    monkeypatch.setattr(load, "VALUE_PAGE_S", 1.0)
    store = MemoryStore("disk")
    llm = opener(Tiers(disk=store), index="off")
    kv = llm.prefill(tokens_of(1)).to("disk")
    hanging = Hanging(store, "fetch")
    waiting = continued(llm, kv)
    llm.engine.step()
    assert hanging.began.wait(LIMIT_S)
    ask(llm, 2)
    with pytest.raises(PageLost, match="the disk tier gave no page of a value for 1 s: ask again"):
        llm.engine.finish([waiting])
    assert llm.engine.num_arriving == 0
    hanging.go.set()
    assert llm.tiers.flush(LIMIT_S)
    again = continued(llm, kv)
    llm.engine.finish([again])
    assert ids(again) == expected(1)
    del kv, waiting, again


def test_pages_that_a_request_waits_for_are_not_expected_back(opener: Opener) -> None:
    """Else a parked choice would wait for them and let younger ones pass, for as long as any of these loads pages."""
    store = MemoryStore("disk")
    llm = opener(Tiers(disk=store), index="off")
    kv, budget = llm.prefill(tokens_of(1)).to("disk"), llm.engine.budget
    hanging = Hanging(store, "fetch")
    waiting = continued(llm, kv)
    llm.engine.step()
    assert hanging.began.wait(LIMIT_S)
    assert not budget.pages_returning
    llm.engine.cancel(waiting)
    assert budget.pages_returning
    hanging.go.set()
    assert llm.tiers.flush(LIMIT_S)
    assert not budget.pages_returning
    del kv, waiting


def test_a_store_that_hangs_is_left_alone(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two calls that do not return it is not asked, until they do: neither for values nor for prompts."""
    monkeypatch.setattr(load, "VALUE_PAGE_S", 1.0)
    pages = written(opener, 1)
    store = MemoryStore("disk", pages)
    llm = opener(Tiers(disk=store))
    values = [llm.prefill(tokens_of(number)).to("disk") for number in (2, 3, 4)]
    assert llm.model.index is not None
    llm.model.index.clear()
    hanging = Hanging(store, "fetch")
    for kv in values[:2]:
        with pytest.raises(PageLost, match="gave no page"):
            llm.engine.finish([continued(llm, kv)])
    assert ask(llm, 5).cached_tokens == 0  # a step, which notes that they hang
    assert llm.tiers.speeds["disk"].closed
    with pytest.raises(PageLost, match="the disk tier does not answer: ask again"):
        llm.engine.finish([continued(llm, values[2])])
    assert hanging.calls == 2
    assert ask(llm, 1).cached_tokens == 0
    llm.model.index.clear()
    hanging.go.set()
    assert llm.tiers.flush(LIMIT_S)
    assert not llm.tiers.speeds["disk"].closed
    assert ask(llm, 1).cached_by_tier == {"disk": 96}
    values.clear()


@pytest.mark.parametrize("what", ["find", "read"])
def test_prompts_on_a_store_that_hangs_are_computed(opener: Opener, what: str) -> None:
    pages = written(opener, 1, 2, 3)
    store = MemoryStore("disk", pages)
    llm = opener(Tiers(disk=store))
    hanging = Hanging(store, what)
    lower(llm).computing = lambda context, count: 0.001 * count
    for number in (1, 2, 3):
        assert ask(llm, number).cached_tokens == 0
    assert hanging.calls == 2
    assert store.counters.read().reasons.get("open", 0) > 0 or llm.tiers.speeds["disk"].closed
    hanging.go.set()


def test_a_store_that_hangs_does_not_keep_another_from_answering(opener: Opener) -> None:
    pages = written(opener, 1, 2, 3, 4, 5, 6)
    disk, remote = MemoryStore("disk"), MemoryStore("remote", pages)
    llm = opener(Tiers(disk=disk, remote=remote))
    hanging = Hanging(disk, "find")
    lower(llm).computing = lambda context, count: 0.001 * count
    requests = [llm.request(tokens_of(number), PARAMS) for number in (1, 2, 3, 4)]
    llm.engine.run(requests)
    assert [ids(request) for request in requests] == [expected(number) for number in (1, 2, 3, 4)]
    lower(llm).computing = lambda context, count: 1.0 * count
    assert ask(llm, 5).cached_by_tier == {"remote": 96}
    hanging.go.set()


def test_a_store_that_claims_too_much(opener: Opener) -> None:
    pages = written(opener, 1)
    store = MemoryStore("disk", pages)
    for key in list(pages)[2:]:
        del pages[key]
    store.find = lambda namespace, names: len(names)
    llm = opener(Tiers(disk=store))
    assert ask(llm, 1).cached_by_tier == {"disk": 32}
    assert ask(llm, 2).cached_tokens == 0


def test_closed_while_loads_run(opener: Opener) -> None:
    pages = written(opener, 1)
    store = MemoryStore("disk", pages)
    llm = opener(Tiers(disk=store))
    hanging = Hanging(store, "read")
    request = llm.engine.submit(llm.request(tokens_of(1), PARAMS))
    llm.engine.step()
    assert hanging.began.wait(LIMIT_S)
    pool, engine = llm.pool, llm.engine
    closing = threading.Thread(target=llm.close)
    closing.start()
    with pytest.raises(EngineStopped, match="closed"):
        engine.finish([request])
    hanging.go.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert (pool.num_used, pool.num_arriving) == (0, 0)


def test_closing_writes_what_waits(opener: Opener) -> None:
    """Also while the store is slow: nothing that was computed is lost to the next process."""
    store = MemoryStore("disk")
    llm = opener(Tiers(disk=store))
    hanging = Hanging(store, "write")
    ask(llm, 1)
    assert hanging.began.wait(LIMIT_S)
    ask(llm, 2)
    hanging.go.set()
    llm.close()
    other = opener(over("disk", store.pages))
    assert ask(other, 1).cached_by_tier == {"disk": 96}
    assert ask(other, 2).cached_by_tier == {"disk": 96}


def test_what_is_evicted_before_it_is_written_is_not_lost(opener: Opener) -> None:
    store = MemoryStore("disk")
    llm = opener(Tiers(disk=store), pages=10)
    hanging = Hanging(store, "write")
    ask(llm, 1)
    assert hanging.began.wait(LIMIT_S)  # the copies of the first group are made, the others wait
    ask(llm, 2)  # takes the frames of the first prompt
    ask(llm, 3)
    hanging.go.set()
    assert llm.tiers.flush(LIMIT_S)
    assert store.counters.read().reasons.get("queue", 0) == 0
    other = opener(over("disk", store.pages))
    for number in (1, 2, 3):
        assert ask(other, number).cached_by_tier == {"disk": 96}


def test_ten_times_as_many_conversations_as_the_pool_holds(opener: Opener) -> None:
    """Asked in turn, each longer than before: all that was computed comes back."""
    store = MemoryStore("disk")
    llm = opener(Tiers(disk=store), pages=12)
    for turn in range(3):
        for number in range(10):
            request = ask(llm, number, 70 + 16 * turn)
            found = request.cached_tokens
            assert found == (0 if not turn else (70 + 16 * (turn - 1)) // 16 * 16)
        assert llm.tiers.flush(LIMIT_S)
    assert store.counters.read().reasons.get("queue", 0) == 0


@pytest.mark.parametrize("host", [0, 200])
def test_a_preempted_choice_finds_its_entries(opener: Opener, host: int) -> None:
    """In the host, or without one on disk."""
    store = MemoryStore("disk")
    llm = opener(Tiers(host * PAGE_BYTES, disk=store), pages=24)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [llm.request(tokens_of(number), params) for number in (1, 2, 3)]
    for request in requests:
        llm.engine.submit(request)
    while not all(request.done for request in requests):
        before = llm.engine.preemptions
        llm.engine.step()
        if llm.engine.preemptions > before:
            assert llm.tiers.flush(LIMIT_S)
    assert llm.engine.preemptions > 0
    preempted = [request for request in requests if request.preemptions]
    assert all(request.cached_tokens > 0 for request in preempted)
    assert all(len(request.events) == 60 for request in requests)
    traffic = llm.tiers.host_counters if host else store.counters
    assert traffic.read().pages_in > 0


def test_what_was_slow_is_tried_again(opener: Opener) -> None:
    pages = written(opener, 1)
    llm = opener(over("disk", pages))
    link = llm.tiers.speeds["disk"]
    lower(llm).computing = lambda context, count: 0.01 * count
    link.bytes_per_s = 8 * PAGE_BYTES  # 0.75 s for what is computed in 0.96 s; one page in 0.125 s
    link.latency_s = 0.5
    tries = 0
    while not ask(llm, 1).cached_by_tier["disk"]:
        tries += 1
        assert llm.model.index is not None
        llm.model.index.clear()
    assert 0 < tries < 20
