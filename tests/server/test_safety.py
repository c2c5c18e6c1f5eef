"""Half-sent calls, long bodies, and other clients that must not stop the others."""

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, eventually, serving
from tests.server.long_answers import LONG
from tests.server.loop_clock import LoopClock
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.server.body_validation.supervisor import BodyValidator
from twostroke.server.http import middleware
from twostroke.server.http.loading import LoadingResponder
from twostroke.server.http.middleware import CallMiddleware
from twostroke.server.listener import listen
from twostroke.server.openai.routes import generate, tokens
from twostroke.server.settings import Settings

OpenTiny = Callable[..., LLM]
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LIMIT_S = 1000.0  # which no machine needs, and a test lets pass
HURRIED: dict[str, Any] = {"header_timeout_s": LIMIT_S, "body_timeout_s": LIMIT_S, "keep_alive_s": LIMIT_S}


def parsers() -> list[str]:
    return ["h11", "httptools"] if find_spec("httptools") else ["h11"]


@pytest.fixture(scope="module", params=parsers())
def hurried(
    request: pytest.FixtureRequest, tiny_directory: Callable[[str], Any], loop_clock: LoopClock
) -> Iterator[Serving]:
    """A server whose clock a test puts forward, with each of uvicorn's parsers that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11" and "httptools" in parsers():
            patch.setattr("uvicorn.protocols.http.httptools_impl.HttpToolsProtocol", H11Protocol)
        patch.setattr(middleware, "MIN_BODY_RATE", 1)
        llm = LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)
        with serving(llm, **HURRIED) as running:
            yield running


def connect(running: Serving) -> socket.socket:
    port = int(running.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def read_all(sock: socket.socket, clock: LoopClock) -> bytes:
    """What comes until the connection is closed, while the clock runs."""
    data, never = b"", clock.now + 1000 * LIMIT_S
    sock.settimeout(0.02)
    with contextlib.suppress(ConnectionResetError):
        while clock.now < never:
            with contextlib.suppress(TimeoutError):
                if not (piece := sock.recv(1 << 16)):
                    return data
                data += piece
            clock.passes(LIMIT_S / 4)
    assert clock.now < never, "it is not closed"
    return data


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),  # nothing was asked: nothing is answered
        (b"POST", 408),
        (POST, 408),
        (POST + b"content-length: 100\r\n\r\n", 408),
        (POST + b'content-length: 100\r\n\r\n{"prompt"', 408),
        (POST + b"transfer-encoding: chunked\r\n\r\n5\r\n{'pro", 408),
        (POST.replace(b"/v1/completions", b"/nowhere") + b"content-length: 100\r\n\r\n", 408),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal", 200),  # and a half-sent second call
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),  # and then idle
    ],
)
def test_half_sent_calls_end(sent: bytes, status: int | None, hurried: Serving, loop_clock: LoopClock) -> None:
    """The connection is closed when the time is over, with 408 if something was asked."""
    began = loop_clock.now
    with connect(hurried) as sock:
        sock.sendall(sent)
        answer = sock.recv(1 << 16) if status == 200 else b""
        answer += read_all(sock, loop_clock)
    assert loop_clock.now - began > LIMIT_S
    assert (answer.split()[1] if answer else None) == (None if status is None else str(status).encode())
    if status == 408:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] in ("header_timeout", "body_timeout")


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ([b"no such thing\r\n\r\n"], [400]),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"], [400]),  # TLS, where there is none
        ([POST + b"content-length: many\r\n\r\n{}"], [400]),
        ([CHUNKED, b"zzz\r\n\r\n"], [400]),  # the call waits for its body
        ([CHUNKED + b"zzz\r\n\r\n"], [400]),
        ([CHUNKED + b"2\r\n{}\r\nzzz\r\n\r\n"], [400]),
        ([HEALTH, None, b"no such thing\r\n\r\n"], [200, 400]),
        ([HEALTH + b"no such thing\r\n\r\n"], [200, 400]),
        ([CHUNKED.replace(b"localhost", b"elsewhere"), None, b"zzz\r\n\r\n"], [403]),  # it has been answered
    ],
)
def test_what_is_no_http_is_refused_once(
    parts: list[bytes | None], statuses: list[int], hurried: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by the call too whose body it is in, without an error in the server's log, and no time limit closes it."""
    answer = b""
    with connect(hurried) as sock:
        for part in parts:
            if part is None:
                while b"\r\n\r\n" not in answer:
                    answer += sock.recv(1 << 16)
            else:
                sock.sendall(part)
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                answer += piece
    assert [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", answer)] == statuses
    if statuses[-1] == 400:
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    with hurried.http() as http:
        assert http.get("/health").status_code == 200
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx: ", POST + b"content-length: 1000000\r\n\r\n"])
def test_drop_by_drop_is_too_slow(start: bytes, hurried: Serving, loop_clock: LoopClock) -> None:
    """Progress alone does not keep a connection open."""
    answers: list[bytes] = []

    def drop() -> bool:
        loop_clock.passes(LIMIT_S / 10)
        with contextlib.suppress(TimeoutError):
            sock.sendall(b"a")
            answers.append(sock.recv(1 << 16))
        return bool(answers)

    with connect(hurried) as sock:
        sock.sendall(start)
        sock.settimeout(0.02)
        eventually(drop)
    assert answers[0].split()[1] == b"408"


@pytest.mark.parametrize(("seconds", "status"), [(150, 200), (300, 408)])
def test_a_slow_body_that_moves_is_read(
    seconds: int, status: int, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the time limit, above the minimum rate; one below it is refused."""
    monkeypatch.setattr(middleware, "MIN_BODY_RATE", 1)
    parts, sent = [b"x" * 200] * 10, list[Message]()

    async def receive() -> Message:
        loop_clock.passes(seconds)
        for _ in range(2):  # the loop notices a time that is over
            await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"x" * 2000
        await Response()(scope, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(CallMiddleware(app, Settings(**HURRIED))(scope, receive, send))
    assert sent[0]["status"] == status


def test_a_long_answer_is_not_hurried(hurried: Serving, loop_clock: LoopClock) -> None:
    """The limits are for calls, not for answers."""
    body = {"prompt": "the", "stream": True, **LONG, "max_tokens": 600}
    with hurried.http() as http, hurried.http() as other, http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        with hurried.llm.engine.lock:  # nobody steps meanwhile
            loop_clock.passes(10 * LIMIT_S)
            assert other.get("/health").status_code == 200
        assert [line for line in lines if line][-1] == "data: [DONE]"


CONTEXT = 2048  # of the tiny model
TEXT = "the quick brown fox "
LONG_CALLS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": TEXT * 300_000}, 400),
    ("/v1/completions", {"prompt": TEXT * 3000}, 400),
    ("/v1/completions", {"prompt": [TEXT * 3000, "a"]}, 400),
    ("/v1/completions", {"prompt": [5] * 20_000}, 400),
    ("/v1/completions", {"prompt": [5] * 1_600_000}, 413),
    ("/v1/completions", {"prompt": "a", "x": [[]] * 150_000}, 413),
    ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(5000)}}, 400),
    ("/v1/completions", {"prompt": "a", "choice": list(range(20_000))}, 400),
    ("/v1/completions", {"prompt": "a", "model": "x" * 20_000}, 404),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 300_000}]}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 5000}, 400),
    ("/v1/chat/completions", {"messages": [{}] * 15_000}, 400),
    ("/nowhere", {"prompt": TEXT * 3000}, 404),
    # These pass, and are answered as if they were short.
    ("/v1/completions", {"prompt": "the", "max_tokens": 4, "temperature": 0, "user": "x" * 20_000}, 200),
    ("/v1/completions", {"prompt": " " * 20_000 + "the", "max_tokens": 4, "stop": ["x" * 900] * 30}, 400),
    ("/v1/completions", {"prompt": [[5] * 9] * 99 + [[5] * 1000] * 9, "max_tokens": 1, "temperature": 0}, 200),
    ("/tokenize", {"prompt": TEXT * 3000}, 200),
    ("/detokenize", {"tokens": [5] * 20_000}, 200),
]


@pytest.mark.parametrize(("path", "body", "status"), LONG_CALLS)
def test_a_long_body_is_answered_as_before(
    path: str, body: dict[str, Any], status: int, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried out in the worker, the answer is that of the routes; only what the engine must serve reaches them."""
    with server.http() as http:
        tried = http.post(path, json=body)
        assert tried.status_code == status, tried.text[:300]
        if status == 413:
            assert tried.json()["error"]["code"] == "body_too_large"
            return
        monkeypatch.setattr(middleware, "LONG_BODY_BYTES", 1 << 40)
        direct = http.post(path, json=body)
    assert direct.status_code == status
    if path.startswith("/v1") and status == 200:
        tried_choices, direct_choices = ([one["text"] for one in made.json()["choices"]] for made in (tried, direct))
        assert tried_choices == direct_choices
    else:
        assert tried.json() == direct.json()
        assert tried.headers["content-type"] == direct.headers["content-type"]
        assert len(tried.headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_surely_too_long_is_not_tokenized(chat: bool, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LONG_BODY_BYTES", 1 << 40)  # in this process, to see that nothing is encoded
    monkeypatch.setattr(server.llm.tokenizer, "encode", None)
    text = TEXT * 30_000
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    with server.http() as http:
        answer = http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_refusals_reach_no_route_here(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long body that is refused is neither read nor checked in the process of the engine."""
    for routes in (generate, tokens):
        monkeypatch.setattr(routes, "choose_method", lambda *_: pytest.fail("a route was called"))
    with server.http() as http:
        for path, body, status in LONG_CALLS:
            if status >= 400:
                assert http.post(path, json=body).status_code == status, (path, str(body)[:60])


def test_a_body_that_ends_the_worker_is_refused(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed for memory, or stopped for time: that call is refused, and the next one finds a new worker."""
    long = {"prompt": "the", "max_tokens": 2, "user": "x" * 20_000}
    with serving(open_tiny()) as running, running.http() as http:
        assert http.post("/v1/completions", json=long).status_code == 200
        validator: BodyValidator = running.state.engine.body_validator
        worker: Any = validator._long._worker  # pyright: ignore[reportPrivateUsage]
        ask = worker.ask
        worker.ask = lambda call: (worker._process.kill(), ask(call))  # pyright: ignore[reportUnknownLambdaType]
        answer = http.post("/v1/completions", json=long)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert http.post("/v1/completions", json=long).status_code == 200
        monkeypatch.setattr("twostroke.server.body_validation.supervisor.MAX_SECONDS", 0.1)
        slow: Any = validator._long._worker  # pyright: ignore[reportPrivateUsage]
        slow._process.send_signal(signal.SIGSTOP)
        assert http.post("/v1/completions", json=long).status_code == 413
        ended: Any = worker._process
    assert ended.poll() is not None


def test_no_body_is_refused_for_a_worker_that_died_before(open_tiny: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no worker can be started, a call is told to try again."""
    long = {"prompt": "the", "max_tokens": 2, "user": "x" * 20_000}
    with serving(open_tiny()) as running, running.http() as http:
        validator: BodyValidator = running.state.engine.body_validator

        def die() -> None:
            worker: Any = validator._long._worker  # pyright: ignore[reportPrivateUsage]
            worker._process.kill()
            worker._process.wait()

        for _ in range(2):
            assert http.post("/v1/completions", json=long).status_code == 200
            die()
        with monkeypatch.context() as patch:
            patch.setattr("twostroke.server.body_validation.supervisor.START_CODE", "import sys; sys.exit(1)")
            refused = http.post("/v1/completions", json=long)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_reader_lost")
            assert refused.headers["retry-after"] == "2"
        assert http.post("/v1/completions", json=long).status_code == 200


def test_a_huge_body_keeps_no_other_waiting(open_tiny: OpenTiny) -> None:
    """Each kind has its worker: the one for huge bodies is stopped here."""
    with serving(open_tiny()) as running, running.http() as http, ThreadPoolExecutor(1) as threads:
        huge: dict[str, Any] = {"json": {"prompt": "word " * 300_000}, "timeout": 100}
        assert http.post("/v1/completions", **huge).status_code == 400
        validator: BodyValidator = running.state.engine.body_validator
        worker: Any = validator._huge._worker  # pyright: ignore[reportPrivateUsage]
        worker._process.send_signal(signal.SIGSTOP)
        try:
            waiting = threads.submit(http.post, "/v1/completions", **huge)
            assert http.post("/v1/completions", json={"prompt": "word " * 20_000}).status_code == 400
            assert not waiting.done()
        finally:
            worker._process.send_signal(signal.SIGCONT)
        assert waiting.result().status_code in (400, 413)


def test_the_worker_ends_with_the_server(open_tiny: OpenTiny) -> None:
    with serving(open_tiny()) as running, running.http() as http:
        http.post("/tokenize", json={"prompt": TEXT * 3000})
        worker: Any = running.state.engine.body_validator._long._worker
        assert worker._process.poll() is None
    assert worker._process.poll() is not None


def test_a_technique_that_the_worker_lacks(server: Serving) -> None:
    """It was registered here alone, so the call passes."""
    from twostroke.methods import METHODS, Plain

    METHODS["here"] = Plain
    try:
        with serving(server.llm) as running, running.http() as http:
            body = {"prompt": "the", "max_tokens": 2, "method": "here", "user": "x" * 20_000}
            assert http.post("/v1/completions", json=body).status_code == 200
    finally:
        del METHODS["here"]


def test_a_client_that_disconnects_during_validation(server: Serving) -> None:
    """Its body is forgotten, and the server goes on."""
    body = {"messages": [{"role": "user", "content": TEXT * 300_000}]}
    for _ in range(3):
        with server.leaving(body, "/v1/chat/completions"):
            pass
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": "the", "user": "x" * 20_000}).status_code == 200
        eventually(lambda: http.get("/health").json()["in_flight"] == 0)


def test_binding() -> None:
    """One line that says what to do, for each reason."""
    [sock] = listen("127.0.0.1", 0)
    with sock:
        port = sock.getsockname()[1]
        with pytest.raises(InvalidRequest, match=rf"cannot listen at 127.0.0.1:{port}: the port is taken: .*--port"):
            listen("127.0.0.1", port)
        with pytest.raises(InvalidRequest, match="not one of this machine's"):
            listen("192.0.2.1", 0)
        with pytest.raises(InvalidRequest, match="no such host"):
            listen("nowhere.invalid", 0)
        with pytest.raises(InvalidRequest, match="no such host"):
            listen("x" * 100 + ".invalid", 0)


def test_every_address_of_a_name_has_one_port() -> None:
    sockets = listen("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def test_a_client_that_stays_while_the_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """It is let go, and nothing is said."""
    sockets = listen("127.0.0.1", 0)
    with LoadingResponder(sockets):
        client = socket.create_connection(sockets[0].getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 503"
    client.close()
    sockets[0].close()
    assert caplog.text == ""


class HeldLoop(asyncio.SelectorEventLoop):
    """Stands still from `hold` on until it is called from another thread again."""

    def __init__(self) -> None:
        super().__init__()
        self._holding, self._called = threading.Event(), threading.Event()

    def hold(self) -> None:
        super().call_soon_threadsafe(lambda: (self._holding.set(), self._called.wait()))
        self._holding.wait()

    def call_soon_threadsafe(self, *args: Any, **keywords: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(*args, **keywords)
        self._called.set()
        return handle


def test_a_call_that_comes_just_when_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accepted in the turn in which the loop ends, and was left open for ever, unanswered."""
    loop, sockets = HeldLoop(), listen("127.0.0.1", 0)
    monkeypatch.setattr(asyncio, "new_event_loop", lambda: loop)
    with LoadingResponder(sockets):
        httpx.get(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/")  # it has begun
        loop.hold()
        client, silent = (socket.create_connection(sockets[0].getsockname(), PATIENCE_S) for _ in range(2))
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    with client, silent:
        assert client.recv(12) == b"HTTP/1.1 503"
        assert silent.recv(1) == b"", "one that has sent nothing is closed"
    sockets[0].close()


def test_calls_while_the_model_is_loaded() -> None:
    """503 with the time to wait; the sockets stay open for the server, and what comes in between waits."""
    sockets = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    with LoadingResponder(sockets):
        for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("HEAD", "/")):
            answer = httpx.request(method, url + path, content=b"x" * 300_000 if method == "POST" else None)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert method == "HEAD" or answer.json()["error"]["code"] == "loading"
        half = socket.create_connection(sockets[0].getsockname())
        half.sendall(b"GET / HT")
        httpx.get(url + "/health")  # accepted after the half one, so that one is not left to the server
    with half, socket.create_connection(sockets[0].getsockname()) as waiting:
        connection, _ = sockets[0].accept()
        with connection:
            assert connection.getpeername() == waiting.getsockname()
    sockets[0].close()
