"""A router that follows the events knows the pages that the index holds, at every moment."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from twostroke.api.llm import LLM
from twostroke.cluster.router_events import DISK, POOL, DiskEvents, IndexEvents
from twostroke.kv.cache import KVCache
from twostroke.kv.tiers.disk import DiskStore, clear
from twostroke.kv.tiers.tiers import Tiers

TinyLLM = Callable[..., LLM]


class Router:
    """The blocks of one worker, as a router keeps them: in each tier, the tokens from the first on, by hash."""

    def __init__(self) -> None:
        self.tiers: dict[str, dict[bytes, tuple[int, ...]]] = {POOL: {}, DISK: {}}
        self.gone = 0

    def stored(self, tier: str, tokens: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None:
        known, size = self.tiers[tier], len(tokens) // len(hashes)
        before = () if parent is None else known[parent]
        for i, hash in enumerate(hashes):
            assert len(hash) == 8
            assert hash not in known, "told twice"
            before += tuple(tokens[i * size : (i + 1) * size])
            known[hash] = before

    def removed(self, tier: str, hashes: Sequence[bytes]) -> None:
        self.gone += len(hashes)
        for hash in hashes:
            del self.tiers[tier][hash]

    @property
    def known(self) -> dict[bytes, tuple[int, ...]]:
        return self.tiers[POOL]

    @property
    def on_disk(self) -> set[tuple[int, ...]]:
        return set(self.tiers[DISK].values())


def agree(router: Router, llm: LLM) -> None:
    index = llm.model.index
    assert index is not None
    assert len(router.known) == index.num_pages
    for tokens in router.known.values():
        assert len(index.extend_match(KVCache.empty(llm.pool), np.array(tokens, np.int32))) == len(tokens)


@pytest.mark.parametrize("host", [None, 1 << 16])
def test_the_router_knows_what_the_index_holds(host: int | None, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(kv_bytes=40 * 16 * 768, kv_host=host)
    router = Router()
    assert llm.model.index is not None
    events = IndexEvents(llm.model.index, router)
    for turn in range(24):
        shared = [3 + turn % 3] * 40
        llm.generate([[*shared, *range(turn, turn + 50)]], max_tokens=30, ignore_eos=True)
        agree(router, llm)
    assert router.gone > 0
    events.close()
    known = dict(router.known)
    llm.generate([[9] * 64], max_tokens=2)
    assert router.known == known


@pytest.fixture
def open_on_disk(tiny_llm: TinyLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LLM]:
    """A function that opens a model above one directory, as a process does that is started again."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))

    def open_one() -> LLM:
        llm = tiny_llm(kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 20)
        tiers_of(llm).first_touch_s = 0.0  # pages go to the disk when they are first seen
        return llm

    return open_one


def tiers_of(llm: LLM) -> Tiers:
    assert llm.model.backing_stores is not None
    return llm.model.backing_stores.tiers


def following(llm: LLM, router: Router) -> DiskEvents:
    """It looks when it is told to."""
    lower = llm.model.backing_stores
    assert lower is not None
    store = lower.tiers.disk
    assert isinstance(store, DiskStore)
    return DiskEvents(store.watch(lower.namespace), router)


def on_the_disk(llm: LLM, prompts: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    """Those beginnings of prompts, in whole pages, of which the store says that it has them."""
    lower, size = llm.model.backing_stores, llm.pool.page_size
    assert lower is not None
    [store] = lower.tiers.stores
    found = set[tuple[int, ...]]()
    for prompt in prompts:
        count = store.find(lower.namespace, lower.names(np.array(prompt, np.int32)))
        found |= {tuple(prompt[: size * (i + 1)]) for i in range(count)}
    return found


def test_the_router_knows_what_is_on_disk_whoever_wrote_it(open_on_disk: Callable[[], LLM], tmp_path: Path) -> None:
    """Also where another process has filled the directory, which may be this worker's life before."""
    prompts = [[*[3 + i] * 40, *range(i, i + 60)] for i in range(12)]  # more than the directory may hold
    llm, router = open_on_disk(), Router()
    events = following(llm, router)
    for i, prompt in enumerate(prompts, 1):
        llm.generate([prompt], max_tokens=1)
        assert tiers_of(llm).flush()
        events.look()
        assert router.on_disk == on_the_disk(llm, prompts[:i])
    assert router.on_disk
    assert router.gone > 0, "the directory was never full"
    other, later = open_on_disk(), Router()
    events = following(other, later)
    events.look()
    assert later.on_disk == router.on_disk == on_the_disk(other, prompts)
    clear(tmp_path / "disk")
    events.look()
    assert later.on_disk == set()


def test_a_page_on_disk_is_told_only_if_it_can_be_found(open_on_disk: Callable[[], LLM], tmp_path: Path) -> None:
    """Not one whose beginning is gone, a file of another length, or a page under another's name."""
    llm = open_on_disk()
    llm.generate([list(range(100))], max_tokens=1)
    assert tiers_of(llm).flush()
    pages = (tmp_path / "disk" / "pages").glob("*/" + "?" * 64)
    files = sorted(pages, key=lambda file: -file.stat().st_mtime_ns)

    def told() -> int:
        router = Router()
        following(llm, router).look()
        return len(router.on_disk)

    assert told() == len(files) == 6
    away = files[2].rename(tmp_path / "away")
    assert told() == 2
    away.rename(files[2])
    assert told() == 6
    files[4].write_bytes(files[4].read_bytes() + b"x")
    assert told() == 4
    files[3].write_bytes(files[1].read_bytes())
    assert told() == 3
