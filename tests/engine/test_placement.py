"""Placement: which requests get pages or wait for them, and in which pool."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import no_page_may_be_lost
from tests.tiny import write_model
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.llm import LLM
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
    llm.engine._placement._preempt(choice)
    assert choice.needs == {pool: pages + 1 for pool, pages in held.items()}
    assert max(choice.needs.values()) <= llm.pool.num_free < sum(choice.needs.values())
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
    llm.engine._placement._preempt(request.choices[0])
    assert request.choices[0].needs == {llm.pool: used + 1}
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
