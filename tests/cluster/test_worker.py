"""What a worker does with a request, with Dynamo's package and without its processes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.messages import message
from tests.server.long_answers import LONG, unhurried
from twostroke.api.llm import LLM

pytest.importorskip("dynamo.common.backend", reason="needs NVIDIA Dynamo: make test-cluster")

from dynamo.llm.exceptions import Disconnected, EngineShutdown, InvalidArgument  # pyright: ignore[reportMissingImports]
from dynamo.runtime import Context  # pyright: ignore[reportMissingImports]

from twostroke.cluster.migration import BROKEN
from twostroke.cluster.worker import DynamoWorker, WorkerAddress

TinyLLM = Callable[..., LLM]
PROMPT = [7, 9, 11] * 9
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "presence_penalty": 1.5, "ignore_eos": True}


def running(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[TinyLLM, Path, pytest.MonkeyPatch], None]:
    """A test that is given a worker which runs, and its model."""

    @asynccontextmanager
    async def opened(llm: LLM, folder: Path) -> AsyncGenerator[DynamoWorker]:
        worker = DynamoWorker(llm, "both", WorkerAddress(cards=folder))
        await worker.start(1)
        try:
            yield worker
        finally:
            await worker.cleanup()

    def run(tiny_llm: TinyLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))

        async def inside() -> None:
            llm = tiny_llm("qwen3", weights="bf16")
            async with opened(llm, tmp_path) as worker:
                await test(worker, llm)

        asyncio.run(inside())

    run.__doc__, run.__name__ = test.__doc__, test.__name__
    return run


async def chunks(worker: DynamoWorker, asked: dict[str, Any], id: str = "one") -> list[dict[str, Any]]:
    return [chunk async for chunk in worker.generate(asked, Context(id))]


def ids(chunks: Sequence[dict[str, Any]]) -> list[int]:
    return [id for chunk in chunks for id in chunk["token_ids"]]


@running
async def test_the_tokens_are_those_of_the_model(worker: DynamoWorker, llm: LLM) -> None:
    [expected] = llm.generate([PROMPT], max_tokens=20, logprobs=2, **SAMPLED)
    made = await chunks(worker, message(PROMPT, max_tokens=20, logprobs=2, **SAMPLED))
    assert ids(made) == [token.id for token in expected.tokens]
    assert "".join(chunk["text"] for chunk in made) == expected.text
    assert [chunk["log_probs"] for chunk in made] == [[token.logprob] for token in expected.tokens]
    assert [chunk.get("finish_reason") for chunk in made] == [None] * 19 + ["length"]
    assert made[-1]["completion_usage"]["total_tokens"] == len(PROMPT) + 20


@running
async def test_a_retry_continues(worker: DynamoWorker, llm: LLM) -> None:
    whole = await chunks(worker, message(PROMPT, max_tokens=20, min_tokens=18, **SAMPLED))
    for cut in range(1, 20):
        known = ids(whole[:cut])
        retry = message([*PROMPT, *known], max_tokens=20 - cut, min_tokens=max(0, 18 - cut), **SAMPLED)
        rest = await chunks(worker, retry | {"migration_link": whole[cut - 1]["worker_trace_link"]})
        assert rest[:-1] == whole[cut:-1]
        assert rest[-1]["token_ids"] == whole[-1]["token_ids"]
        assert rest[-1]["completion_usage"]["completion_tokens"] == 20


@running
async def test_an_answer_of_another_identity_is_not_continued(worker: DynamoWorker, llm: LLM) -> None:
    whole = await chunks(worker, message(PROMPT, max_tokens=20, **SAMPLED))
    pointer = whole[4]["worker_trace_link"]
    for identity in ("0" * 8, "f" * 8):  # of an older version, and of other weights
        other = pointer | {"span_id": identity + pointer["span_id"][8:]}
        retry = message([*PROMPT, *ids(whole[:5])], max_tokens=15, **SAMPLED)
        with pytest.raises(Disconnected):
            await chunks(worker, retry | {"migration_link": other})


@running
async def test_a_retry_of_several_choices_continues_each(worker: DynamoWorker, llm: LLM) -> None:
    stated: dict[str, Any] = SAMPLED | {"ignore_eos": False, "stop": ["a", "e"]}
    annotations = ['twostroke:{"n": 3}']
    [expected] = llm.generate([PROMPT], max_tokens=20, n=3, **stated)
    whole = await chunks(worker, message(PROMPT, annotations, max_tokens=20, **stated))
    for choice, output in enumerate(expected.outputs):
        assert ids([chunk for chunk in whole if chunk["index"] == choice]) == [token.id for token in output.tokens]
    assert len({len(output.tokens) for output in expected.outputs}) > 1, "they end at different places"
    assert [chunk.get("finish_reason") for chunk in whole[:-1]] == [None] * (len(whole) - 1)
    for cut in range(1, len(whole)):
        known = ids(whole[:cut])
        retry = message([*PROMPT, *known], annotations, max_tokens=max(0, 20 - cut), **stated)
        rest = await chunks(worker, retry | {"migration_link": whole[cut - 1]["worker_trace_link"]})
        assert rest[:-1] == whole[cut:-1]
        assert rest[-1]["token_ids"] == whole[-1]["token_ids"]


@running
async def test_choices_that_have_no_room_cannot_be_continued(worker: DynamoWorker, llm: LLM) -> None:
    prompt = [7] * (llm.max_model_len - 4)
    made = await chunks(worker, message(prompt, ['twostroke:{"n": 2}'], **SAMPLED))
    broken = [chunk["worker_trace_link"] == BROKEN for chunk in made]
    assert broken == [False] * (len(made) - 1) + [True]
    retry = message([*prompt, *ids(made)], ['twostroke:{"n": 2}'], **SAMPLED)
    with pytest.raises(InvalidArgument):
        await chunks(worker, retry | {"migration_link": BROKEN})


@running
async def test_an_answer_that_is_whole_ends_at_once(worker: DynamoWorker, llm: LLM) -> None:
    whole = await chunks(worker, message(PROMPT, max_tokens=5, **SAMPLED))
    retry = message([*PROMPT, *ids(whole)], max_tokens=0, **SAMPLED)
    rest = await chunks(worker, retry | {"migration_link": whole[0]["worker_trace_link"]})
    assert rest == [{"token_ids": [], "index": 0, "finish_reason": "length"}]


@running
async def test_a_request_that_cannot_be_followed_is_the_clients_mistake(worker: DynamoWorker, llm: LLM) -> None:
    for asked in (message(PROMPT, best_of=2), message([9999]), message(PROMPT, ["twostroke:{"])):
        with pytest.raises(InvalidArgument):
            await chunks(worker, asked)


@running
async def test_an_iterator_that_is_closed_gives_its_pages_back(worker: DynamoWorker, llm: LLM) -> None:
    async with aclosing(worker.generate(message(PROMPT, max_tokens=1000, **SAMPLED), Context("one"))) as stream:
        async for _ in stream:
            break
    while llm.engine.num_running:
        await asyncio.sleep(0.01)
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)


@running
async def test_what_runs_at_the_end_goes_to_another_worker(worker: DynamoWorker, llm: LLM) -> None:
    unhurried(llm)
    stream = worker.generate(message(PROMPT, max_tokens=LONG["max_tokens"], **SAMPLED), Context("one"))
    await anext(stream)
    await worker.cleanup()
    with pytest.raises(EngineShutdown):
        async for _ in stream:
            pass


@running
async def test_dynamos_look_whether_it_lives_needs_no_other_worker(worker: DynamoWorker, llm: LLM) -> None:
    probe = await worker.health_check_payload()
    assert probe is not None
    for role in ("prefill", "decode"):
        other = DynamoWorker(llm, role, WorkerAddress(cards=worker.address.cards), student=role == "decode")
        await other.start(2)
        try:
            made = await chunks(other, probe, role)
        finally:
            await other.cleanup()
        assert made[-1]["finish_reason"] == "length"
        assert len(ids(made)) == 1
