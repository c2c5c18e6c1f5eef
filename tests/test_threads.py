"""One model, many threads and tasks: the same tokens as alone, and exact memory afterwards."""

# pyright: reportPrivateUsage=false

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twostroke import LLM, AsyncLLM, Decode, KVCache, Prefill, method
from twostroke.engine.request import Request
from twostroke.engine.strokes import Program
from twostroke.errors import EngineStopped, InvalidRequest
from twostroke.sampling.params import SamplingParams
from twostroke.server.app import create_app

PROMPTS = [[5 + i, 9, 17 + i, 3, 40 + i, 8] * (1 + i % 4) for i in range(12)]


WEIGHTS = {"reference": "stored", "native": "bf16"}


@pytest.fixture(params=list(WEIGHTS))
def llm(request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(
        str(tiny_directory("qwen3")), backend=request.param, weights=WEIGHTS[request.param], kv_bytes=4 << 20
    ) as model:
        yield model


def ids(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


def everything(llm: LLM, i: int) -> list[list[int]]:
    """One call of every kind, with values cut, joined and moved in between."""
    prompt = PROMPTS[i % len(PROMPTS)]
    kv = llm.prefill(prompt)
    twice = kv[:2] + llm.prefill(prompt, after=kv)[len(prompt) :]
    stream = llm.stream(prompt, max_tokens=6)
    first = next(stream).id  # abandoned after one token
    del stream
    return [
        ids(llm.decode(kv, max_tokens=5)),
        ids(llm.decode(twice.to("host"), max_tokens=4, temperature=1.0, seed=i)),
        *(ids(answer.tokens) for answer in llm.generate([prompt, prompt[1:]], max_tokens=7)),
        ids(llm.generate([prompt], max_tokens=4, method=method("repeat"))[0].tokens),
        [first, *twice.tokens],
    ]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count), timeout=120))


def settled(llm: LLM) -> None:
    assert llm.model.index is not None
    llm.model.index.clear()
    gc.collect()
    assert llm.pool.num_held == 0
    assert llm.pool.num_free == llm.pool.num_pages


def test_threads_get_what_they_would_get_alone(llm: LLM) -> None:
    alone = [everything(llm, i) for i in range(12)]
    for _ in range(3):
        assert in_threads(12, lambda i: everything(llm, i)) == alone
    settled(llm)


def test_threads_are_batched(llm: LLM) -> None:
    steps, step = [], llm.engine._step

    def counted() -> bool:
        worked = step()
        steps.append(llm.engine.report.decode)
        return worked

    llm.engine._step = counted
    start = threading.Barrier(8)

    def work(i: int) -> list[int]:
        start.wait()
        return ids(llm.generate([PROMPTS[i]], max_tokens=40, ignore_eos=True)[0].tokens)

    assert [len(one) for one in in_threads(8, work)] == [40] * 8
    assert max(steps) > 4
    assert len(steps) < 8 * 40


def test_a_long_request_keeps_no_other_thread_out(llm: LLM) -> None:
    """A thread that steps without end lets others in after each step."""
    running = llm.stream(PROMPTS[0], max_tokens=10_000, ignore_eos=True)
    stop = threading.Event()

    def run() -> None:
        for _ in running:
            if stop.is_set():
                break

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for prompt in PROMPTS:
            assert len(llm.generate([prompt], max_tokens=3, ignore_eos=True)[0].tokens) == 3
    finally:
        stop.set()
        thread.join()
    assert not running.request.done


def test_one_stream_may_be_read_by_several_threads(llm: LLM) -> None:
    alone = ids(llm.stream(PROMPTS[3], max_tokens=30, ignore_eos=True))
    shared = llm.stream(PROMPTS[3], max_tokens=30, ignore_eos=True)
    assert sum(in_threads(4, lambda _: len(list(shared)))) == 30
    assert ids(shared.tokens) == alone


def test_values_are_saved_and_dropped_while_others_run(llm: LLM, tmp_path: Path) -> None:
    def work(i: int) -> list[int]:
        kv = llm.prefill(PROMPTS[i])
        for round in range(4):
            path = tmp_path / f"{i}-{round}.kv"
            kv.save(path)
            kv = KVCache.load(path, llm)
        return ids(llm.decode(kv, max_tokens=5))

    alone = [ids(llm.decode(llm.prefill(prompt), max_tokens=5)) for prompt in PROMPTS[:6]]
    assert in_threads(6, work) == alone
    settled(llm)


def test_an_error_reaches_the_thread_that_made_it(llm: LLM) -> None:
    def work(i: int) -> Any:
        if i % 2:
            with pytest.raises(InvalidRequest, match="token ids must be"):
                llm.generate([[10**6]])
            return None
        return ids(llm.generate([PROMPTS[i]], max_tokens=5)[0].tokens)

    assert in_threads(8, work) == [None if i % 2 else work(i) for i in range(8)]


def test_a_crowded_pool_serves_every_thread(tiny_directory: Callable[[str], Path]) -> None:
    with LLM(str(tiny_directory("llama")), backend="reference", dtype="float32") as roomy:
        alone = [ids(roomy.generate([prompt], max_tokens=30)[0].tokens) for prompt in PROMPTS]
        page_bytes = roomy.pool.page_bytes
    with LLM(str(tiny_directory("llama")), backend="reference", dtype="float32", kv_bytes=8 * page_bytes) as small:
        crowded = in_threads(12, lambda i: ids(small.generate([PROMPTS[i]], max_tokens=30)[0].tokens))
        assert crowded == alone
        assert small.engine.preemptions
        settled(small)


def test_a_program_must_not_call_its_model(llm: LLM) -> None:
    def program() -> Program:
        yield Prefill([1, 2])
        llm.prefill([3])

    request = Request(program, SamplingParams(), llm.tokenizer)
    with pytest.raises(InvalidRequest, match="yield Prefill, Decode or Emit"):
        llm.engine.finish([llm.engine.submit(request)])


# Closing ----------------------------------------------------------------------------------------------------------


def test_a_closed_model_lets_go_of_its_memory(tiny_directory: Callable[[str], Path]) -> None:
    with LLM(str(tiny_directory("qwen3")), backend="native", weights="bf16") as llm:
        compiled, pool = weakref.ref(llm.model.compiled), weakref.ref(llm.pool)
        kv = llm.prefill(PROMPTS[0])
        entries = kv.entries()
    llm.close()  # a second time
    assert (kv.entries() == entries).all()
    with pytest.raises(EngineStopped, match=f"{llm.name} is closed: open it again"):
        llm.generate([[1]])
    with pytest.raises(EngineStopped):
        llm.prefill([1])
    assert "closed" in repr(llm)
    assert not hasattr(LLM, "anything")
    with pytest.raises(AttributeError):
        _ = llm.anything
    del kv
    assert compiled() is None
    assert pool() is None


def test_closing_ends_the_requests_of_other_threads(llm: LLM) -> None:
    ends: list[BaseException] = []
    started = threading.Barrier(4)

    def work() -> None:
        stream = llm.stream(PROMPTS[0], max_tokens=10_000, ignore_eos=True)
        next(stream)
        started.wait()
        try:
            for _ in stream:
                pass
        except EngineStopped as error:
            ends.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    llm.close()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 3


# Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", pytest.param("reference", marks=pytest.mark.nightly)])
def test_ctrl_c_in_the_main_thread_leaves_other_threads_alone(
    backend: str, tiny_directory: Callable[[str], Path]
) -> None:
    model = ["llm", str(tiny_directory("qwen3")), backend, WEIGHTS[backend]]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.press_ctrl_c", *model],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_a_step_that_is_cut_ends_all_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llm.stream(PROMPTS[1], max_tokens=50, ignore_eos=True)
    next(other)

    def cut(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.flight, "launch_sampling", cut)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS[0]], max_tokens=2)
    with pytest.raises(EngineStopped, match="interrupted"):
        list(other)
    assert len(llm.generate([PROMPTS[0]], max_tokens=2, ignore_eos=True)[0].tokens) == 2


def test_a_program_may_end_its_own_request_or_fail_when_closed(llm: LLM) -> None:
    def ending() -> Program:
        yield Prefill([1, 2])
        llm.engine.cancel(made[0])
        yield Prefill([3])

    def stubborn() -> Program:
        try:
            yield Prefill([1, 2])
            while True:
                yield Decode(values[0])
        finally:
            raise ValueError("not now")

    values = [llm.prefill([1, 2])]
    made = [Request(ending, SamplingParams(), llm.tokenizer)]
    llm.engine.run(made)
    assert made[0].cancelled
    request = Request(stubborn, SamplingParams(max_tokens=1000, ignore_eos=True, n=2), llm.tokenizer)
    next(llm.engine.tokens(llm.engine.submit(request)))  # abandoned
    assert request.done
    assert len(llm.generate([PROMPTS[0]], max_tokens=2, ignore_eos=True)[0].tokens) == 2
    del request
    made.clear()
    values.clear()
    settled(llm)


# Processes --------------------------------------------------------------------------------------------------------


def test_a_forked_process_computes_too(tiny_directory: Callable[[str], Path]) -> None:
    """Threads do not survive a fork: neither those of OpenMP nor those of the native team."""
    script = """
import multiprocessing, sys
from twostroke import LLM

def answer(llm):
    return [token.id for token in llm.generate([[5, 6, 7] * 20], max_tokens=8, ignore_eos=True)[0].tokens]

def child(ends):
    ends.send([answer(llm), answer(opened())])

def opened():
    return LLM(sys.argv[1], backend=sys.argv[2], weights=sys.argv[3], kv_bytes=4 << 20, threads=2)

llm = opened()
here = answer(llm)
context = multiprocessing.get_context("fork")
end, other = context.Pipe()
process = context.Process(target=child, args=(other,))
process.start()
there = end.recv() if end.poll(60) else "no answer"
process.kill()
assert there == [here, here], there
"""
    for backend, weights in (("native", "bf16"), ("reference", "stored")):
        arguments = [str(tiny_directory("qwen3")), backend, weights]
        subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120)


# asyncio ----------------------------------------------------------------------------------------------------------


def test_tasks_get_what_threads_get(llm: LLM) -> None:
    alone = [ids(llm.generate([prompt], max_tokens=6)[0].tokens) for prompt in PROMPTS]

    async def one(model: AsyncLLM, i: int) -> list[int]:
        kv = await model.prefill(PROMPTS[i])
        decoding = model.decode(kv, max_tokens=6)
        tokens = ids([token async for token in decoding])
        assert decoding.kv.tokens[: len(PROMPTS[i])] == PROMPTS[i]
        (answer,) = await model.generate([PROMPTS[i]], max_tokens=6)
        streamed = model.stream(PROMPTS[i], max_tokens=6)
        assert tokens == ids(answer.tokens) == ids([token async for token in streamed])
        assert streamed.text == answer.text
        return tokens

    async def main() -> None:
        async with AsyncLLM(llm) as model:
            mixed = asyncio.to_thread(in_threads, 4, lambda i: everything(llm, i))
            answers, _ = await asyncio.gather(asyncio.gather(*(one(model, i) for i in range(len(PROMPTS)))), mixed)
            assert answers == alone

    asyncio.run(main())
    settled(llm)


def test_a_cancelled_task_frees_its_pages(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as model:
            task = asyncio.create_task(model.generate([PROMPTS[0]], max_tokens=10_000, ignore_eos=True))
            stream = model.stream(PROMPTS[1], max_tokens=10_000, ignore_eos=True)
            async for _ in stream:
                break
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.close()
            await model.generate([PROMPTS[2]], max_tokens=2)
            assert llm.engine.num_running == llm.engine.num_waiting == 0

    asyncio.run(main())
    settled(llm)


def test_errors_are_raised_in_the_task(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncLLM(llm) as model:
            with pytest.raises(InvalidRequest, match="token ids"):
                await model.generate([[10**6]])
            with pytest.raises(InvalidRequest, match="token ids"):
                async for _ in model.stream([10**6]):
                    pass
            unread = model.stream(PROMPTS[0])
            with pytest.raises(InvalidRequest, match="no value yet"):
                _ = unread.kv
        with pytest.raises(EngineStopped):
            await model.generate([PROMPTS[0]])
        with pytest.raises(InvalidRequest, match="open already"):
            AsyncLLM(llm, threads=1)

    asyncio.run(main())


def test_an_async_model_is_opened_aside_and_closed(tiny_directory: Callable[[str], Path]) -> None:
    async def main() -> LLM:
        async with await AsyncLLM.open(str(tiny_directory("qwen3")), backend="native", weights="bf16") as model:
            (answer,) = await model.generate([PROMPTS[0]], max_tokens=3)
            assert len(answer.tokens) == 3
        return model.llm

    with pytest.raises(EngineStopped):
        asyncio.run(main()).prefill([1])


def test_a_served_model_can_be_used_in_process(llm: LLM) -> None:
    """The server's thread and a caller's share the engine."""
    from starlette.testclient import TestClient

    with TestClient(create_app(llm)) as client:
        body = {"model": llm.name, "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
        served = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

        def work(i: int) -> str:
            if i % 2:
                return client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return llm.generate([PROMPTS[0]], max_tokens=20)[0].text

        assert in_threads(6, work) == [served] * 6
