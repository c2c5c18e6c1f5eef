"""Prompts find their pages in the host and in stores, with the same bits as without tiers."""

import asyncio
import functools
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.tiered import PAGE_BYTES, Opener, lower, over, without_tiers
from tests.kv.tiers.memory_store import MemoryStore, Pages
from tests.patience import PATIENCE_S
from tests.thinning import examples
from tests.watching import Answer, answers
from twostroke.api.async_llm import AsyncLLM
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.tiers.tiers import Tiers
from twostroke.methods import Method, method
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PROMPTS = [[100 + (7 * i) % 89 for i in range(130)], [100 + (7 * i) % 89 for i in range(64)] + list(range(200, 260))]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=7, ignore_eos=True, logprobs=2)


@functools.cache
def plain() -> LLM:
    return without_tiers(256)


@functools.cache
def expected(prompt: int, technique: Method | None = None) -> Answer:
    return ask(plain(), [prompt], technique)[0]


def ask(llm: LLM, prompts: list[int], technique: Method | None = None) -> list[Answer]:
    requests = [llm.request(PROMPTS[i], PARAMS, technique) for i in prompts]
    return answers(llm, requests, SchedulerConfig(max_step_tokens=64))


def found(llm: LLM, prompt: int) -> dict[str, int]:
    """Answer a prompt rightly; where its tokens were found."""
    request = llm.request(PROMPTS[prompt], PARAMS)
    assert answers(llm, [request], SchedulerConfig()) == [expected(prompt)]
    assert request.cached_tokens == sum(request.cached_by_tier.values())
    return dict(request.cached_by_tier)


def after_prompt(opener: Opener) -> MemoryStore:
    """A disk on which an earlier process has kept prompt 0."""
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.flush()
    return MemoryStore("disk", pages)


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_restart(opener: Opener, tier: str) -> None:
    """Another process finds what this one has written, without a second touch where computing took long."""
    pages: Pages = {}
    first = opener(over(tier, pages))
    assert found(first, 0) == {}
    assert first.tiers.flush()
    first.close()
    assert len(pages) == (130 + 6) // 16
    second = opener(over(tier, pages))
    assert found(second, 0) == {tier: 128}
    assert found(second, 0) == {"pool": 128}
    assert found(second, 1) == {"pool": 64}
    assert second.engine.num_arriving == 0


def test_second_touch(opener: Opener) -> None:
    """A short prompt is written to the disk when it comes again, and to the remote tier at once."""
    disk, remote = MemoryStore("disk"), MemoryStore("remote")
    llm = opener(Tiers(disk=disk, remote=remote))
    lower(llm).computing = lambda context, count: 0.1
    found(llm, 0)
    assert llm.tiers.flush()
    assert (len(disk.pages), len(remote.pages)) == (0, 8)
    assert disk.counters.read().reasons["second_touch"] > 0
    found(llm, 0)
    assert llm.tiers.flush()
    assert (len(disk.pages), len(remote.pages)) == (8, 8)


def test_the_nearest_tier_of_each_page(opener: Opener) -> None:
    pages: Pages = {}
    first = opener(Tiers(remote=MemoryStore("remote", pages)))
    found(first, 0)
    assert first.tiers.flush()
    order = list(pages)
    disk = MemoryStore("disk", {key: pages[key] for key in order[:3]})
    second = opener(Tiers(disk=disk, remote=MemoryStore("remote", pages)))
    assert found(second, 0) == {"disk": 48, "remote": 80}


def test_the_host_keeps_what_the_pool_evicts(opener: Opener) -> None:
    llm = opener(Tiers(host_bytes=64 * PAGE_BYTES), pages=10)
    assert found(llm, 0) == {}
    assert found(llm, 1) == {"pool": 64} or llm.pool.num_copies
    before = llm.tiers.host_counters.read()
    assert before.pages_out > 0
    assert before.seconds_out > 0
    again = found(llm, 0)
    after = llm.tiers.host_counters.read()
    assert (after.hits - before.hits) * 16 == again["host"]
    assert (before.misses, after.misses) == (8 + 3, 8 + 3)
    assert sum(again.values()) == 128
    assert again["host"] > 0
    assert llm.pool.num_copies * PAGE_BYTES <= 64 * PAGE_BYTES


def test_the_host_has_a_budget(opener: Opener) -> None:
    llm = opener(Tiers(host_bytes=3 * PAGE_BYTES), pages=10)
    for prompt in (0, 1, 0, 1):
        found(llm, prompt)
        assert llm.pool.num_copies <= 3
        assert llm.model.index is not None
        assert llm.model.index.host.used_bytes <= 3 * PAGE_BYTES


def test_identical_prompts_share_a_load(opener: Opener) -> None:
    disk = after_prompt(opener)
    llm = opener(Tiers(disk=disk))
    assert ask(llm, [0, 0, 0]) == [expected(0)] * 3
    assert disk.counters.read().pages_in == 8


def test_steps_go_on_while_pages_come(opener: Opener) -> None:
    """A store that hangs delays its own prompt only; it does not count as running."""
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.flush()
    disk, gate = MemoryStore("disk", pages), threading.Event()
    llm = opener(Tiers(disk=disk))
    disk.threads.clear()
    disk.before = lambda what: what != "read" or gate.wait(PATIENCE_S)
    waiting, other = llm.request(PROMPTS[0], PARAMS), llm.request(list(range(300, 330)), PARAMS)
    llm.engine.config = SchedulerConfig(max_running=1)
    llm.engine.submit(waiting)
    llm.engine.step()
    assert (llm.engine.num_arriving, llm.engine.num_running) == (1, 0)
    llm.engine.run([other])
    assert len(other.events) == 6
    assert (llm.engine.num_arriving, len(waiting.events)) == (1, 0)
    gate.set()
    llm.engine.finish([waiting])
    assert list(waiting.events) == expected(0)[0]
    assert waiting.timings.loading > 0
    assert all(name.startswith("tiers") or name.endswith("writer") for name in disk.threads)


@pytest.mark.parametrize("fault", ["slow", "lost", "short", "error"])
def test_a_bad_store_costs_time_only(opener: Opener, fault: str) -> None:
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.flush()
    disk, gate = MemoryStore("disk", pages), threading.Event()
    llm = opener(Tiers(disk=disk))

    def trouble(what: str) -> None:
        if what == "read":
            if fault == "slow":
                gate.wait(PATIENCE_S)
            elif fault == "lost":
                for key in list(pages)[4:]:
                    pages.pop(key, None)
            elif fault == "error":
                raise OSError("broken")

    disk.before = trouble
    if fault == "short":
        disk.share = 0.5
    if fault == "slow":
        lower(llm).computing = lambda context, count: 0.001 * count
    where = found(llm, 0)
    gate.set()
    assert where == {"slow": {}, "error": {}, "lost": {"disk": 64}, "short": {"disk": 64}}[fault]


@pytest.mark.parametrize("again_at_once", [False, True])
def test_cancelled_while_loading(opener: Opener, again_at_once: bool) -> None:
    """Its pages come back; a request for the same prompt does not count on them."""
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.flush()
    disk, gate, inside = MemoryStore("disk", pages), threading.Event(), threading.Event()
    llm = opener(Tiers(disk=disk))
    disk.before = lambda what: what != "read" or inside.set() or gate.wait(PATIENCE_S)
    request = llm.engine.submit(llm.request(PROMPTS[0], PARAMS))
    llm.engine.step()
    assert inside.wait(PATIENCE_S)
    llm.engine.cancel(request)
    assert llm.pool.num_used > 0  # the frames that the thread reads into
    again = llm.engine.submit(llm.request(PROMPTS[0], PARAMS)) if again_at_once else None
    if again is not None:
        llm.engine.step()
    gate.set()
    if again is not None:
        llm.engine.finish([again])
        assert list(again.events) == expected(0)[0]
        return
    assert llm.tiers.flush()
    assert llm.pool.num_used == 0
    assert found(llm, 0) == {"disk": 128}


def test_the_gate(opener: Opener) -> None:
    """What is predicted to be slower than computing is not loaded, and counted."""
    disk = after_prompt(opener)
    llm = opener(Tiers(disk=disk))
    lower(llm).computing = lambda context, count: 0.0005 * count
    llm.tiers.speeds["disk"].bytes_per_s = PAGE_BYTES / 0.1
    llm.tiers.speeds["disk"].latency_s = 0
    lower(llm).worth_asking = lambda context, count: True
    assert found(llm, 0) == {}
    assert disk.counters.read().reasons["slow"] == 8


def test_other_weights_never_match(opener: Opener) -> None:
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.flush()
    other = opener(Tiers(disk=MemoryStore("disk", pages)), weights="int8")
    request = other.request(PROMPTS[0], PARAMS)
    other.engine.run([request])
    assert request.cached_tokens == 0


TECHNIQUES = {"plain": method("plain"), "repeat": method("repeat", sinks=3), "best-of": method("best-of", candidates=2)}


@pytest.mark.thinned
@pytest.mark.parametrize("technique", list(TECHNIQUES))
@pytest.mark.parametrize("host", [0, 5, 100])
def test_a_small_pool(opener: Opener, technique: str, host: int) -> None:
    """Everything is evicted, preempted and found again."""
    tiers = Tiers(host_bytes=host * PAGE_BYTES, disk=MemoryStore("disk"))
    llm = opener(tiers, pages=26)
    for _ in range(2):
        one, two = expected(0, TECHNIQUES[technique]), expected(1, TECHNIQUES[technique])
        assert ask(llm, [0, 1, 0, 1], TECHNIQUES[technique]) == [one, two, one, two]
        assert llm.tiers.flush()


ASKED = st.tuples(st.sampled_from([0, 1]), st.sampled_from(list(TECHNIQUES)))


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(ASKED, min_size=1, max_size=5),
    chunk=st.sampled_from([7, 16, 50, 512]),
    pages=st.sampled_from([26, 40]),
    host=st.sampled_from([0, 7, 60]),
    stores=st.sampled_from(["", "disk", "remote", "disk remote"]),
    share=st.sampled_from([0.3, 1.0]),
    running=st.sampled_from([1, 256]),
)
def test_any_schedule(
    opener: Opener,
    asked: list[tuple[int, str]],
    chunk: int,
    pages: int,
    host: int,
    stores: str,
    share: float,
    running: int,
) -> None:
    """Tokens, log-probabilities, keys and values do not depend on tiers, nor on what they give."""
    made = {tier: MemoryStore(tier) for tier in stores.split()}
    for store in made.values():
        store.share = share
    tiers = Tiers(host * PAGE_BYTES, made.get("disk"), made.get("remote"))
    llm = opener(tiers, pages=pages)
    config = SchedulerConfig(max_step_tokens=chunk, max_running=running)
    for _ in range(2):
        requests = [llm.request(PROMPTS[prompt], PARAMS, TECHNIQUES[name]) for prompt, name in asked]
        assert answers(llm, requests, config, 1) == [expected(prompt, TECHNIQUES[name]) for prompt, name in asked]
        assert tiers.flush()
    opener.close()


def test_asyncio(opener: Opener) -> None:
    """The engine's thread sleeps until pages come, and is woken by them."""
    pages: Pages = {}
    found(opener(over("disk", pages)), 0)
    opener.opened[0].tiers.flush()
    llm = opener(over("disk", pages))

    async def ask_twice() -> list[list[int]]:
        async with AsyncLLM(llm) as other:
            both = await asyncio.gather(*(other.generate([PROMPTS[0]], PARAMS) for _ in range(2)))
            return [[token.id for token in one.tokens] for (one,) in both]

    ids = [token.id for token in expected(0)[0]]
    assert asyncio.run(ask_twice()) == [ids, ids]


def test_a_value_of_the_host_comes_back_beside_steps(opener: Opener) -> None:
    llm = opener(Tiers(), index="off")
    kv = llm.prefill(PROMPTS[0] * 2)
    tokens = [token.id for token in llm.decode(kv, PARAMS)]
    host = kv.to("host")
    del kv
    request = llm.engine.submit(llm.decode_request(host, PARAMS))
    llm.engine.step()
    assert llm.engine.num_arriving == 1
    llm.engine.finish([request])
    assert [token.id for token in request.events] == tokens


def test_a_preempted_answer_is_found_again(opener: Opener) -> None:
    """What was computed before a preemption is not computed again, prompts and answers."""
    llm = opener(Tiers(host_bytes=200 * PAGE_BYTES), pages=24)
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, temperature=0.7)
    prompts = [[100 + (i * k) % 71 for i in range(100)] for k in (3, 5, 11)]
    requests = [llm.request(prompt, params) for prompt in prompts]
    llm.engine.run(requests)
    assert llm.engine.preemptions > 0
    assert llm.tiers.host_counters.read().pages_out > 0
    for prompt, request in zip(prompts, requests, strict=True):
        (alone,) = plain().generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True, seed=3, temperature=0.7))
        assert [token.id for token in request.events] == [token.id for token in alone.tokens]
