"""A model with recurrent layers over tiers: its prompts are found behind a snapshot that is whole, or computed."""

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.any_schedule import METHODS, SAMPLING, AnySchedule
from tests.engine.tiered import lower, make_eager
from tests.kv.tiers.asking import Server, client
from tests.kv.tiers.memory_store import MemoryStore, Pages
from tests.patience import PATIENCE_S
from tests.tiny import write_model
from tests.watching import Answer, answers
from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.cluster.kv_sources import estimate_local
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.tiers.disk import DiskStore, verify
from twostroke.kv.tiers.names import PageName, snapshot_names
from twostroke.kv.tiers.tiers import Tiers

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PAGE, CHUNK = 16, 64
# The second prompt parts from the first one at position 128; the third one differs in its first token only.
FIRST = [3 + (7 * i + i * i // 5) % 180 for i in range(400)]
PROMPTS = [FIRST, FIRST[:128] + [5 + 3 * i % 170 for i in range(192)], [9, *FIRST[1:]], FIRST[:140] + [5] * 60]
ANY = AnySchedule(lambda directory: write_model("qwen3_5", directory))
OpenModel = Callable[..., LLM]


@pytest.fixture
def open_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenModel]:
    """A function that opens the model over tiers, or with options for them."""
    opened: list[LLM] = []

    def open_one(tiers: Tiers | None = None, pages: int = 1000, index: str = "radix", **options: Any) -> LLM:
        page_bytes = ANY.model().pool.page_bytes
        options = {"kv_bytes": pages * page_bytes, "threads": 1, "prefix_index": index, "weights": "int8"} | options
        with monkeypatch.context() as patch:
            if tiers is not None:
                patch.setattr(open_engine, "open_tiers", lambda *_: tiers)
            llm = LLM(ANY.directory(), backend="native", **options)
        make_eager(llm)
        opened.append(llm)
        return llm

    yield open_one
    for llm in opened:
        llm.close()


@functools.cache
def expected(prompt: int, length: int = 400, method: str = "plain") -> Answer:
    """What is computed in one piece, without an index."""
    llm = ANY.model()
    request = llm.request(PROMPTS[prompt][:length], SAMPLING, METHODS[method])
    return answers(llm, [request], SchedulerConfig(max_step_tokens=4096))[0]


def found(llm: LLM, prompt: int, length: int = 400, chunk: int = 512) -> dict[str, int]:
    """Answer a prompt rightly; where its tokens were found."""
    request = llm.request(PROMPTS[prompt][:length], SAMPLING, METHODS["plain"])
    assert answers(llm, [request], SchedulerConfig(max_step_tokens=chunk)) == [expected(prompt, length)]
    assert llm.tiers.flush()
    return dict(request.cached_by_tier)


def parts(llm: LLM, prompt: int, length: int) -> list[PageName]:
    """The names of the snapshot after some tokens of a prompt."""
    blocks = lower(llm).names(np.array(PROMPTS[prompt][:length], np.int32))
    return snapshot_names(blocks[-1], -(-llm.pool.snapshot_pages // len(llm.pool.geometry.kv_groups)))


def stored(llm: LLM, prompt: int) -> list[int]:
    """The boundaries of a prompt whose snapshots are in the nearest store."""
    store, space = llm.tiers.stores[0], lower(llm).namespace
    every = {at: parts(llm, prompt, at) for at in range(CHUNK, len(PROMPTS[prompt]) + 1, CHUNK)}
    return [at for at, names in every.items() if store.find(space, names) == len(names)]


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_restart(open_model: OpenModel, redis_server: Server, disk: Path, tier: str) -> None:
    """Another process finds what this one has written, with the same tokens, log-probabilities, entries and states."""
    place = {"kv_disk": disk} if tier == "disk" else {"kv_remote": redis_server().url}
    first = open_model(**place)
    assert [found(first, prompt) for prompt in range(3)] == [{}, {}, {}]
    counts = first.tiers.by_name[tier].counters.read()
    assert (counts.snapshots_out, counts.snapshots_in, counts.reasons) == (5, 0, {})
    assert stored(first, 0) == [128, 384]
    first.close()
    second = open_model(**place)
    estimate = estimate_local(second.model, PROMPTS[0], lambda context, count: 1.0 * count)
    assert dict(estimate.tokens) == {tier: 384, "computed": 16}
    assert [found(second, prompt) for prompt in range(3)] == [{tier: 384}, {tier: 256}, {tier: 384}]
    assert [found(second, prompt) for prompt in range(3)] == [{"pool": 384}, {"pool": 256}, {"pool": 384}]
    counts = second.tiers.by_name[tier].counters.read()
    assert (counts.snapshots_out, counts.snapshots_in, counts.reasons) == (0, 3, {})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda file: file.unlink(),
    "changed": lambda file: file.write_bytes(file.read_bytes()[:-100] + b"\1" * 100),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_snapshot_that_is_not_whole_is_a_miss(open_model: OpenModel, disk: Path, damage: str, which: int) -> None:
    """One of its pages is enough (LMCache#4701): it is computed, and written again."""
    first = open_model(kv_disk=disk)
    assert found(first, 0) == {}
    part = parts(first, 0, 384)[which]
    first.close()
    (file,) = disk.glob(f"pages/*/{part.key.hex()}")
    DAMAGES[damage](file)
    second = open_model(kv_disk=disk)
    assert found(second, 0) == {}
    assert second.pool.num_used == second.engine.cached_pages(second.pool)
    second.close()
    assert found(open_model(kv_disk=disk), 0) == {"disk": 384}


def test_the_last_whole_snapshot_behind_stored_blocks(open_model: OpenModel) -> None:
    pages: Pages = {}
    first = open_model(Tiers(disk=MemoryStore("disk", pages)))
    assert [found(first, 0, length) for length in (100, 250, 400)] == [{}, {"pool": 64}, {"pool": 192}]
    assert stored(first, 0) == [64, 192, 384]
    space = lower(first).namespace.digest
    blocks = [name.key for name in lower(first).names(np.array(PROMPTS[0], np.int32))]

    def found_without(*keys: bytes) -> dict[str, int]:
        left = {key: page for key, page in pages.items() if key not in [(space, one) for one in keys]}
        store = MemoryStore("disk", left)
        store.loses = True
        return found(open_model(Tiers(disk=store)), 0)

    assert found_without() == {"disk": 384}
    assert found_without(parts(first, 0, 384)[1].key) == {"disk": 192}
    assert found_without(blocks[23]) == {"disk": 192}
    assert found_without(parts(first, 0, 384)[1].key, parts(first, 0, 192)[0].key) == {"disk": 64}
    assert found_without(blocks[2]) == {}
    snapshots = [part.key for at in (64, 192, 384) for part in parts(first, 0, at)]
    assert found_without(*snapshots) == {}, "blocks alone"


def test_a_snapshot_in_another_tier_than_its_blocks(open_model: OpenModel) -> None:
    pages: Pages = {}
    first = open_model(Tiers(remote=MemoryStore("remote", pages)))
    found(first, 0, 200)
    found(first, 0)
    snapshot = {(lower(first).namespace.digest, part.key) for part in parts(first, 0, 384)}
    blocks = {key: page for key, page in pages.items() if key not in snapshot}
    tiers = Tiers(disk=MemoryStore("disk", blocks), remote=MemoryStore("remote", pages))
    assert found(open_model(tiers), 0) == {"disk": 384}
    assert [store.counters.read().snapshots_in for store in tiers.stores] == [0, 1]


def test_a_snapshot_in_a_server_that_is_not_whole_is_a_miss(open_model: OpenModel, redis_server: Server) -> None:
    server = redis_server()
    first = open_model(kv_remote=server.url)
    assert found(first, 0) == {}
    one, other = (f"*:page:*{part.key.hex()}*" for part in parts(first, 0, 384)[1:3])
    raw = client(server)
    (gone,), (changed,) = raw.scan_iter(one), raw.scan_iter(other)
    assert raw.delete(gone) == 1
    assert found(open_model(kv_remote=server.url), 0) == {}
    assert found(open_model(kv_remote=server.url), 0) == {"remote": 384}
    raw.setrange(changed, 300, b"changed")
    assert found(open_model(kv_remote=server.url), 0) == {}
    assert found(open_model(kv_remote=server.url), 0) == {"remote": 384}


@pytest.mark.parametrize("trouble", ["short", "lost", "late"])
def test_what_comes_in_part_is_computed(open_model: OpenModel, trouble: str) -> None:
    pages: Pages = {}
    found(open_model(Tiers(disk=MemoryStore("disk", pages))), 0)
    store = MemoryStore("disk", dict(pages))
    store.loses = True
    llm, gate, reads = open_model(Tiers(disk=store)), threading.Event(), list[str]()
    lost = {part.key for part in parts(llm, 0, 384)[1:]}

    def before(what: str) -> None:
        if what == "read":
            reads.append(what)
            for key in [key for key in store.pages if key[1] in lost and trouble == "lost"]:
                del store.pages[key]
            if trouble == "late" and len(reads) == 3:
                gate.wait(PATIENCE_S)

    store.before, store.share = before, 0.5 if trouble == "short" else 1.0
    lower(llm).group = 8
    if trouble == "late":
        lower(llm).computing = lambda context, count: 0.001 * count
    request = llm.request(PROMPTS[0], SAMPLING, METHODS["plain"])
    assert answers(llm, [request], SchedulerConfig()) == [expected(0)]
    gate.set()
    assert llm.tiers.flush()
    assert (request.cached_tokens, store.counters.read().snapshots_in) == (0, 0)
    assert len(reads) > (trouble != "short")
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)


@pytest.mark.parametrize("seconds", [0.002, 0.005, 0.02])
def test_snapshots_are_written_where_they_spare_enough(open_model: OpenModel, seconds: float) -> None:
    """One for each second of computing, and that of a prompt that comes again."""
    llm = open_model(Tiers(disk=MemoryStore("disk"), remote=MemoryStore("remote")))
    lower(llm).computing = lambda context, count: seconds * count
    for length in (100, 150, 200, 300, 330, 400):
        found(llm, 0, length)
    ends = {0.002: [], 0.005: [256], 0.02: [64, 128, 192, 256, 320, 384]}[seconds]
    assert stored(llm, 0) == ends
    assert found(llm, 0) == {"pool": 384}
    assert stored(llm, 0) == sorted({*ends, 384})
    disk, remote = llm.tiers.stores
    assert disk.counters.read().snapshots_out == remote.counters.read().snapshots_out == len({*ends, 384})
    assert ("second_touch" in disk.counters.read().reasons) == (seconds < 0.02)


def test_a_snapshot_that_spares_less_than_it_takes_is_not_written(open_model: OpenModel) -> None:
    llm = open_model(Tiers(remote=MemoryStore("remote")))
    speed = llm.tiers.speeds["remote"]
    lower(llm).computing = lambda context, count: 0.001 * count
    speed.latency_s, speed.bytes_per_s = 0.1, 1e12
    found(llm, 0, 100)
    assert stored(llm, 0) == []
    assert (found(llm, 0), stored(llm, 0)) == ({"pool": 64}, [])
    assert (found(llm, 0), stored(llm, 0)) == ({"pool": 384}, [384])
    assert llm.tiers.stores[0].counters.read().reasons == {
        "near": len(parts(llm, 0, 64)),
        "second_touch": len(parts(llm, 0, 384)),
    }


@pytest.mark.parametrize("chunk", [50, 64, 512])
def test_prompts_that_part(open_model: OpenModel, chunk: int) -> None:
    """The second prompt of a beginning leaves a snapshot there: the third one finds it, also after a restart."""
    pages: Pages = {}
    first = open_model(Tiers(disk=MemoryStore("disk", pages)))
    lower(first).computing = lambda context, count: 0.001 * count  # less than a second: what comes once stays away
    assert (found(first, 0), stored(first, 0)) == ({}, [])
    assert (found(first, 1, chunk=chunk), stored(first, 1)) == ({}, [128])
    assert (found(first, 3), stored(first, 3)) == ({"pool": 128}, [128])
    assert found(open_model(Tiers(disk=MemoryStore("disk", pages))), 3) == {"disk": 128}
    assert first.pool.num_used == first.engine.cached_pages(first.pool)


def test_a_pool_without_room_for_a_third_snapshot(open_model: OpenModel) -> None:
    """The one where prompts part is given up before anything else."""
    geometry = ANY.model().pool.geometry
    least, room = geometry.num_pages(320 + 8, PAGE), geometry.answer_pages(320 + 8, PAGE)
    for pages in (least, least + 5, least + 2 * ANY.model().pool.snapshot_pages):
        llm = open_model(Tiers(), pages=room)
        llm.pool.allocate(held := room - pages)
        found(llm, 0, 200)
        found(llm, 1)
        assert (llm.engine.preemptions, llm.pool.num_used) == (0, llm.engine.cached_pages(llm.pool) + held)


def test_routers_are_told_of_blocks_and_checks_see_all(open_model: OpenModel, disk: Path) -> None:
    llm = open_model(kv_disk=disk)
    found(llm, 0)
    store = llm.tiers.disk
    assert isinstance(store, DiskStore)
    came, _ = store.watch(lower(llm).namespace).changes()
    assert len(came) == 400 // PAGE
    (usage,) = verify(disk)
    assert (usage.pages, usage.damaged, usage.unchecked) == (400 // PAGE + len(parts(llm, 0, 384)), 0, 0)


def test_the_host_keeps_snapshots(open_model: OpenModel) -> None:
    """What a full pool evicts comes back from ordinary memory, states and all (sglang#39830)."""
    geometry = ANY.model().pool.geometry
    llm = open_model(Tiers(host_bytes=1 << 30), pages=(room := geometry.answer_pages(420, PAGE)))
    llm.pool.allocate(room - geometry.num_pages(420, PAGE, 400))
    found(llm, 0)
    for _ in range(2):
        found(llm, 2)
        assert llm.pool.num_copies
        where = found(llm, 0)
        assert (sum(where.values()), where["host"] > 0) == (384, True)


ASKED = st.tuples(
    st.sampled_from([0, 1, 2, 3]), st.sampled_from([90, 130, 192, 248, 400]), st.sampled_from(["plain", "repeat"])
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=5),
    chunk=st.sampled_from([7, 50, 64, 512]),
    pages=st.sampled_from([200, 1000]),
    host=st.sampled_from([0, 30, 400]),
    stores=st.sampled_from(["", "disk", "remote", "disk remote"]),
    share=st.sampled_from([0.3, 1.0]),
)
def test_any_schedule(
    open_model: OpenModel,
    asked: list[tuple[int, int, str]],
    chunk: int,
    pages: int,
    host: int,
    stores: str,
    share: float,
) -> None:
    """Tokens, log-probabilities, entries and states do not depend on tiers, nor on what they give."""
    made = {tier: MemoryStore(tier) for tier in stores.split()}
    for store in made.values():
        store.share = share
    tiers = Tiers(host * ANY.model().pool.page_bytes, made.get("disk"), made.get("remote"))
    llm = open_model(tiers, pages)
    for _ in range(2):
        requests = [llm.request(PROMPTS[one][:length], SAMPLING, METHODS[name]) for one, length, name in asked]
        right = [expected(*one) for one in asked]
        assert answers(llm, requests, SchedulerConfig(max_step_tokens=chunk), 1) == right
        assert tiers.flush()
    assert llm.model.index is not None
    llm.model.index.clear()
    assert (llm.pool.num_used, llm.pool.num_copies) == (0, 0)
