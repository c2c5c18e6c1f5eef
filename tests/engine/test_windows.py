"""Windowed layers give pages back behind their window, and no schedule, cut or fork changes a bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.any_schedule import ENDS, INDEXES, PROMPT, AnySchedule, Asked, asked_lists
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.spans import NO_PAGE
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

WINDOW, PAGE = 24, 16


def write(directory: Path) -> Path:
    """A model of four groups of two layers: one without a window, and three with one; the last has one layer."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"]
    return write_model("gemma3", directory, head_dim=64, sliding_window=WINDOW, layer_types=kinds)


ANY = AnySchedule(write)
model = ANY.model


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    yield
    ANY.check_no_leak()


def test_the_groups_of_the_model() -> None:
    groups = model().pool.geometry.groups
    assert [(group.layers, group.window, group.depth) for group in groups] == [
        ((2, 6), None, 2),
        ((0,), WINDOW, 2),
        ((1, 3), WINDOW, 2),
        ((4, 5), WINDOW, 2),
    ]


@settings(max_examples=20, deadline=None)
@given(
    asked=asked_lists([1, 24, 25, 40, 90, 150]),
    chunk=st.sampled_from([1, 7, 16, 50, 512]),
    place=st.sampled_from([("off", 70, 2), ("radix", 70, 2), ("radix", 1000, 1), ("radix", 60, 1), ("radix", 1000, 2)]),
)
def test_any_schedule(asked: list[Asked], chunk: int, place: tuple[str, int, int]) -> None:
    """Answers and the entries that are held do not depend on the schedule: chunks, hits, preemptions, threads."""
    ANY.check(asked, chunk, place)


@pytest.mark.parametrize("chunk", [16, 100, 512])
def test_pages_go_back_behind_the_window(chunk: int) -> None:
    llm = model()
    llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
    kv = llm.prefill(PROMPT)
    held = (kv.table[:, 3:] != NO_PAGE).sum(0).tolist()
    assert held == [13, 2, 2, 2]  # 200 entries; of windowed layers those from position 176 on
    assert kv.nbytes == 2 * 2 * 64 * 2 * (2 * 200 + 5 * 24)
    assert kv.num_pages == llm.pool.num_used == sum(held)
    assert kv.num_pages <= llm.pool.geometry.num_pages(200, PAGE)
    entries = kv.entries().astype(np.float32)
    assert not np.isnan(entries[[2, 6]]).any()
    assert np.isnan(entries[0]).any((0, 2, 3)).tolist() == [True] * 176 + [False] * 24
    assert "13" not in repr(kv)


@settings(max_examples=25, deadline=None)
@given(ends=ENDS, more=st.integers(0, 60), index=INDEXES)
def test_cuts_and_forks_have_the_bits_of_a_fresh_prefill(ends: list[int], more: int, index: str) -> None:
    """Cut back anywhere, again and again, and gone on from there: what was given back is computed again."""
    ANY.check_cuts(ends, more, index, same_where_both_hold)


def same_where_both_hold(kv: KVCache, other: KVCache) -> bool:
    both = ~(np.isnan(kv.entries().astype(np.float32)) | np.isnan(other.entries().astype(np.float32)))
    return bool((kv.entries()[both] == other.entries()[both]).all())


@pytest.mark.parametrize("end", [60, 170, 176, 177, 183, 184, 191, 192, 198])
def test_a_cut_near_the_window_has_the_logits_of_a_fresh_prefill(end: int) -> None:
    """Where a page lacks a single entry that the next token attends to, and where it lacks none."""
    kv, fresh = model().prefill(PROMPT), model().prefill([*PROMPT[:end], 5, 6, 7])
    longer = model().prefill([5, 6, 7], kv[:end])
    assert longer.tail is not None
    assert fresh.tail is not None
    assert np.array_equal(longer.tail.logits, fresh.tail.logits)  # pyright: ignore[reportArgumentType]


def test_what_is_computed_again_is_counted() -> None:
    llm = model()
    kv, before = llm.prefill(PROMPT), llm.pool.recomputed_tokens
    assert not kv[:100].complete
    _ = llm.prefill([5], kv[:199])  # its window is there
    assert llm.pool.recomputed_tokens == before
    _ = llm.prefill([5], kv[:100])
    assert llm.pool.recomputed_tokens == before + 100


def test_what_cannot_be_computed_again_is_refused_before_work_starts() -> None:
    """A value that was joined from parts is not that of its tokens alone."""
    llm = model()
    kv = llm.prefill(PROMPT)
    joined = kv[:4] + kv[60:]
    assert joined.complete
    cut = joined[:60]
    assert not cut.complete
    with pytest.raises(InvalidRequest, match="hold the value before it is cut"):
        llm.prefill([5], cut)
    with pytest.raises(InvalidRequest, match="hold the value before it is cut"):
        list(llm.decode(cut))
    assert (llm.engine.report.prefill, llm.engine.report.decode) == (0, 0)


def test_a_hit_ends_where_the_window_is_there() -> None:
    """Prompts that part in the middle of one that is known find its beginning, as long as the index has its window."""
    llm = model("radix")
    llm.engine.config = SchedulerConfig(max_step_tokens=16)
    assert llm.model.index is not None
    llm.model.index.clear()
    kv = llm.prefill(PROMPT)
    del kv
    assert len(llm.model.index.match([*PROMPT[:96], 1, 2])) == 96
    llm.model.index.evict(3)  # the windowed pages that were not used for the longest time
    hit = llm.model.index.match([*PROMPT[:96], 1, 2])
    assert (len(hit), hit.complete, (hit.table[:, 3:] == NO_PAGE).sum(0).tolist()) == (96, True, [0, 4, 4, 4])
    del hit
    llm.model.index.evict(10_000)
    assert llm.model.index.num_pages == 0


def test_a_window_that_left_the_index_is_no_hit() -> None:
    """One of several pages of a block, or the oldest of a window, is not enough (LMCache#4701)."""
    llm = model("radix")
    llm.engine.config = SchedulerConfig(max_step_tokens=512)
    found = llm.model.index
    assert found is not None
    found.clear()
    llm.prefill(PROMPT)
    for _ in range(20):
        hit = found.match(PROMPT)
        expected = model().prefill(PROMPT[: len(hit)]) if len(hit) else hit
        held = hit.table[:, 3:] != NO_PAGE
        assert hit.complete
        assert held.all(0).tolist()[0]
        bits = ~np.isnan(hit.entries().astype(np.float32)) & ~np.isnan(expected.entries().astype(np.float32))
        assert (hit.entries()[bits] == expected.entries()[bits]).all()
        del hit, expected
        found.evict(2)


def test_files_and_tiers_keep_what_is_held(tmp_path: Path) -> None:
    llm = model()
    kv = llm.prefill(PROMPT)
    kv.save(tmp_path / "value")
    loaded = KVCache.load(tmp_path / "value", llm)
    host = kv.to("host")
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)
    expected = list(llm.decode(kv, params=params))
    for value in (loaded, host, host.to("pool"), kv[:30] + kv[30:]):
        assert (value.nbytes, value.num_pages) == (kv.nbytes, kv.num_pages)
        assert value.entries().tobytes() == kv.entries().tobytes()
        assert list(llm.decode(value, params=params)) == expected


def test_the_reference_gives_back_as_much() -> None:
    native, reference = model().prefill(PROMPT), model(backend="reference").prefill(PROMPT)
    assert (native.table[:, 3:] == NO_PAGE).tolist() == (reference.table[:, 3:] == NO_PAGE).tolist()
    found = list(model(backend="reference").decode(reference, max_tokens=6, ignore_eos=True))
    again = model(backend="reference").prefill(PROMPT[:50], reference[:90])
    assert again.complete
    assert len(found) == 6


def test_pages_that_came_back_from_the_host_count_as_cached(tmp_path: Path) -> None:
    """Also those that the prompt has left behind its window: nobody uses a page when nothing runs."""
    with LLM(str(write(tmp_path)), threads=1, kv_bytes=4 << 20, kv_host=4 << 20) as llm:
        index = llm.model.index
        assert index is not None
        llm.prefill(PROMPT[:64])
        index.evict(10_000)
        assert (llm.pool.num_used, index.num_pages > 0) == (0, True)
        llm.generate([PROMPT[:64] + [7, 9] * 50], max_tokens=2)
        assert llm.tiers.host_counters.read().pages_in
        assert 0 < llm.pool.num_used == llm.engine.cached_pages(llm.pool)
