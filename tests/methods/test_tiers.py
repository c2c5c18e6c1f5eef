"""Every technique with tiers and a pool so small that everything leaves it: the same bits as without tiers."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.tiers.memory_store import MemoryStore
from tests.methods.test_schedules import TECHNIQUES, measure_heads, prompt
from tests.methods.watching import needs_native
from tests.thinning import examples
from tests.watching import Answer, answers
from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.tiers.tiers import Tiers
from twostroke.methods import Method
from twostroke.sampling.params import SamplingParams

PAGE_BYTES = 3 * 2 * 2 * 64 * 2 * 16
PLACES = [  # index, pages in the pool, pages in the host, stores, share of the pages asked for that reads give
    ("radix", 24, 0, "disk", 1.0),
    ("radix", 24, 5, "disk", 1.0),
    ("radix", 24, 9, "remote", 0.5),
    ("radix", 24, 0, "disk remote", 0.7),
    ("radix", 30, 200, "", 1.0),
    ("radix", 26, 60, "disk remote", 1.0),
]
Asked = tuple[int, Method, float, int | None]  # a prompt's length, a technique, temperature, log-probabilities


@pytest.fixture(scope="module")
def models(native_directory: Path) -> Iterator[Callable[[int | None], LLM]]:
    """The model in a place; None: without tiers."""
    options: dict[str, Any] = {"backend": "native", "weights": "int8", "student": "int2", "draft": "int4", "threads": 1}

    @functools.cache
    def opened(place: int | None) -> LLM:
        if place is None:
            return LLM(str(native_directory), prefix_index="off", kv_bytes=256 * PAGE_BYTES, **options)
        index, pages, host, names, share = PLACES[place]
        stores = {name: MemoryStore(name) for name in names.split()}
        for store in stores.values():
            store.share = share
        tiers = Tiers(host * PAGE_BYTES, stores.get("disk"), stores.get("remote"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(open_engine, "open_tiers", lambda *_: tiers)
            llm = LLM(str(native_directory), prefix_index=index, kv_bytes=pages * PAGE_BYTES, **options)
        for model in llm.engine.models.values():
            if model.backing_stores is not None:  # loading always seems quicker, and pages are written at once
                model.backing_stores.computing = lambda context, count: 1.0 * count
        return llm

    yield opened
    for place in range(len(PLACES)):
        opened(place).close()


@pytest.fixture(scope="module")
def alone(models: Callable[[int | None], LLM]) -> Callable[[Asked], Answer]:
    """The answer to a prompt alone, in one chunk and without tiers."""
    measure_heads(models(None))

    @functools.cache
    def answer(asked: Asked) -> Answer:
        llm = models(None)
        return answers(llm, requests(llm, [asked]), SchedulerConfig(max_step_tokens=4096))[0]

    return answer


def requests(llm: LLM, asked: list[Asked]) -> list[Request]:
    made: list[Request] = []
    for length, technique, temperature, logprobs in asked:
        params = SamplingParams(20, temperature=temperature, seed=7, ignore_eos=True, logprobs=logprobs)
        made.append(llm.request(prompt(llm, length, technique), params, technique))
    return made


ASKED = st.tuples(
    st.sampled_from([1, 16, 17, 40, 70]),
    st.sampled_from(TECHNIQUES),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, 2]),
)


def check(asked: list[Asked], chunk: int, running: int, steps: int, llm: LLM, expected: list[Answer]) -> None:
    config = SchedulerConfig(max_step_tokens=chunk, max_running=running)
    assert answers(llm, requests(llm, asked), config, steps) == expected
    assert llm.tiers.flush()
    for pool in {model.pool for model in llm.engine.models.values()}:
        assert pool.num_used == llm.engine.cached_pages(pool)


@needs_native
@settings(max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(ASKED, min_size=1, max_size=5),
    chunk=st.sampled_from([7, 16, 50, 512]),
    running=st.sampled_from([1, 256]),
    steps=st.integers(0, 3),
    place=st.sampled_from(range(len(PLACES))),
)
def test_any_schedule(
    asked: list[Asked],
    chunk: int,
    running: int,
    steps: int,
    place: int,
    models: Callable[[int | None], LLM],
    alone: Callable[[Asked], Answer],
) -> None:
    """Any mix of prompts and techniques over any tiers; the models, and what is in their stores, are kept."""
    check(asked, chunk, running, steps, models(place), [alone(one) for one in asked])


@needs_native
@pytest.mark.parametrize("place", range(len(PLACES)))
def test_every_technique(place: int, models: Callable[[int | None], LLM], alone: Callable[[Asked], Answer]) -> None:
    """Each technique twice beside two others, the second time with all that is in stores, and nothing else."""
    llm = models(place)
    mine: list[Asked] = [
        (40 + 30 * (i % 2), technique, 0.8 * (i % 3 > 0), None) for i, technique in enumerate(TECHNIQUES)
    ]
    for _ in range(2):
        for first in range(place % 3, len(mine), 3):
            asked = mine[first : first + 3]
            check(asked, 50, 256, 1, llm, [alone(one) for one in asked])
        for model in llm.engine.models.values():
            assert model.index is not None
            model.index.clear()
    if llm.tiers.stores:
        assert sum(store.counters.read().pages_out for store in llm.tiers.stores) > 0
        assert sum(store.counters.read().pages_in for store in llm.tiers.stores) > 0
