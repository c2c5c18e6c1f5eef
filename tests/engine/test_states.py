"""Models with recurrent layers: no schedule, cut, fork, file or tier changes a bit."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.any_schedule import ENDS, INDEXES, METHODS, PROMPT, SAMPLING, AnySchedule, Asked, asked_lists
from tests.kv.test_stream import with_header
from tests.thinning import examples
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend, unsupported
from twostroke.errors import GeometryMismatch, InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

CHUNK = 64
FAMILIES = {name: AnySchedule(partial(write_model, name)) for name in ("qwen3_5", "lfm2", "granite4-hybrid")}


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> AnySchedule:
    """Gated DeltaNet; short convolutions; Mamba-2."""
    return FAMILIES[request.param]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    yield
    for one in FAMILIES.values():
        one.check_no_leak()


@settings(max_examples=examples(10), deadline=None)
@given(
    asked=asked_lists([1, 24, 62, 63, 64, 65, 90, 128, 150]),
    chunk=st.sampled_from([1, 7, 16, 50, 64, 512]),
    place=st.sampled_from(
        [("off", 120, 2), ("radix", 120, 2), ("radix", 1000, 1), ("radix", 112, 1), ("radix", 1000, 2)]
    ),
)
def test_any_schedule(family: AnySchedule, asked: list[Asked], chunk: int, place: tuple[str, int, int]) -> None:
    """Answers do not depend on the schedule: chunks, hits, preemptions, threads, guesses that are rolled back."""
    family.check(asked, chunk, place)


@settings(max_examples=examples(15), deadline=None)
@given(ends=ENDS, more=st.integers(0, 60), index=INDEXES)
def test_cuts_and_forks_have_the_bits_of_a_fresh_prefill(
    family: AnySchedule, ends: list[int], more: int, index: str
) -> None:
    """Cut back anywhere, again and again, and gone on from there: states that are gone are computed again."""
    family.check_cuts(ends, more, index, same_bits)


def same_bits(kv: KVCache, other: KVCache) -> bool:
    return kv.entries().tobytes() == other.entries().tobytes() and same_states(kv, other)


def same_states(kv: KVCache, other: KVCache) -> bool:
    mine, theirs = kv.states(), other.states()
    assert mine is not None
    assert theirs is not None
    assert len(mine) == 3
    return all(state.tobytes() == theirs[layer].tobytes() for layer, state in mine.items())


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 200])
def test_the_end_of_a_value_can_be_cut_without_computing(family: AnySchedule, length: int) -> None:
    """Rows since the last snapshot are there, and that of the last token's logits is never missing."""
    llm = family.model()
    kv, before = llm.prefill(PROMPT[:length]), llm.pool.recomputed_tokens
    assert kv[: length - 1].complete
    assert length <= CHUNK + 1 or not kv[: length - 1 - CHUNK].complete
    llm.prefill(PROMPT[length - 1 :], kv[: length - 1])
    assert llm.pool.recomputed_tokens == before


def test_a_conversation_computes_what_is_new(family: AnySchedule) -> None:
    """Each of ten turns finds all before it, except for the tokens since the last snapshot (llama.cpp#22384)."""
    llm = family.model("radix")
    assert llm.model.index is not None
    llm.model.index.clear()
    tokens: list[int] = []
    for turn in range(10):
        asked = [*tokens, *(5 + (turn + i) % 150 for i in range(70))]
        request = llm.request(asked, SAMPLING, METHODS["plain"])
        llm.engine.finish([llm.engine.submit(request)])
        assert len(asked) - request.cached_by_tier.total() <= 70 + 8 + CHUNK
        tokens = [*asked, *request.choices[0].output.ids]


def test_files_and_tiers_keep_states(family: AnySchedule, tmp_path: Path) -> None:
    llm = family.model()
    kv = llm.prefill(PROMPT)
    kv.save(tmp_path / "value")
    loaded = KVCache.load(tmp_path / "value", llm)
    host = kv.to("host")
    params = SamplingParams(max_tokens=80, ignore_eos=True, logprobs=1)
    expected = list(llm.decode(kv, params=params))
    for value in (loaded, host, host.to("pool"), kv[:30] + kv[30:]):
        assert value.nbytes == kv.nbytes
        assert value.entries().tobytes() == kv.entries().tobytes()
        assert same_states(value, kv)
        assert list(llm.decode(value, params=params)) == expected
    assert (loaded.num_pages, host.num_pages) == (kv.num_pages, kv.num_pages)


def test_the_state_stays_when_the_front_is_cut(family: AnySchedule) -> None:
    kv = family.model().prefill(PROMPT)
    for start in (1, 100, 127, 128, 150, 199):
        assert same_states(kv[start:], kv)
    assert same_states(kv[100:].resumed_at(1000), kv)
    joined = kv[:50] + kv[150:]
    assert same_states(joined, kv)
    found = [token.logprob for token in family.model().decode(joined, max_tokens=5, logprobs=0)]
    assert all(logprob is not None and np.isfinite(logprob) for logprob in found)


def test_the_reference_has_these_states(family: AnySchedule) -> None:
    native, reference = family.model().prefill(PROMPT), family.model(backend="reference").prefill(PROMPT)
    mine, theirs = native.states(), reference.states()
    assert mine is not None
    assert theirs is not None
    for layer, state in theirs.items():
        assert np.abs(mine[layer] - state).max() < 0.1 * np.abs(state).max()
    assert [one.at for one in native.entry_table.snapshots] == [one.at for one in reference.entry_table.snapshots]


def test_steps_of_all_shapes_are_timed(family: AnySchedule) -> None:
    """With an ITL objective the engine times steps over memory of its own, states included."""
    with LLM(family.directory(), backend="native", weights="int8", itl_ms=50.0) as llm:
        kv = llm.prefill(PROMPT)
        assert same_states(kv, family.model().prefill(PROMPT))


def test_ranks_have_the_same_states(family: AnySchedule, tmp_path: Path) -> None:
    """A value of one process goes on in two ranks, which save the same bytes."""
    alone = family.model()
    value = alone.prefill(PROMPT[:90])
    value.save(tmp_path / "alone.kv")
    with LLM(family.directory(), backend="native", weights="int8", threads=1, tp=2) as llm:
        there = KVCache.load(tmp_path / "alone.kv", llm)
        there.save(tmp_path / "again.kv")
        assert same_states(there, value)
        whole, longer = llm.prefill(PROMPT[90:], after=there), alone.prefill(PROMPT[90:], after=value)
        assert same_states(whole, longer)
        assert whole.entries().tobytes() == longer.entries().tobytes()
        assert same_states(llm.prefill(PROMPT), whole)  # a hit
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "alone.kv").read_bytes()


def test_ranks_that_share_nothing_are_refused(family: AnySchedule, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="leave out tp"):
        LLM(family.directory(), backend="reference", tp=2)
    with LLM(family.directory(), backend="native", threads=1) as llm:
        assert isinstance(llm.backend, NativeBackend)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert "leave out tp" in (unsupported(llm.config, {}, 16, tp=2) or "")


def test_rows_of_older_versions_are_of_another_geometry(tmp_path: Path) -> None:
    """Their headers do not say that keys lie beside what was written."""

    def older(header: Any) -> None:
        for _, state in header["geometry"]["states"]:
            del state["by_head"]

    llm, path = FAMILIES["qwen3_5"].model(), tmp_path / "value.kv"
    llm.prefill(PROMPT[:20]).save(path)
    path.write_bytes(with_header(path.read_bytes(), older))
    with pytest.raises(GeometryMismatch, match="states"):
        KVCache.load(path, llm)


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_states_of_every_variant(variant: str, tmp_path: Path) -> None:
    """Decode and prefill have the same bits, where a state's rows are wider than registers hold at once."""
    if reason := library.unavailable(variant):
        pytest.skip(reason)
    write_model("qwen3_5", tmp_path, linear_value_head_dim=160)
    with LLM(str(tmp_path), backend=f"native-{variant}", weights="int8", threads=1, kv_bytes=16 << 20) as llm:
        run = llm.decode(llm.prefill(PROMPT[:60]), max_tokens=9, ignore_eos=True)
        tokens = [token.id for token in run]
        assert same_states(run.kv, llm.prefill([*PROMPT[:60], *tokens][: len(run.kv)]))
