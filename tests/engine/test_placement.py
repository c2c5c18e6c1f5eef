"""Placement: which requests get pages or wait for them, and in which pool."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import no_page_may_be_lost
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine import shortages
from twostroke.engine.request import Request
from twostroke.engine.strokes import Await, Prefill, Program
from twostroke.errors import OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the tiny Llama's tokenizer and fewer layers: a draft with a separate pool."""
    return write_model("llama", tmp_path_factory.mktemp("smaller"), seed=1, num_hidden_layers=1)


def test_a_preempted_choice_comes_back_when_each_of_its_pools_has_room(tiny_llm: TinyLLM, smaller: Path) -> None:
    """Its pages in the draft's pool take no room in the model's pool, where another request continues."""
    page_bytes = tiny_llm().pool.page_bytes
    llm = tiny_llm(draft=str(smaller), kv_bytes=10 * page_bytes, prefix_index="off", max_step_tokens=17)
    draft = llm.engine.models["draft"].pool

    def program() -> Program:
        yield [Prefill([5] * 64), Prefill([5] * 48, model="draft")]

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = llm.engine.submit(llm.request([7] * 66, params))
    while not first.events:
        llm.engine.step()
    second = llm.engine.submit(Request(program, params, llm.tokenizer))
    choice = second.choices[0]
    while draft.num_used < 3:
        llm.engine.step()
    assert len(choice.lanes) == 2
    held = {llm.pool: llm.pool.num_used - 5, draft: draft.num_used}
    llm.engine.placement.preempt(choice)
    assert choice.reserved == {pool: pages + 1 for pool, pages in held.items()}
    assert max(choice.reserved.values()) <= llm.pool.num_free < sum(choice.reserved.values())
    llm.engine.step()
    assert len(choice.lanes) == 2, "it runs again, beside the first"
    llm.engine.finish([first, second])
    assert llm.engine.preemptions == 1


def test_lanes_that_share_pages_count_them_once(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off", max_step_tokens=8)
    kv = llm.prefill([5] * 64)

    def program() -> Program:
        yield [Prefill([9] * 40, kv), Prefill([8] * 40, kv)]

    request = llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer))
    for _ in range(3):
        llm.engine.step()
    used = llm.pool.num_used
    llm.engine.placement.preempt(request.choices[0])
    assert request.choices[0].reserved == {llm.pool: used + 1}
    llm.engine.finish([request])


def test_a_lost_page_is_found(tiny_llm: TinyLLM) -> None:
    """By the check that the fixture makes at the end of every test."""
    llm = tiny_llm()
    llm.prefill([5] * 64)
    pages = np.array(llm.pool.allocate(1))
    with pytest.raises(AssertionError, match="are miscounted"):
        no_page_may_be_lost([llm])
    llm.pool.release(pages)
    no_page_may_be_lost([llm])
    request = llm.engine.submit(llm.request([5], SamplingParams()))
    with pytest.raises(AssertionError, match="finish or cancel what the test began"):
        no_page_may_be_lost([llm])
    llm.engine.cancel(request)


def test_pages_that_another_thread_holds_for_a_moment(tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end no request that runs alone, and those for which there is room go on meanwhile."""
    monkeypatch.setattr(shortages, "HOLD_S", 60.0)
    llm = tiny_llm(prefix_index="off", kv_bytes=12 * tiny_llm().pool.page_bytes)
    few, many = llm.prefill([6] * 90).to("host"), llm.prefill([6] * 150).to("host")
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def after(kv: KVCache) -> Program:
        return (yield Prefill([5], kv)).tokens

    def moving() -> Program:
        yield Prefill([5])
        return few.to("pool").tokens

    for program, expected in [
        (lambda: after(few), [6] * 90 + [5]),
        (lambda: after(many), [6] * 150 + [5]),
        (moving, [6] * 90),
        (None, None),
    ]:
        held = np.array(llm.pool.allocate(8))
        asked = llm.request([5] * 70, params) if program is None else Request(program, params, llm.tokenizer)
        llm.engine.submit(asked)
        for _ in range(3):
            llm.engine.step()
            llm.tiers.flush()
        assert not asked.done
        other = llm.engine.submit(llm.request([5] * 20, params))
        llm.engine.finish([other])
        assert (len(other.events), asked.done) == (20, False)
        llm.pool.release(held)
        llm.engine.finish([asked])
        assert asked.result == expected or len(asked.events) == 20


def test_an_answer_waits_for_a_page_that_another_thread_holds(
    tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortages, "HOLD_S", 60.0)
    llm = tiny_llm(prefix_index="off")
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = [token.id for token in llm.stream([5] * 10, max_tokens=40, ignore_eos=True)]
    request = llm.engine.submit(llm.request([5] * 10, params))
    while not request.events:
        llm.engine.step()
    held = np.array(llm.pool.allocate(llm.pool.num_free))
    for _ in range(30):
        llm.engine.step()
    assert not request.done
    llm.pool.release(held)
    llm.engine.finish([request])
    assert [token.id for token in request.events] == expected


def test_a_program_starts_again_when_pages_in_quarantine_are_back_and_not_to_look(tiny_llm: TinyLLM) -> None:
    """A program may ask other processes for values each time."""
    llm = tiny_llm(prefix_index="off", kv_bytes=12 * tiny_llm().pool.page_bytes)
    starts: list[int] = []

    def program() -> Program:
        starts.append(1)
        return (yield Prefill([5] * 70)).tokens

    held = np.array(llm.pool.allocate(8))
    llm.pool.num_quarantined = 8
    request = llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer))
    for _ in range(20):
        llm.engine.step()
        time.sleep(shortages.RETRY_S)
    assert (len(starts), request.done) == (1, False)
    llm.pool.num_quarantined = 0
    llm.pool.release(held)
    llm.engine.finish([request])
    assert (len(starts), request.result) == (2, [5] * 70)


def test_two_programs_that_wait_for_quarantine_do_not_take_turns_in_starting(tiny_llm: TinyLLM) -> None:
    """Neither runs alone, so each would be preempted for the other."""
    llm = tiny_llm(prefix_index="off", kv_bytes=12 * tiny_llm().pool.page_bytes)
    starts: list[int] = []

    def program() -> Program:
        starts.append(1)
        yield Await(lambda: done)
        llm.pool.release(np.array(llm.pool.allocate(6)))  # as a receiver does in a program's name
        return (yield Prefill([5] * 70)).tokens

    done = Future[None]()
    done.set_result(None)
    held = np.array(llm.pool.allocate(8))
    llm.pool.num_quarantined = 8
    requests = [llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer)) for _ in range(2)]
    for _ in range(40):
        llm.engine.step()
        time.sleep(shortages.RETRY_S / 4)
    assert len(starts) <= 8  # what each is taken to need doubles, up to what is there
    llm.pool.num_quarantined = 0
    llm.pool.release(held)
    llm.engine.finish(requests)
    assert [request.result for request in requests] == [[5] * 70] * 2


def test_who_starts_again_leaves_room_for_an_older_choice_that_has_not_got_its_pages_yet(tiny_llm: TinyLLM) -> None:
    """Else it would take them, and be preempted for them, again and again."""
    llm = tiny_llm(prefix_index="off", kv_bytes=12 * tiny_llm().pool.page_bytes)
    starts, later = list[str](), Future[None]()

    def program(name: str) -> Program:
        starts.append(name)
        if name == "older":
            yield Await(lambda: later)
        return (yield Prefill([5] * 70)).tokens

    programs = [partial(program, name) for name in ("older", "younger")]
    requests = [llm.engine.submit(Request(one, SamplingParams(), llm.tokenizer)) for one in programs]
    for request, pages in zip(requests, (10, 5), strict=True):
        request.choices[0].reserved = {llm.pool: pages}  # as after a preemption
    for _ in range(5):
        llm.engine.step()
    assert starts == ["older"]
    later.set_result(None)
    llm.engine.finish(requests)
    assert starts == ["older", "younger"]
    assert [request.result for request in requests] == [[5] * 70] * 2


def test_a_prompt_without_room_behind_one_that_only_waits_does_not_start_again_and_again(tiny_llm: TinyLLM) -> None:
    """It is the youngest, so it is preempted for itself."""
    llm = tiny_llm(prefix_index="off", kv_bytes=12 * tiny_llm().pool.page_bytes)
    future, starts = Future[None](), list[int]()

    def waiting() -> Program:
        yield Await(lambda: future)

    def program() -> Program:
        starts.append(1)
        return (yield Prefill([5] * 70)).tokens

    held = np.array(llm.pool.allocate(8))
    older = llm.engine.submit(Request(waiting, SamplingParams(), llm.tokenizer))
    request = llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer))
    for _ in range(20):
        llm.engine.step()
    assert (len(starts), request.preemptions, request.done) == (1, 1, False)
    llm.pool.release(held)
    llm.engine.finish([request])
    assert (len(starts), request.result, older.done) == (2, [5] * 70, False)
    future.set_result(None)
    llm.engine.finish([older])


def test_what_others_do_not_give_back_ends_a_request(tiny_llm: TinyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortages, "HOLD_S", 0.2)
    llm = tiny_llm(kv_bytes=6 * tiny_llm().pool.page_bytes)
    held = llm.prefill([6] * 60)
    failing, host = llm.engine.submit(llm.request([5] * 60, SamplingParams())), held.to("host")
    with pytest.raises(OutOfPages, match="the prompt needs 4 more KV pages and 2 of 6 are free"):
        llm.engine.finish([failing])
    with pytest.raises(OutOfPages, match="4 more KV pages are needed"):
        llm.prefill([5], after=host.copy_to(tiny_llm().pool))
