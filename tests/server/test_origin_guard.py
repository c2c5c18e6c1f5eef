"""A browser's page of another site reaches no server that has no key."""

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM
from twostroke.server.http.origin_guard import OriginGuard

BODY = {"prompt": "the", "max_tokens": 1}
ROUTES = (
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/watch"),
    ("GET", "/methods"),
    ("GET", "/page/main.js"),
    ("GET", "/v1/models"),
    ("GET", "/v1/contexts"),
    ("GET", "/api/tags"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/contexts/a"),
    ("POST", "/v1/contexts"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/api/chat"),
    ("POST", "/tokenize"),
    ("POST", "/reset_prefix_cache"),
    ("HEAD", "/"),
    ("OPTIONS", "/v1/models"),
)
FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io:80",
    "192.168.1.5",
    "",
    "[::2]",
)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_is_reached_by_another_name(method: str, path: str, server: Serving) -> None:
    """DNS rebinding: the browser takes this server for one of the page's own name."""
    body = BODY if method == "POST" else None
    with server.http() as http:
        for host in FOREIGN:
            with http.stream(method, path, headers={"host": host}, json=body) as answer:
                assert answer.status_code == 403, host  # before it is read: a feed has no end
                answer.read()
            if method != "HEAD":
                text = answer.json()["error"]
                message = text if isinstance(text, str) else text["message"]
                assert "--allowed-host" in message
                assert "\n" not in message


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:99", "[::1]", "[::1]:8000"]
)
def test_names_of_the_loopback_interface(host: str, server: Serving) -> None:
    with server.http() as http:
        assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_every_host_header_counts(server: Serving) -> None:
    """Of two, and of one that a whole URL in the request line replaces."""
    port = int(server.url.rpartition(":")[2])
    sent = (
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n", (b"400", b"403")),
        (b"GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n", (b"403",)),
        (b"GET http://localhost/health HTTP/1.1\r\nhost: localhost\r\n", (b"200",)),
        (b"GET http://localhost/%68ealth HTTP/1.1\r\nhost: localhost\r\n", (b"200",)),
        (b"GET http://%E2%82%AC/health HTTP/1.1\r\nhost: localhost\r\n", (b"403",)),  # no name of Latin-1
    )
    for head, statuses in sent:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(head + b"connection: close\r\n\r\n")
            assert sock.makefile("rb").readline().split()[1] in statuses, head


CROSS_SITE: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},  # another port is another site's server
    {"origin": "http://["},  # no URL
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
]


@pytest.mark.parametrize("headers", CROSS_SITE)
@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/completions", "/v1/contexts", "/tokenize"])
def test_another_sites_page_may_not_post(headers: dict[str, str], path: str, server: Serving) -> None:
    with server.http() as http:
        answer = http.post(path, content=json.dumps(BODY), headers={"content-type": "application/json"} | headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site")


def test_the_servers_own_page_and_other_programs_may_post(server: Serving) -> None:
    own: list[dict[str, str]] = [{}, {"origin": server.url}, {"origin": server.url, "sec-fetch-site": "same-origin"}]
    with server.http() as http:
        for headers in [*own, {"sec-fetch-site": "none"}]:
            assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
            assert http.post("/reset_prefix_cache", headers=headers).status_code == 200


def test_allowed_hosts_and_origins(open_tiny: Callable[..., LLM]) -> None:
    options: dict[str, Any] = {"allowed_hosts": ("box.local",), "cors": ("https://chat.example",)}
    with serving(open_tiny(), **options) as running, running.http() as http:
        for host in ("box.local", "Box.Local:8000", "localhost"):
            assert http.get("/v1/models", headers={"host": host}).status_code == 200
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        for origin, status in (("https://chat.example", 200), ("https://evil.example", 403)):
            assert http.post("/v1/completions", json=BODY, headers={"origin": origin}).status_code == status


def test_a_key_needs_no_guard(open_tiny: Callable[..., LLM]) -> None:
    """No page knows it, and a server with a key may have any name."""
    headers = {"authorization": "Bearer secret", "host": "llm.example", "origin": "https://chat.example"}
    with serving(open_tiny(), api_key="secret") as running, running.http() as http:
        assert http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert http.get("/health", headers={"host": "10.0.0.7:8000"}).status_code == 200


def status(guard: OriginGuard, method: str = "GET", **headers: str) -> int:
    refusal = guard.refusal(
        method, "/v1/models", Headers({name.replace("_", "-"): value for name, value in headers.items()})
    )
    return 200 if refusal is None else refusal.status


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_addresses(address: str) -> None:
    """Which names lead there is not known: they are checked if some are given. Other sites' posts are refused."""
    open, named = OriginGuard.for_address(address, (), ()), OriginGuard.for_address(address, ("llm.lan",), ())
    assert status(open, host="any.name") == 200
    assert status(open, "POST", host="any.name", origin="https://evil.example") == 403
    assert status(open, "POST", host="any.name", origin="http://any.name") == 200
    assert status(named, host="evil.example") == 403
    for host in ("llm.lan:8000", "localhost", "192.0.2.1:8000", "[2001:db8::1]"):  # an address cannot be rebound
        assert status(named, host=host) == 200


def test_every_host_may_be_allowed() -> None:
    assert status(OriginGuard.for_address("127.0.0.1", ("*",), ()), host="evil.example") == 200


def test_a_call_that_a_proxys_client_sends(server: Serving) -> None:
    """A whole URL in the request line (RFC 9112, 3.2.2), with a query and without a path."""
    port = int(server.url.rpartition(":")[2])
    for target, found in (
        ("/v1/models?a=1", b'"tiny"'),
        ("", b"Twostroke is running"),
        ("/nowhere", b"path_not_found"),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(
                f"GET http://localhost:{port}{target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            )
            assert found in sock.makefile("rb").read(), target


def test_two_lengths_are_refused(server: Serving) -> None:
    """RFC 9112, 6.1: a request with both may be smuggled; the connection is closed after the answer."""
    port = int(server.url.rpartition(":")[2])
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    lengths = (
        "content-length: 2\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 2\r\n",
    )
    for both in lengths:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
            sock.sendall(
                f"{head}{both}\r\n2\r\n{{}}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
            )
            answer = sock.makefile("rb").read()
        assert answer.split()[1] == b"400"
        assert answer.count(b"HTTP/1.1") == 1, "nothing after it is read"
    assert httpx.get(f"{server.url}/health").status_code == 200
