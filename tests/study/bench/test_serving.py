"""The load generator without a model: arrivals, lengths, prompts, and a scripted server's figures by hand."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from twostroke.study.bench.serving.client import INTERRUPTED, Client, LoadTest, Outcome, drive
from twostroke.study.bench.serving.figures import summarize
from twostroke.study.bench.serving.target import Target, inspect
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import MEASURED, WARMUP, ClosedLoop, OpenLoop, TokenRequest, arrivals
from twostroke.study.traffic.workload_sampler import TokenRange, WorkloadSampler


def asked(workload: WorkloadSampler, ids: Sequence[int], stream: int = MEASURED) -> list[TokenRequest]:
    return workload.traffic(ClosedLoop(1)).token_requests(ids, stream)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    count, rate = 40_000, 5.0
    times = arrivals(count, rate, burstiness, seed=1)
    between, cv = np.diff(times), burstiness**-0.5
    assert times[0] == 0
    assert len(times) == count
    assert (between >= 0).all()
    assert between.mean() == pytest.approx(1 / rate, abs=5 * cv / rate / count**0.5)  # five standard errors
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.05)
    assert abs(np.corrcoef(between[1:], between[:-1])[0, 1]) < 5 / count**0.5, "gaps do not depend on each other"


def test_arrivals_are_seeded() -> None:
    assert arrivals(50, 2, 1, seed=7).tolist() == arrivals(50, 2, 1, seed=7).tolist()
    assert arrivals(50, 2, 1, seed=7).tolist() != arrivals(50, 2, 1, seed=8).tolist()
    assert arrivals(1, 2, 1, seed=7).tolist() == [0]


def test_lengths_are_exact_and_cover_their_range() -> None:
    asks = asked(
        WorkloadSampler(2000, TokenRange(3, 6), TokenRange(2, 2), prefix_tokens=5, groups=2, seed=1), range(100)
    )
    assert {len(ask.prompt) for ask in asks} == {8, 9, 10, 11}
    assert {ask.output_tokens for ask in asks} == {2}


def test_sharegpt_lengths_follow_their_table() -> None:
    asks = asked(WorkloadSampler(40_000, None, None, seed=1), range(9))
    inputs = np.array([len(ask.prompt) for ask in asks])
    outputs = np.array([ask.output_tokens for ask in asks])
    assert (inputs.min(), inputs.max() <= 1024, outputs.min()) == (4, True, 4)
    assert (inputs + outputs).max() <= 2048
    assert np.percentile(inputs, (25, 50, 90)) == pytest.approx((21, 115, 662), rel=0.06)
    assert np.percentile(outputs, (25, 50, 90)) == pytest.approx((26, 135, 530), rel=0.06)
    # The means of the conversations, which are not in the table.
    assert (inputs.mean(), outputs.mean()) == pytest.approx((238, 215), rel=0.09)


def test_prompts_are_new_unless_a_prefix_is_asked_for() -> None:
    plain = WorkloadSampler(300, TokenRange(16, 16), TokenRange(1, 1), seed=3)
    begins = {tuple(ask.prompt[:8]) for stream in (1, WARMUP) for ask in asked(plain, range(500), stream)}
    assert len(begins) == 600, "no two begin alike, those that warm up included"
    assert asked(plain, range(500)) == asked(plain, range(500))
    shared = WorkloadSampler(300, TokenRange(16, 16), TokenRange(1, 1), prefix_tokens=32, groups=4, seed=3)
    prefixes = [{tuple(ask.prompt[:32]) for ask in asked(shared, range(500), stream)} for stream in (1, WARMUP)]
    assert [len(one) for one in prefixes] == [4, 4]
    assert not prefixes[0] & prefixes[1], "warming up does not warm the measured prefixes"
    assert len({tuple(ask.prompt[32:]) for ask in asked(shared, range(500))}) == 300


class Clock:
    """A clock that the scripted server advances."""

    def __init__(self) -> None:
        self.now = 0.0


def event(text: str = "x", finish: str | None = None, **more: Any) -> bytes:
    body = {"choices": [{"text": text, "finish_reason": finish, **more.pop("choice", {})}], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def counted(tokens: int, finish: str | None = None, **more: Any) -> bytes:
    details = {"cached_tokens": 16}
    return event(finish=finish, usage={"completion_tokens": tokens, "prompt_tokens_details": details}, **more)


def scripted(script: Sequence[tuple[float, bytes]], clock: Clock) -> httpx.MockTransport:
    """A server that sends these bytes at these times."""

    async def stream() -> AsyncIterator[bytes]:
        for at, data in script:
            clock.now = at
            yield data

    return httpx.MockTransport(lambda _: httpx.Response(200, content=stream()))


def answer(
    monkeypatch: pytest.MonkeyPatch, script: Sequence[tuple[float, bytes]], due: float = 0.0, tokens: int = 4
) -> Outcome:
    """The client's result for a script."""
    clock, outcome = Clock(), Outcome(3, tokens, due)
    clock.now = due
    monkeypatch.setattr(Client, "now", lambda _: clock.now)

    async def go() -> None:
        async with httpx.AsyncClient(transport=scripted(script, clock), base_url="http://x") as http:
            await Client(http, "m", 60).send(TokenRequest([1, 2, 3], tokens), outcome)

    asyncio.run(go())
    return outcome


DONE = b"data: [DONE]\n\n"
TIMINGS = {"choice": {"timings": {"queue_ms": 250.0}}}


def test_times_of_tokens_however_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event in two pieces counts when it is complete; two tokens in one event have the same time."""
    third = counted(3)
    script = [(1.0, counted(1)), (1.5, third[:9]), (2.0, third[9:] + counted(4, "length", **TIMINGS)), (2.5, DONE)]
    one = answer(monkeypatch, script, due=0.5)
    assert one.tokens == [1.0, 2.0, 2.0, 2.0]
    assert (one.end, one.finish, one.error, one.cached, one.queue_s) == (2.5, "length", None, 16, 0.25)
    plain = [(1.0, event()), (2.0, event("")), (3.0, event("y", "length")), (4.0, DONE)]
    assert answer(monkeypatch, plain).tokens == [1.0, 3.0], "without usage, an event with text is a token"
    crlf = [(1.0, counted(1, "stop").replace(b"\n", b"\r\n")), (2.0, DONE)]
    assert answer(monkeypatch, crlf).tokens == [1.0]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([(1.0, counted(1)), (2.0, b'data: {"error": {"code": "timeout"}}\n\n'), (3.0, DONE)], "stream: timeout"),
        ([(1.0, counted(1))], "cut off"),
        ([(1.0, b"data: {oops\n\n")], "event that cannot be read"),
        ([(1.0, b"data: [1]\n\n")], "event that cannot be read"),
        ([(1.0, b'data: {"choices": 5}\n\n')], "event that cannot be read"),
    ],
)
def test_answers_that_are_none(script: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(monkeypatch, script).error == error


def test_figures_of_a_scripted_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers and a failure. Due at 0 and 1 s; gaps 1, 3 and 1 s, worst gaps 3 and 1; 8 s in all."""
    first = answer(
        monkeypatch, [(2.0, counted(1)), (3.0, counted(2)), (6.0, counted(3, "length", **TIMINGS))], tokens=3
    )
    second = answer(monkeypatch, [(5.0, counted(1)), (6.0, counted(2, "length")), (8.0, DONE)], due=1.0, tokens=4)
    lost = answer(monkeypatch, [(3.0, counted(1))], due=1.0)
    found = summarize([first, second, lost], Objectives(ttft_s=4.0, itl_s=2.0), cpu_s=2.0)
    assert found["ttft_s"] == {"mean": 3.0, "p50": 2.0, "p90": 4.0, "p99": 4.0}
    assert found["itl_s"] == {"mean": 5 / 3, "p50": 1.0, "p90": 3.0, "p99": 3.0}
    assert found["tpot_s"] == {"mean": 1.5, "p50": 1.0, "p90": 2.0, "p99": 2.0}
    assert found["e2e_s"] == {"mean": 6.5, "p50": 6.0, "p90": 7.0, "p99": 7.0}
    assert found["queue_s"] == {"mean": 0.25, "p50": 0.25, "p90": 0.25, "p99": 0.25}
    rates = ("requests_per_second", "output_tokens_per_second", "total_tokens_per_second", "goodput", "client_cpu")
    assert [found[name] for name in rates] == [2 / 8, 5 / 8, 11 / 8, 1 / 8, 2 / 8]
    assert (found["sent"], found["completed"], found["errors"]) == (3, 2, {"cut off": 1})
    assert (found["input_tokens"], found["output_tokens"], found["cached_tokens"]) == (6, 5, 32)
    assert found["short_answers"] == 1
    assert summarize([first, second], Objectives(), 0)["goodput"] is None


@pytest.mark.parametrize(("ttft", "itl", "met"), [(2.0, 3.0, 2), (1.9, None, 0), (2.0, 2.9, 1), (None, 0.9, 0)])
def test_objectives(ttft: float | None, itl: float | None, met: int) -> None:
    answers = [Outcome(1, 3, 1.0, 1.0, [3.0, 4.0, 7.0]), Outcome(1, 2, 1.0, 1.0, [3.0, 4.0])]
    assert sum(Objectives(ttft, itl).met(one.timings) for one in answers) == met
    assert answers[0].timings.itls == [1.0, 3.0]


def test_nothing_measured_has_no_figures() -> None:
    found = summarize([], Objectives(ttft_s=1.0), 0.0)
    assert (found["sent"], found["goodput"], found["ttft_s"]["p99"], found["lag_p99_s"]) == (0, None, None, None)


class Held:
    """A server that holds all answers until it is released."""

    def __init__(self) -> None:
        self.gate, self.now, self.most, self.seen = asyncio.Event(), 0, 0, 0

    async def __call__(self, _: httpx.Request) -> httpx.Response:
        self.now, self.seen = self.now + 1, self.seen + 1
        self.most = max(self.most, self.now)
        await self.gate.wait()
        await asyncio.sleep(0)
        self.now -= 1
        return httpx.Response(200, content=counted(1, "length"))


def with_held(use: Callable[[Held, Client], Coroutine[Any, Any, LoadTest]]) -> tuple[Held, LoadTest]:
    async def go() -> tuple[Held, LoadTest]:
        held = Held()
        async with httpx.AsyncClient(transport=httpx.MockTransport(held), base_url="http://x") as http:
            return held, await use(held, Client(http, "m", 60))

    return asyncio.run(go())


ASKS = [TokenRequest([1], 1)] * 20


def test_the_open_loop_waits_for_nobody() -> None:
    async def use(held: Held, client: Client) -> LoadTest:
        running = asyncio.create_task(drive(client, ASKS, OpenLoop(rate=1000.0), seed=1))
        while held.seen < len(ASKS):
            await asyncio.sleep(0.001)
        held.gate.set()
        return await running

    held, run = with_held(use)
    assert held.most == len(ASKS), "all were sent before the first was answered"
    assert [one.due for one in run.outcomes] == arrivals(20, 1000.0, 1.0, 1).tolist()
    assert all(one.sent is not None and one.sent >= one.due for one in run.outcomes)
    assert all(one.error is None for one in run.outcomes)


def test_the_closed_loop_keeps_its_concurrency() -> None:
    async def use(held: Held, client: Client) -> LoadTest:
        held.gate.set()
        return await drive(client, ASKS, ClosedLoop(3), seed=1)

    held, run = with_held(use)
    assert (held.most, held.seen, len(run.outcomes)) == (3, 20, 20)
    assert not run.interrupted


@pytest.mark.parametrize("pattern", [ClosedLoop(3), OpenLoop(1000.0)])
def test_interrupted_there_is_a_report_of_what_was(pattern: Any) -> None:
    async def use(held: Held, client: Client) -> LoadTest:
        running = asyncio.create_task(drive(client, ASKS, pattern, seed=1))
        while held.seen < 3:
            await asyncio.sleep(0.001)
        running.cancel()
        return await running

    _, run = with_held(use)
    assert run.interrupted
    assert len(run.outcomes) >= 3
    assert {one.error for one in run.outcomes} == {INTERRUPTED}
    found = summarize(run.outcomes, Objectives(), 0.0)
    assert (found["completed"], found["errors"], found["interrupted"]) == (0, {}, len(run.outcomes))


@pytest.mark.parametrize("field", ["prompt", "content"])
def test_servers_tokenize_in_two_ways(field: str) -> None:
    """vLLM and Twostroke read `prompt`; llama.cpp's server reads `content`, and has no tokens for anything else."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        match request.url.path:
            case "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "tiny", "owned_by": "somebody"}]})
            case "/tokenize":
                return httpx.Response(200, json={"tokens": [5, 3, 9] if field in body else []})
            case _:
                return httpx.Response(200, json={"usage": {"prompt_tokens": len(body["prompt"])}})

    async def go() -> Target:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://x") as http:
            return await inspect(http, None, None)

    assert asyncio.run(go()) == Target("tiny", "somebody", None, [3, 5, 9])
