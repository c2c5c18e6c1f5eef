"""Where a server listens: at a unix socket, with TLS; what cannot be is one line, before a model is loaded."""

import contextlib
import socket
import ssl
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import client_of, eventually
from tests.server.long_answers import LONG
from tests.server.loop_clock import LoopClock
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.http.loading import LoadingResponder
from twostroke.server.lifecycle import make_server
from twostroke.server.listener import Listener, Place
from twostroke.server.settings import Settings

BODY = {"prompt": "the", "max_tokens": 8, "temperature": 0}
OPENSSL = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=localhost"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs, `a` and `b`, both in one file, and a key with a passphrase."""
    made = tmp_path_factory.mktemp("pems")
    name = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    try:
        for pair in "ab":
            files = ["-nodes", "-keyout", made / f"{pair}.key", "-out", made / f"{pair}.crt", "-addext", name]
            subprocess.run([*OPENSSL.split(), *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make certificates with")
    locked = ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", made / "a.key", "-out", made / "locked.key"]
    subprocess.run(locked, check=True, capture_output=True)
    (made / "both.pem").write_text((made / "a.key").read_text() + (made / "a.crt").read_text())
    (made / "text.pem").write_text("no certificate")
    return made


@contextlib.contextmanager
def served(llm: LLM, place: Place) -> Generator[Listener]:
    listener = place.open()
    server = make_server(llm, Settings(model_name="tiny", grace_s=0.5), listener.host, 0, listener.tls)
    thread = threading.Thread(target=server.run, args=(listener.sockets,), daemon=True)
    thread.start()
    eventually(lambda: server.started)
    try:
        yield listener
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def at(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name")


def test_a_unix_socket(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    """Plain and streamed; its file has the mode that was asked for, and is gone at the end."""
    path = tmp_path / "door"
    with served(open_tiny(), Place("", 0, str(path), 0o660)), at(path) as http:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        whole = http.post("/v1/completions", json=BODY)
        assert whole.json()["usage"]["completion_tokens"] > 0
        assert http.post("/v1/completions", json=BODY | {"stream": True}).text.endswith("[DONE]\n\n")
        assert http.get("/health/ready").status_code == 200
    assert not path.exists()


def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = Place("", 0, str(path)).open()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InvalidRequest, match="another server listens there"):
        Place("", 0, str(path)).open()
    for sock in listener.sockets:
        sock.close()
    other = Place("", 0, str(path)).open()
    listener.close()  # the file is the other's by now
    assert path.exists()
    other.close()
    assert not path.exists()


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, message in (
        (tmp_path / "file", "something else than a socket"),
        (tmp_path / "no" / "door", "no such directory"),
        (tmp_path / "file" / "door", "no such directory"),
        (tmp_path / ("x" * 200), "at most 107 bytes"),
        (tmp_path, "something else than a socket"),
        ("a\0b", "null (byte|character)"),
    ):
        for act in (Place.open, Place.check):
            with pytest.raises(InvalidRequest, match=message):
                act(Place("", 0, str(path)))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_is_checked_beside_a_server(tmp_path: Path) -> None:
    """As before a restart: what another server has taken is fine, what cannot be is not."""
    with contextlib.ExitStack() as closing:
        for place in (Place("127.0.0.1", 0), Place("", 0, str(tmp_path / "door"))):
            listener = place.open()
            closing.callback(listener.close)
            port = listener.sockets[0].getsockname()[1] if place.uds is None else 0
            Place(place.host, port, place.uds).check()
    for host, message in (("192.0.2.1", "at 192.0.2.1:80: the address is not one"), ("no host", "no such host")):
        with pytest.raises(InvalidRequest, match=message):
            Place(host, 80).check()


@pytest.mark.parametrize("both", [False, True])
def test_tls(both: bool, open_tiny: Callable[..., LLM], pems: Path) -> None:
    """Answers, streams, and what speaks no TLS."""
    files = (pems / "both.pem", None) if both else (pems / "a.crt", pems / "a.key")
    place = Place("127.0.0.1", 0, certificate=str(files[0]), key=files[1] and str(files[1]))
    context = ssl.create_default_context(cafile=str(pems / "a.crt"))
    with served(open_tiny(), place) as listener:
        assert listener.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=listener.url, verify=context) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            text = http.post("/v1/completions", json=BODY | {"stream": True, **LONG, "max_tokens": 400}).text
            assert text.endswith("[DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(listener.url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(listener.url + "/health")


def test_tls_while_loading(pems: Path) -> None:
    listener = Place("127.0.0.1", 0, certificate=str(pems / "a.crt"), key=str(pems / "a.key")).open()
    context = ssl.create_default_context(cafile=str(pems / "a.crt"))
    with LoadingResponder(listener.sockets, listener.tls), httpx.Client(base_url=listener.url, verify=context) as http:
        assert http.get("/health/live").status_code == 200
        assert http.get("/v1/models").status_code == 503
    listener.close()


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("a.crt", "b.key", "is not that of the certificate"),
        ("a.crt", "none.key", "--ssl-keyfile: .*none.key cannot be read"),
        ("none.crt", "a.key", "--ssl-certfile: .*none.crt cannot be read"),
        ("text.pem", "a.key", "has no certificate in PEM form"),
        ("a.crt", "text.pem", "has no private key in PEM form"),
        ("a.crt", None, "has no key: give its file with --ssl-keyfile"),
        (None, "a.key", "needs --ssl-certfile"),
        ("a.crt", "locked.key", "has a passphrase"),
        (".", "a.key", "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(certificate: str | None, key: str | None, message: str, pems: Path) -> None:
    named = [None if one is None else str(pems / one) for one in (certificate, key)]
    with pytest.raises(InvalidRequest, match=message):
        Place("127.0.0.1", 0, certificate=named[0], key=named[1]).open()


def test_a_client_that_never_reads(native_directory: Path, loop_clock: LoopClock) -> None:
    """Its call ends, and its pages are free, also while it could still make tokens; who reads slowly stays."""
    llm = LLM(str(native_directory), kv_bytes=32 << 20, threads=1)
    settings: Any = {"model_name": "tiny", "grace_s": 0.5, "write_timeout_s": 1000.0}
    server = make_server(llm, Settings(**settings), "127.0.0.1", 0)
    engine: AsyncEngine = server.config.app.state.engine  # pyright: ignore
    asked = b'{"prompt": "the", "max_tokens": 600, "ignore_eos": true, "n": 4, "stream": true, "logprobs": 5}'
    call = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    call += b"content-length: %d\r\n\r\n" % len(asked) + asked

    def called() -> socket.socket:
        """A client's socket with room for little of the answer, which has a megabyte."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.connect(listening.getsockname())
        client.sendall(call)
        return client

    with client_of(server):
        listening = server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)  # for its connections
        with called():
            eventually(lambda: engine.in_flight == 4)
            eventually(lambda: loop_clock.passes(100) or engine.in_flight == 0)
            eventually(lambda: llm.pool.num_used == llm.engine.cached_pages(llm.pool))
        with called() as slow:
            taken, slow_parts = slow.recv(1 << 13), 15
            while not taken.endswith(b"0\r\n\r\n"):
                if slow_parts:  # meanwhile the system takes nothing more from the server
                    slow_parts -= not llm.engine.num_running
                    loop_clock.passes(100)
                    time.sleep(0.02)
                part = slow.recv(1 << 13)
                assert part, "a slow reader was cut off"
                taken = taken[-64:] + part
        assert b"[DONE]" in taken
