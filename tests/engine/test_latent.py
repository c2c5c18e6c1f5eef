"""Latent entries (MLA): stored once, with the same bits under every schedule, and values of them as of any others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.any_schedule import ENDS, INDEXES, PROMPT, AnySchedule, asked_lists
from tests.tiny import LATENT, write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest, KVError
from twostroke.kv.cache import KVCache
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams

needs_native = pytest.mark.skipif(library.unavailable() is not None, reason=str(library.unavailable()))
ANY = {family: AnySchedule(lambda room, family=family: write_model(family, room)) for family in LATENT}
MODEL = ANY["deepseek_v2"]
LAYERS, ENTRY = 3, 64 + 64  # numbers of a latent and of the rotated part
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True, scope="module")
def nothing_leaks() -> Iterator[None]:
    yield
    if library.unavailable() is None:
        for one in ANY.values():
            one.check_no_leak()


@needs_native
@pytest.mark.parametrize("family", ANY)
@settings(max_examples=8, deadline=None)
@given(
    asked=asked_lists([1, 24, 64, 150]),
    chunk=st.sampled_from([1, 7, 16, 512]),
    place=st.sampled_from([("off", 40, 2), ("radix", 40, 2), ("radix", 1000, 1), ("radix", 40, 1)]),
)
def test_any_schedule(family: str, asked: list[tuple[int, str]], chunk: int, place: tuple[str, int, int]) -> None:
    """Alone, in chunks, batched, behind a hit, and preempted where pages are few."""
    ANY[family].check(asked, chunk, place)


@needs_native
@settings(max_examples=5, deadline=None)
@given(ends=ENDS, more=st.integers(0, 60), index=INDEXES)
def test_cuts_and_forks_have_the_bits_of_a_fresh_prefill(ends: list[int], more: int, index: str) -> None:
    MODEL.check_cuts(ends, more, index, lambda kv, other: kv.entries().tobytes() == other.entries().tobytes())


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "reference"])
def test_an_entry_is_stored_once(backend: str) -> None:
    llm = MODEL.model(backend=backend)
    kv, size = llm.prefill(PROMPT), 2 if backend == "native" else 4
    assert llm.pool.entry_bytes == LAYERS * ENTRY * size
    assert kv.nbytes == len(PROMPT) * LAYERS * ENTRY * size
    whole = kv.entries()
    assert whole.shape == (LAYERS, 2, len(PROMPT), 1, ENTRY)
    assert whole[:, 0].tobytes() == whole[:, 1].tobytes() == np.stack([kv.keys(i) for i in range(LAYERS)]).tobytes()


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "reference"])
def test_values_are_cut_saved_and_moved(backend: str, tmp_path: Path) -> None:
    llm = MODEL.model(backend=backend)
    kv = llm.prefill(PROMPT)
    kv.save(tmp_path / "value")
    expected = [one.id for one in llm.decode(kv, params=PARAMS)]
    loaded, every = KVCache.load(tmp_path / "value", llm), np.tile(np.arange(len(kv)), (LAYERS, 1, 1))
    for value in (loaded, kv.to("host"), kv[:30] + kv[30:], kv.gather(every)):
        assert value.entries().tobytes() == kv.entries().tobytes()
        assert [one.id for one in llm.decode(value, params=PARAMS)] == expected


def test_the_rotated_part_alone_moves() -> None:
    llm = MODEL.model(backend="reference")
    kv = llm.prefill(PROMPT[:20])
    for layer in range(LAYERS):
        before, after = (one.keys(layer)[:, 0].reshape(-1, 2, ENTRY // 2) for one in (kv, kv.at(300)))
        assert before[..., 32:].tobytes() == after[..., 32:].tobytes()
        assert (before[..., :32] != after[..., :32]).mean() > 0.9


def test_what_cannot_be_done_is_one_line() -> None:
    llm = MODEL.model(backend="reference")
    kv = llm.prefill(PROMPT[:20])
    keys, values = kv.entries().transpose(1, 0, 3, 2, 4)
    with pytest.raises(KVError, match="K and V of latent attention are one vector for all heads"):
        KVCache.of_entries(llm, keys, values, np.arange(20), kv.tokens)
    for technique in (method("d2o"), method("attention-matching"), method("compose", then="d2o")):
        with pytest.raises(InvalidRequest, match=rf"method {technique.name} cannot run .* are one vector"):
            llm.request(PROMPT[:20], SamplingParams(), technique)
    refused: list[dict[str, Any]] = [{"kv_dtype": "int8"}, {"tp": 2}]
    for options in refused:
        for backend in ("reference", *(["native"] if library.unavailable() is None else [])):
            with pytest.raises(InvalidRequest, match=r"leave out (kv_dtype|tp)"):
                LLM(MODEL.directory(), backend=backend, **options)
