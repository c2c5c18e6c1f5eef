"""Behaviour under load and at the end: queues, deadlines, disconnects, failures, shutdown."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import LOCAL, Serving, eventually, serving
from tests.server.long_answers import LONG
from tests.server.loop_clock import LoopClock
from twostroke.api.llm import LLM
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.methods import METHODS, Method
from twostroke.server import lifecycle
from twostroke.server.app import create_app
from twostroke.server.settings import Settings

OpenTiny = Callable[..., LLM]


def begin(running: Serving, **fields: Any) -> openai.Stream[Any]:
    """A stream of a long answer that has begun."""
    body: Any = LONG | fields
    stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=body)
    next(iter(stream))
    return stream


def finish(running: Serving, stream: bool, body: Any) -> None:
    """Read an answer to its end, whole or streamed."""
    for _ in running.client.completions.create(model="tiny", prompt="the", stream=stream, extra_body=body):
        pass


def test_many_at_once(open_tiny: OpenTiny) -> None:
    """Hundreds of requests, more than run at once and more than the pool holds: each gets the same text as alone."""
    prompts = [[k % 300 + 2] * (5 + k % 30) for k in range(200)]
    options: Any = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    expected = [completion.text for completion in open_tiny().generate(prompts, **options)]
    with serving(open_tiny(kv_bytes=2 << 20, max_running=64)) as running, ThreadPoolExecutor(32) as pool:
        client = running.client

        def ask(prompt: list[int]) -> str:
            return client.completions.create(model="tiny", prompt=prompt, **options).choices[0].text

        assert list(pool.map(ask, prompts)) == expected


def test_a_full_queue(open_tiny: OpenTiny) -> None:
    with serving(open_tiny(max_running=1), max_queued=1) as running:
        with begin(running), running.http() as http:
            waiting = threading.Thread(target=lambda: running.client.completions.create(model="tiny", prompt="a"))
            waiting.start()
            eventually(lambda: http.get("/health").json()["in_flight"] == 2)
            answer = http.post("/v1/completions", json={"prompt": "b"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(answer.headers["retry-after"]) >= 1
        waiting.join()
        eventually(lambda: running.http().get("/health").json()["in_flight"] == 0)
        assert running.client.completions.create(model="tiny", prompt="b").choices


@pytest.mark.parametrize("stream", [False, True])
def test_deadline(stream: bool, open_tiny: OpenTiny) -> None:
    with serving(open_tiny(), timeout_s=60) as running:
        body: Any = {**LONG, "timeout": 0.2}
        with pytest.raises(openai.APIError) as caught:
            finish(running, stream, body)
        assert caught.value.code == "timeout"
        assert "0.2" in str(caught.value)  # the request's own limit, not the server's
        eventually(lambda: running.pages_used == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes(stream: bool, open_tiny: OpenTiny) -> None:
    """Waiting or running, streaming or not: the pages of a client that disconnects are free one step later."""
    with serving(open_tiny(max_running=1)) as running, begin(running) as other:
        engine, body = running.llm.engine, {"prompt": "a", "stream": stream, **LONG}
        for _ in range(2):
            with running.leaving(body):
                eventually(lambda: engine.num_waiting == 1)
            eventually(lambda: engine.num_waiting == 0)
        other.close()
        eventually(lambda: engine.num_running == 0 and running.pages_used == 0)
        with running.leaving(body):  # and one that runs
            eventually(lambda: engine.num_running == 1)
        eventually(lambda: engine.num_running == 0 and running.pages_used == 0)


def test_idle_is_quiet(open_tiny: OpenTiny) -> None:
    """An idle server uses no processor time."""
    with serving(open_tiny()) as running:
        running.client.completions.create(model="tiny", prompt="a", max_tokens=2)
        eventually(lambda: running.http().get("/health").json()["in_flight"] == 0)
        time.sleep(0.1)
        thread = next(t for t in threading.enumerate() if t.name == "engine")
        assert thread.native_id is not None

        def ticks() -> int:
            with open(f"/proc/self/task/{thread.native_id}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        before = ticks()
        time.sleep(0.5)
        assert ticks() - before <= 2  # of 10 ms


@pytest.fixture
def crash() -> Iterator[None]:
    class Crash(Method, name="crash"):  # pyright: ignore[reportUnusedClass]
        def program(self, prompt: list[int]) -> Program:
            kv = yield Prefill(prompt)
            yield Decode(kv, until=lambda sampled: len(sampled) > 3 and 1 // 0 > 0)

    yield
    del METHODS["crash"]


@LOCAL
def test_a_crash_ends_its_own_request(crash: None, open_tiny: OpenTiny) -> None:
    """Also in a batch with others, whose texts do not change."""
    with serving(open_tiny()) as running, ThreadPoolExecutor(4) as pool:
        client = running.client
        options: Any = {"max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}

        def ask(prompt: str) -> str:
            return client.completions.create(model="tiny", prompt=prompt, **options).choices[0].text

        expected = [ask("the quick"), ask("a lazy dog")]
        for stream in (False, True):
            with running.llm.engine.lock, running.http() as http:  # nobody steps before all are there
                others = [pool.submit(ask, prompt) for prompt in ("the quick", "a lazy dog")]
                crashing = pool.submit(finish, running, stream, {"model": "tiny:crash", "ignore_eos": True})
                eventually(lambda: http.get("/health").json()["in_flight"] == 3)
            with pytest.raises(openai.APIError) as caught:
                crashing.result()
            assert caught.value.code == "internal_error"
            assert "division" not in str(caught.value), "what happened inside is for the log"
            assert [other.result() for other in others] == expected
        assert running.http().get("/health").status_code == 200


@LOCAL
def test_a_fatal_error(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests, current and later, get the error; /health fails so that the process is replaced."""
    llm = open_tiny()
    monkeypatch.setattr(lifecycle, "FAILURE_GRACE_S", 1000)
    with serving(llm) as running:
        stream = begin(running)
        monkeypatch.setattr(llm.engine, "step", lambda: 1 // 0)
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "engine_failed"
        with running.http() as http:
            for path in ("/health", "/health/live", "/health/ready"):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["live"]) == (503, False)
            answer = http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
            assert "ZeroDivisionError" in answer.json()["error"]["message"]
            assert http.post("/reset_prefix_cache").status_code == 503
        monkeypatch.setattr(lifecycle, "FAILURE_GRACE_S", 0)
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive(), "its supervisor starts it again"
        assert running.server.lost_at is not None, "the exit code of `serve`"


def test_shutdown_lets_running_requests_finish(open_tiny: OpenTiny) -> None:
    with serving(open_tiny(), grace_s=1000) as running:
        expected = running.client.completions.create(
            model="tiny", prompt="the", max_tokens=200, temperature=0, extra_body={"ignore_eos": True}
        )
        stream = begin(running, max_tokens=200, temperature=0)
        keep = running.http()
        assert keep.get("/health/ready").status_code == 200
        running.server.should_exit = True
        rest = "".join(chunk.choices[0].text for chunk in stream)
        assert expected.choices[0].text.endswith(rest)
        assert len(rest) > 50
        running.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


def test_shutdown_cancels_what_takes_too_long(open_tiny: OpenTiny) -> None:
    with serving(open_tiny(), grace_s=0.2) as running:
        stream = begin(running)
        running.server.should_exit = True
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert caught.value.code == "shutting_down"
        running.stop()


def test_it_serves_on_while_endpoints_are_taken_away(
    open_tiny: OpenTiny, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the drain delay readiness is 503, and calls are answered, those of new connections too."""
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: loop_clock.now))
    with serving(open_tiny(), drain_delay_s=1000.0) as running, running.http() as kept:
        assert kept.get("/health/ready").status_code == 200
        running.server.handle_exit(signal.SIGTERM, None)
        with running.http() as new:
            eventually(lambda: new.get("/health/ready").status_code == 503)
            assert new.get("/health/ready").json()["draining"] is True
            assert new.get("/health/live").status_code == 200
            for http in (kept, new):
                assert http.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200
        assert running.thread.is_alive()
        loop_clock.passes(1000)
        running.thread.join(PATIENCE_S)
        assert not running.thread.is_alive()


def test_no_work_is_taken_while_draining(open_tiny: OpenTiny) -> None:
    async def check() -> None:
        app = create_app(open_tiny(), Settings(model_name="tiny"))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http,
        ):
            app.state.engine.drain(5)
            answer = await http.post("/v1/completions", json={"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            assert (await http.get("/health/ready")).status_code == 503
            assert (await http.get("/health/live")).status_code == 200

    asyncio.run(check())
