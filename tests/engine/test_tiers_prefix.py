"""Prompts find their pages in the host and in stores, with the same bits as without tiers."""

import faulthandler
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import no_page_may_be_lost
from tests.tiers.memory_store import MemoryStore, Pages
from tests.watching import Answer, answers
from twostroke import llm as llm_module
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.llm import LLM
from twostroke.methods import Method, method
from twostroke.sampling.params import SamplingParams
from twostroke.tiers.tiers import Tiers

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PAGE_BYTES = 30 * 2 * 3 * 64 * 2 * 16
PROMPTS = [[100 + (7 * i) % 89 for i in range(130)], [100 + (7 * i) % 89 for i in range(64)] + list(range(200, 260))]
PARAMS = SamplingParams(max_tokens=6, temperature=0.8, seed=7, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A test that hangs ends the run, and shows where every thread is."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class Opener:
    """Opens models over stores, and closes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[LLM] = []
        self._patch = monkeypatch

    def __call__(self, tiers: Tiers, pages: int = 256, index: str = "radix", eager: bool = True, **options: Any) -> LLM:
        """`eager`: loading always seems quicker than computing, and pages are written when they are first seen."""
        self._patch.setattr(llm_module, "open_tiers", lambda *_: tiers)
        llm = LLM(
            "smollm2-135m", backend="native", prefix_index=index, kv_bytes=pages * PAGE_BYTES, threads=1, **options
        )
        if eager:
            make_eager(llm)
        self.opened.append(llm)
        return llm


def make_eager(llm: LLM) -> None:
    for model in llm.engine.models.values():
        if model.lower is not None:
            model.lower.computing = lambda context, count: 1.0 * count


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener(monkeypatch)
    yield opener
    for llm in opener.opened:
        if "engine" in llm.__dict__:
            llm.tiers.settle(20.0)
            no_page_may_be_lost([llm])
            llm.close()


@functools.cache
def plain() -> LLM:
    return LLM("smollm2-135m", backend="native", prefix_index="off", kv_bytes=256 * PAGE_BYTES, threads=1)


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


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_restart(opener: Opener, index: str, tier: str) -> None:
    """Another process finds what this one has written, without a second touch where computing took long."""
    pages: Pages = {}
    first = opener(Tiers(**{tier: MemoryStore(tier, pages)}), index=index)
    assert found(first, 0) == {}
    assert first.tiers.settle()
    first.close()
    assert len(pages) == (130 + 6) // 16
    second = opener(Tiers(**{tier: MemoryStore(tier, pages)}), index=index)
    assert found(second, 0) == {tier: 128}
    assert found(second, 0) == {"pool": 128}
    assert found(second, 1) == {"pool": 64}
    assert second.engine.num_arriving == 0


def test_second_touch(opener: Opener) -> None:
    """A short prompt is written to the disk when it comes again, and to the remote tier at once."""
    disk, remote = MemoryStore("disk"), MemoryStore("remote")
    llm = opener(Tiers(disk=disk, remote=remote))
    llm.model.lower.computing = lambda context, count: 0.1
    found(llm, 0)
    assert llm.tiers.settle()
    assert (len(disk.pages), len(remote.pages)) == (0, 8)
    assert disk.traffic.read().reasons["second_touch"] > 0
    found(llm, 0)
    assert llm.tiers.settle()
    assert (len(disk.pages), len(remote.pages)) == (8, 8)


def test_the_nearest_tier_of_each_page(opener: Opener) -> None:
    pages: Pages = {}
    first = opener(Tiers(remote=MemoryStore("remote", pages)))
    found(first, 0)
    assert first.tiers.settle()
    order = list(pages)
    disk = MemoryStore("disk", {key: pages[key] for key in order[:3]})
    second = opener(Tiers(disk=disk, remote=MemoryStore("remote", pages)))
    assert found(second, 0) == {"disk": 48, "remote": 80}


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_host_keeps_what_the_pool_evicts(opener: Opener, index: str) -> None:
    llm = opener(Tiers(host_bytes=64 * PAGE_BYTES), pages=10, index=index)
    assert found(llm, 0) == {}
    assert found(llm, 1) == {"pool": 64} or llm.pool.num_copies
    assert llm.tiers.host_traffic.read().pages_out > 0
    again = found(llm, 0)
    assert sum(again.values()) == 128
    assert again["host"] > 0
    assert llm.pool.num_copies * PAGE_BYTES <= 64 * PAGE_BYTES


def test_the_host_has_a_budget(opener: Opener) -> None:
    llm = opener(Tiers(host_bytes=3 * PAGE_BYTES), pages=10)
    for prompt in (0, 1, 0, 1):
        found(llm, prompt)
        assert llm.pool.num_copies <= 3
        assert llm.model.index.host.used <= 3 * PAGE_BYTES


def test_identical_prompts_share_a_load(opener: Opener) -> None:
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.settle()
    disk = MemoryStore("disk", pages)
    llm = opener(Tiers(disk=disk))
    assert ask(llm, [0, 0, 0]) == [expected(0)] * 3
    assert disk.traffic.read().pages_in == 8


def test_steps_go_on_while_pages_come(opener: Opener) -> None:
    """A store that hangs delays its own prompt only; it does not count as running."""
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.settle()
    disk, gate = MemoryStore("disk", pages), threading.Event()
    llm = opener(Tiers(disk=disk))
    disk.before = lambda what: what != "read" or gate.wait(20)
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
    opener.opened[0].tiers.settle()
    disk, gate = MemoryStore("disk", pages), threading.Event()
    llm = opener(Tiers(disk=disk))

    def trouble(what: str) -> None:
        if what == "read":
            if fault == "slow":
                gate.wait(20)
            elif fault == "lost":
                for key in list(pages)[4:]:
                    pages.pop(key, None)
            elif fault == "error":
                raise OSError("broken")

    disk.before = trouble
    if fault == "short":
        disk.share = 0.5
    if fault == "slow":
        llm.model.lower.computing = lambda context, count: 0.001 * count
    where = found(llm, 0)
    gate.set()
    assert where == {"slow": {}, "error": {}, "lost": {"disk": 64}, "short": {"disk": 64}}[fault]


def test_cancelled_while_loading(opener: Opener) -> None:
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.settle()
    disk, gate, inside = MemoryStore("disk", pages), threading.Event(), threading.Event()
    llm = opener(Tiers(disk=disk))
    disk.before = lambda what: what != "read" or inside.set() or gate.wait(20)
    request = llm.engine.submit(llm.request(PROMPTS[0], PARAMS))
    llm.engine.step()
    assert inside.wait(20)
    llm.engine.cancel(request)
    assert llm.pool.num_used > 0  # the frames that the thread reads into
    gate.set()
    assert llm.tiers.settle()
    assert llm.pool.num_used == 0
    assert found(llm, 0) == {"disk": 128}


def test_the_gate(opener: Opener) -> None:
    """What is predicted to be slower than computing is not loaded, and counted."""
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.settle()
    disk = MemoryStore("disk", pages)
    llm = opener(Tiers(disk=disk))
    llm.model.lower.computing = lambda context, count: 0.0005 * count
    llm.tiers.links["disk"].bytes_per_s = PAGE_BYTES / 0.1
    llm.tiers.links["disk"].latency_s = 0
    llm.model.lower.worth_asking = lambda context, count: True
    assert found(llm, 0) == {}
    assert disk.traffic.read().reasons["slow"] == 8


def test_other_weights_never_match(opener: Opener) -> None:
    pages: Pages = {}
    found(opener(Tiers(disk=MemoryStore("disk", pages))), 0)
    opener.opened[0].tiers.settle()
    other = opener(Tiers(disk=MemoryStore("disk", pages)), weights="int8")
    request = other.request(PROMPTS[0], PARAMS)
    other.engine.run([request])
    assert request.cached_tokens == 0


TECHNIQUES = {"plain": method("plain"), "repeat": method("repeat", sinks=3), "best-of": method("best-of", candidates=2)}


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("technique", list(TECHNIQUES))
@pytest.mark.parametrize("host", [0, 5, 100])
def test_a_small_pool(opener: Opener, index: str, technique: str, host: int) -> None:
    """Everything is evicted, preempted and found again."""
    tiers = Tiers(host_bytes=host * PAGE_BYTES, disk=MemoryStore("disk"))
    llm = opener(tiers, pages=26, index=index)
    for _ in range(2):
        one, two = expected(0, TECHNIQUES[technique]), expected(1, TECHNIQUES[technique])
        assert ask(llm, [0, 1, 0, 1], TECHNIQUES[technique]) == [one, two, one, two]
        assert llm.tiers.settle()
