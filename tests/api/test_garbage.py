"""Values in garbage reference cycles, by each API: a pool is not full while Python could free some of it."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import serving
from twostroke import LLM, AsyncLLM, Conversation, KVCache
from twostroke.errors import OutOfPages

TinyLLM = Callable[..., LLM]
PROMPTS = 40  # each takes two pages or more of a pool of twelve


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def llm(tiny_llm: TinyLLM) -> LLM:
    llm = tiny_llm("llama", kv_bytes=12 * 16 * 3 * 2 * 2 * 16 * 4)
    assert llm.pool.num_pages == 12
    return llm


class Session:
    def __init__(self, *held: Any) -> None:
        self.held, self.me = held, self


def prompt(number: int) -> list[int]:
    return [2 + number, *range(60, 85)]


def test_prefilled_values(llm: LLM) -> None:
    for number in range(PROMPTS):
        Session(llm.prefill(prompt(number)))


def test_values_of_frames_of_a_traceback(llm: LLM) -> None:
    def fails(kv: KVCache) -> None:
        kept: list[Exception] = []
        try:
            raise LookupError
        except LookupError as error:
            kept.append(error)

    for number in range(PROMPTS):
        fails(llm.prefill(prompt(number)))


def test_values_that_decodes_continued(llm: LLM) -> None:
    for number in range(PROMPTS):
        decoding = llm.decode(llm.prefill(prompt(number)), max_tokens=3, ignore_eos=True)
        assert len(list(decoding)) == 3
        Session(decoding)


def test_conversations(llm: LLM) -> None:
    for number in range(PROMPTS):
        conversation = Conversation(llm, max_tokens=2)
        for _ in conversation.say("abc " * 4 + str(number)):
            pass
        Session(conversation)


def test_contexts_of_a_server_in_the_same_process(tiny_directory: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_directory("qwen3")), kv_bytes=1 << 20, threads=1, backend="reference")
    with serving(llm) as running, running.http() as http:
        Session(*(llm.prefill([number] * 16) for number in range(llm.pool.num_pages - 1)))
        for number in range(4):
            made = http.post("/v1/contexts", json={"prompt": [number] * 33})
            assert made.status_code == 200, made.text


def test_values_of_the_asynchronous_api(llm: LLM) -> None:
    async def prefills() -> None:
        async with AsyncLLM(llm) as model:
            for number in range(PROMPTS):
                Session(await model.prefill(prompt(number)), asyncio.current_task())

    asyncio.run(prefills())


def test_nobody_is_preempted_for_garbage(llm: LLM) -> None:
    """Two answers run while cycles hold most of the pool: both go on."""
    for number in range(4):
        Session(llm.prefill(prompt(number)))
    assert llm.pool.num_used >= 8
    llm.generate([[50], [51]], max_tokens=40, ignore_eos=True)
    assert llm.engine.preemptions == 0


def test_what_is_dropped_after_an_error_is_found(llm: LLM) -> None:
    kept = [Session(llm.prefill(prompt(number))) for number in range(6)]
    with pytest.raises(OutOfPages):
        llm.prefill(prompt(7))
    kept.clear()
    assert len(llm.prefill(prompt(99))) == len(prompt(99))
