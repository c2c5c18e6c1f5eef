"""What a watched engine records is what it did, and watching changes no answer."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from twostroke.api.llm import LLM
from twostroke.backends.interface import POSITION
from twostroke.engine.request import Request
from twostroke.methods import METHODS, Repeat
from twostroke.sampling.params import SamplingParams
from twostroke.server.page.snapshot import ARRIVING, FREE, HELD, INDEXED, OWNER, PREFIX, SHARED, EngineSnapshot
from twostroke.server.page.step_recorder import RING, StepRecord, StepRecorder

PROMPT = "the quick brown fox jumps over the lazy dog and then the cat "


def requests(llm: LLM, prompts: list[str], tokens: int = 12, **params: Any) -> list[Request]:
    chosen = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params)
    return [llm.request(prompt, chosen) for prompt in prompts]


def watched(llm: LLM, asked: list[Request]) -> tuple[list[StepRecord], EngineSnapshot | None]:
    llm.engine.observer = watch = StepRecorder()
    llm.engine.run(asked)
    return watch.take()


def test_records_are_what_happened(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm(max_step_tokens=24)
    asked = requests(llm, [PROMPT, PROMPT[::-1]])
    steps, _ = watched(llm, asked)
    assert [step.number for step in steps] == list(range(len(steps)))
    computed = sum(request.prompt_tokens - request.cached_tokens for request in asked)
    assert sum(step.prefill for step in steps) == computed
    assert sum(step.decode for step in steps) == 2 * 11, "the last token is not entered"
    assert all(step.prefill + step.decode <= 24 for step in steps)
    ttft = sorted(us for step in steps for us in step.ttft_us)
    itl = sorted(us for step in steps for us in step.itl_us)
    assert ttft == sorted(int((request.timings.ttft or 0) * 1e6) for request in asked)
    assert itl == sorted(int(gap * 1e6) for request in asked for gap in request.timings.itls)
    assert all(step.used + step.cached + step.free == llm.pool.num_pages for step in steps)
    assert (steps[-1].running, steps[-1].waiting, steps[-1].used) == (0, 0, 0)
    assert steps[0].waiting == 0
    assert max(step.running for step in steps) == 2
    times = [(step.at_us, step.took_us) for step in steps]
    assert all(at + took <= after for (at, took), (after, _) in pairwise(times))


def test_a_request_that_began_before_is_recorded_from_then_on(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    request = llm.engine.submit(requests(llm, [PROMPT])[0])
    while len(request.timings.tokens) < 4:
        llm.engine.step()
    llm.engine.observer = watch = StepRecorder()
    llm.engine.finish([request])
    steps, _ = watch.take()
    assert [us for step in steps for us in step.ttft_us] == []
    later = [int(gap * 1e6) for gap in request.timings.itls]
    assert [us for step in steps for us in step.itl_us] == later[-len(steps) + 1 :]


@pytest.mark.reference
def test_preemptions_and_evictions(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm(kv_bytes=260 << 10)
    steps, _ = watched(llm, requests(llm, [PROMPT, PROMPT[::-1], PROMPT[5:]], tokens=100))
    assert steps[-1].preemptions == llm.engine.preemptions > 0
    assert steps[-1].evicted == llm.engine.evicted_pages > 0
    assert [step.evicted for step in steps] == sorted(step.evicted for step in steps)


def test_a_picture(tiny_llm: Callable[..., LLM]) -> None:
    """Two choices of one prompt share its whole pages, and its index knows these; a value holds pages of its own."""
    llm = tiny_llm()
    llm.engine.observer = watch = StepRecorder()
    kv = llm.prefill("value " * 20)
    request = llm.engine.submit(requests(llm, [PROMPT], n=2)[0])
    request.name = "mine"
    while min(len(choice.output.ids) for choice in request.choices) < 8:
        llm.engine.step()
    watch.snapshot(llm.engine)
    _, picture = watch.take()
    assert picture is not None
    assert picture.owners == (("mine", request.arrival_order, 0), ("mine", request.arrival_order, 1))
    cells = picture.pools[0].cells(picture.lanes).astype(int)
    size, whole = llm.pool.page_size, request.prompt_tokens // llm.pool.page_size
    assert [lane.entries for lane in picture.lanes] == [len(lane.writer) for lane in llm.engine.lanes]
    assert np.count_nonzero(cells == SHARED | INDEXED) == whole
    for owner, lane in enumerate(picture.lanes):
        assert np.count_nonzero(cells & ~INDEXED == OWNER + owner) == -(-lane.entries // size) - whole
    assert np.count_nonzero(cells == PREFIX) == len(kv) // size, "what the index knows of the value"
    assert np.count_nonzero(cells == HELD) == (len(kv) % size > 0)
    assert np.count_nonzero(cells == FREE) == llm.pool.num_free
    assert not np.count_nonzero(cells == ARRIVING)
    llm.engine.finish([request])
    watch.snapshot(llm.engine)
    _, picture = watch.take()
    assert picture is not None
    assert picture.owners == picture.lanes == ()
    del kv


@pytest.mark.parametrize("name", sorted(METHODS.keys() & {"plain", "repeat", "drop", "best-of"}))
def test_watching_changes_no_answer(tiny_llm: Callable[..., LLM], name: str) -> None:
    llm = tiny_llm()
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3, temperature=1.0)
    technique = METHODS[name]()
    before = llm.request(PROMPT, params, technique)
    llm.engine.run([before])
    after = llm.request(PROMPT, params, technique)
    steps, picture = watched(llm, [after])
    assert steps
    assert picture is not None
    assert [token.id for token in after.events] == [token.id for token in before.events]


def test_the_positions_of_a_repeated_prompt(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    llm.engine.observer = watch = StepRecorder()
    request = llm.engine.submit(llm.request(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True), Repeat(sinks=0)))
    while len(request.timings.tokens) < 3:
        llm.engine.step()
    watch.snapshot(llm.engine)
    _, picture = watch.take()
    assert picture is not None
    assert picture.lanes[0].table[0, POSITION] == request.prompt_tokens
    llm.engine.finish([request])


@pytest.mark.reference
def test_a_ring_that_nobody_empties_is_bounded(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    llm.engine.observer = watch = StepRecorder()
    llm.engine.run(requests(llm, [PROMPT], tokens=3))
    for _ in range(RING):
        watch.record(llm.engine, (), 0.0)
    steps, _ = watch.take()
    assert len(steps) == RING
    assert steps[-1].number == RING + 2
