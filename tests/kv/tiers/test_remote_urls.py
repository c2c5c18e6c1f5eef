"""The remote tier's URL: passwords, which are never shown, TLS, and what is wrong with it."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kv.tiers.asking import Open, Server, find, read, reasons, write
from tests.kv.tiers.fake_server import fake_server
from tests.kv.tiers.pages import prompt
from twostroke.errors import KVError
from twostroke.kv.tiers.remote import RedisStore
from twostroke.kv.tiers.remote.circuit_breaker import IN_A_ROW
from twostroke.system.extras import install_command


def test_passwords(redis_server: Server, open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server, one = redis_server("--requirepass", "pass/word"), prompt(4)
    address = f"127.0.0.1:{server.port}"
    right = open_store(f"redis://:pass%2Fword@{address}/3")
    assert (write(right, one), read(right, one)) == (4, 4)
    assert right.where == f"redis://{address}/3"
    for wrong in (f"redis://:wrong-one@{address}/3", f"redis://someone:wrong-one@{address}/3", f"redis://{address}/3"):
        store = open_store(wrong)
        for _ in range(IN_A_ROW):
            assert (find(store, one), read(store, one), write(store, one)) == (0, 0, 0)
        assert not store.answering
        assert store.where == f"redis://{address}/3"
    assert "password" in caplog.text
    for secret in ("pass/word", "pass%2Fword", "wrong-one", "someone"):
        assert secret not in caplog.text


def test_a_server_that_repeats_what_it_does_not_understand(open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    with fake_server(lambda command: b"-ERR unknown command, args: " + b" ".join(command) + b"\r\n") as url:
        store = open_store(url.replace("//", "//somebody:s3cret@"))
        for _ in range(IN_A_ROW):
            assert find(store, prompt(1)) == 0
    assert "unknown command, args: AUTH *** ***" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    made, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    try:
        subprocess.run([*command, "-out", made, "-keyout", key], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return made, key


def test_tls(redis_server: Server, open_store: Open, certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    files = ["--tls-cert-file", made, "--tls-key-file", key, "--tls-ca-cert-file", made, "--tls-auth-clients", "no"]
    try:
        server = redis_server(*map(str, files), tls=True)
    except AssertionError as error:
        if "tls-port" in str(error):
            pytest.skip("this redis-server has no TLS")
        raise
    one = prompt(6, page_bytes=300_000)
    for options in (f"ssl_ca_certs={made}", "ssl_cert_reqs=none&ssl_check_hostname=false"):
        store = open_store(f"{server.url}?{options}")
        assert (write(store, one), read(store, one), find(store, one)) == (6, 6, 6)
        assert reasons(store) == {}
        assert len(store.connections.idle) == 1, "the connection was used again"
    for url in (server.url, server.url.replace("rediss", "redis")):
        stranger = open_store(url)
        for _ in range(IN_A_ROW):
            assert find(stranger, one) == 0, "a certificate that nobody vouches for, or no TLS"
        assert not stranger.answering


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "http://localhost",
        "redis://",
        "redis://:s3cret@",
        "redis://localhost:s3cret",
        "redis://:s3/cret@localhost",
        "redis://user:12/s3cret@localhost",
        "redis://localhost/s3cret",
        "redis://:s3cret@localhost:99999",
        "redis://:s3cret@localhost?s3cret=1",
        "redis://:s3cret@localhost?socket_timeout=s3cret",
        "rediss://:s3cret@localhost?ssl_cert_reqs=s3cret",
        "redis://[::1",
        "unix://",
        "redis://:s3cret@" + "x" * 70,
    ],
)
def test_a_wrong_url_is_told_at_once_without_its_password(url: str) -> None:
    with pytest.raises(KVError) as raised:
        RedisStore.open(url)
    text = str(raised.value)
    assert "remote tier" in text
    assert "\n" not in text
    assert "s3" not in text


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("redis://localhost", "redis://localhost:6379/0"),
        ("redis://user:p%40ss@db.example:6380/2", "redis://db.example:6380/2"),
        ("rediss://:secret@[::1]:6380?ssl_cert_reqs=none", "rediss://[::1]:6380/0"),
        ("redis://localhost?db=4&password=secret", "redis://localhost:6379/4"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
    ],
)
def test_where(url: str, where: str) -> None:
    assert RedisStore.open(url).where == where


def test_without_the_extra() -> None:
    code = "import sys; sys.modules['redis'] = None\nfrom twostroke.kv.tiers.tiers import open_tiers\nopen_tiers(kv_remote='redis://localhost')"
    root = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last == f"twostroke.errors.KVError: a remote tier needs redis: {install_command('redis')}"


def test_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file"))
    with pytest.raises(KVError, match="needs the user's key"):
        RedisStore.open("redis://localhost")
