"""`twostroke serve` as a process: it prints its address, answers, and ends on SIGTERM."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import eventually
from twostroke.cli import serve_options
from twostroke.cli.engine_opening import opening_of, replicas_of
from twostroke.cli.options import PositionalModelOptions
from twostroke.cli.serve_options import StepOptions, require_replicas
from twostroke.errors import InvalidRequest
from twostroke.server.engine_process.messages import OpenOptions
from twostroke.system.limits import usable_cores

TECHNIQUE = """
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill


@dataclass(frozen=True)
class Twice(Method, name="twice"):
    def program(self, prompt):
        yield Decode((yield Prefill(prompt * 2)))
"""


@pytest.fixture
def tiny(native_directory: Path) -> str:
    return str(native_directory)


DOUBLED = {"name": "repeat", "keep": "all"}


def test_serve(tiny: str, tmp_path: Path) -> None:
    """With a technique from a file outside the tree, by its name and by the model's alias."""
    (tmp_path / "mine.py").write_text(TECHNIQUE)
    options = ["--model", tiny, "--threads", "1", "--kv-bytes", "16MiB", "--port", "0", "--served-name", "tiny"]
    options += ["--method-module", tmp_path / "mine.py"]
    command = [sys.executable, "-m", "twostroke", "serve", *map(str, options), "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, started = address_of(process)
            wait_for(process, url, 200)
            body = {"model": "tiny", "prompt": "the", "max_tokens": 8, "temperature": 0}
            plain = httpx.post(f"{url}/v1/completions", json=body).json()
            assert plain["usage"]["prompt_tokens"] == 1
            doubled = httpx.post(f"{url}/v1/completions", json=body | {"method": DOUBLED}).json()
            assert doubled["choices"][0]["text"] != plain["choices"][0]["text"]
            assert "twice" in [one["name"] for one in httpx.get(f"{url}/methods").json()["methods"]]
            for changes in ({"method": "twice"}, {"method": {"name": "twice"}}, {"model": "tiny:twice"}):
                made = httpx.post(f"{url}/v1/completions", json=body | changes).json()
                assert made["choices"][0]["text"] == doubled["choices"][0]["text"]
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    errors = started + errors
    lines = [json.loads(line) for line in errors.splitlines()]  # each, the first ones too
    assert lines[0]["message"].startswith("loading ")
    line, *_ = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (line["status"], line["prompt_tokens"], line["level"]) == (200, 1, "info")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "options", [("--log-format", "xml"), ("--itl-ms", "0"), ("--itl-ms", "soon"), ("--port", "70000")]
)
def test_wrong_options(options: tuple[str, str], tiny: str, run: Callable[..., Any]) -> None:
    result = run("serve", "--model", tiny, *options)
    assert result.exit_code == 2
    assert options[0] in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-queued", "-1"), "max_queued must be an integer of at least 0, not -1"),
        (("--grace", "-1"), "grace_s must be a number of at least 0, not -1.0"),
        (("--timeout", "0"), "timeout_s must be a number above 0, or None, not 0.0"),
    ],
)
def test_settings_out_of_range(options: tuple[str, str], message: str, tiny: str, run: Callable[..., Any]) -> None:
    result = run("serve", "--model", tiny, *options)
    assert (result.exit_code, result.stderr) == (1, f"error: {message}\n")


@contextlib.contextmanager
def serving(tiny: str, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`serve` as a process, from its beginning, and its address."""
    command = [sys.executable, "-m", "twostroke", "serve", "--model", tiny, "--kv-bytes", "16MiB", "--threads", "1"]
    with subprocess.Popen([*command, "--port", "0", *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, address_of(process)[0]
        finally:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Where a server listens, as its first lines say, and these lines."""
    assert process.stderr is not None
    lines = ""
    for line in process.stderr:
        lines += line
        if (found := re.search(r"http://127\.0\.0\.1:\d+", line)) is not None:
            return found[0], lines
    raise AssertionError(f"it has ended: {lines}")


def wait_for(process: subprocess.Popen[str], url: str, status: int, path: str = "/health") -> httpx.Response:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if (answer := httpx.get(url + path)).status_code == status:
                return answer
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


def read_line(process: subprocess.Popen[str], text: str) -> str:
    """The next line on stderr with a text."""
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


# No answer is soon over.
PAUSES = """
import time
from twostroke.engine.engine import Engine

step = Engine.step
Engine.step = lambda self: (time.sleep(0.05), step(self))[1]
"""
MAIN = "from twostroke.cli import main; main()"
# Loads for as long as the test wants.
SLOW = """
import os, time
while not os.path.exists({path!r}):
    time.sleep(0.01)
"""


# Both end it by the same code, so of what may follow the first signal some is seen with one, and some with the other.
AT_NIGHT = pytest.mark.nightly
BY_CTRL_C = pytest.mark.parametrize("sig", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=AT_NIGHT)])
BY_A_MANAGER = pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=AT_NIGHT)])


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(sig: signal.Signals, tiny: str) -> None:
    """The first lets requests finish, and the exit code is 0."""
    with serving(tiny, "--itl-ms", "off") as (process, url):
        wait_for(process, url, 200)
        process.send_signal(sig)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    assert "Traceback" not in errors
    assert "no ITL objective" in errors


@BY_CTRL_C
def test_a_second_signal_ends_it_at_once(sig: signal.Signals, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "pauses.py").write_text(PAUSES + TECHNIQUE)
    options = ("--method-module", str(tmp_path / "pauses.py"), "--itl-ms", "off")
    with serving(tiny, *options, "--grace", "100") as (process, url):
        wait_for(process, url, 200)
        body = {"prompt": "the", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # a dropped iterator closes the connection
            next(lines)
            process.send_signal(sig)
            read_line(process, "Shutting down")
            process.send_signal(sig)
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + sig
    assert "Traceback" not in errors


@BY_A_MANAGER
def test_while_it_loads(sig: signal.Signals, tiny: str, tmp_path: Path) -> None:
    """It says what it will do, answers 503, and a signal ends it at once."""
    (tmp_path / "slow.py").write_text(SLOW.format(path=str(tmp_path / "go")) + TECHNIQUE)
    options = ("--method-module", str(tmp_path / "slow.py"), "--itl-ms", "off")
    with serving(tiny, *options) as (process, url):
        answer = wait_for(process, url, 503)
        assert answer.json()["error"]["code"] == "loading"
        assert int(answer.headers["retry-after"]) > 0
        process.send_signal(sig)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (128 + sig, "")


def test_it_answers_when_it_has_loaded(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW.format(path=str(tmp_path / "go")) + TECHNIQUE)
    options = ("--method-module", str(tmp_path / "slow.py"), "--itl-ms", "off")
    with serving(tiny, *options) as (process, url):
        wait_for(process, url, 503)
        (tmp_path / "go").touch()
        wait_for(process, url, 200)


def test_a_taken_port(tiny: str, run: Callable[..., Any]) -> None:
    """One line, before anything is loaded."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run("serve", "--model", "/nowhere/at/all", "--port", port)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: cannot listen at 127.0.0.1:{port}: the port is taken: ")
    assert result.stderr.count("\n") == 1


def test_an_itl_objective_is_chosen(tiny: str) -> None:
    """The tiny model's steps are so short that it is the least."""
    with serving(tiny) as (process, _):
        assert "ITL objective 100 ms (chosen; --itl-ms changes it)" in read_line(process, "objective")
    with serving(tiny, "--itl-ms", "250") as (process, _):
        assert "ITL objective 250 ms\n" in read_line(process, "objective")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/nowhere/at/all"), "nowhere"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys, cannot be read"),
        (("--api-key", ""), "api_key must be a text that is not empty"),
        (("--host", "192.0.2.1"), "cannot listen at 192.0.2.1"),
        (("--grace", "-1"), "grace_s must be"),
    ],
)
def test_errors_of_the_start_are_json_too(options: tuple[str, str], message: str, tiny: str) -> None:
    command = [sys.executable, "-m", "twostroke", "serve", "--model", tiny, "--log-format", "json", "--port", "0"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert ended.returncode == 1
    assert lines[-1]["level"] == "error"
    assert message in lines[-1]["message"]


def test_it_lives_while_it_loads(tiny: str, tmp_path: Path) -> None:
    """Alive and not ready: a restart would only make it load again."""
    (tmp_path / "slow.py").write_text(SLOW.format(path=str(tmp_path / "go")) + TECHNIQUE)
    with serving(tiny, "--method-module", str(tmp_path / "slow.py"), "--itl-ms", "off") as (process, url):
        wait_for(process, url, 503)
        live = httpx.get(f"{url}/health/live")
        assert (live.status_code, live.json()["live"], live.json()["ready"]) == (200, True, False)
        for path in ("/health", "/health/ready", "/health/liveX", "/v1/models", "/x/health/live"):
            assert httpx.get(url + path).status_code == 503
        assert httpx.post(f"{url}/health/live").status_code == 503
        head = httpx.head(f"{url}/health/live")
        assert (head.status_code, head.content) == (200, b"")
        (tmp_path / "go").touch()
        wait_for(process, url, 200, "/health/ready")


@BY_A_MANAGER
def test_a_second_signal_ends_what_serves_on(sig: signal.Signals, tiny: str) -> None:
    with serving(tiny, "--itl-ms", "off", "--drain-delay", "100") as (process, url):
        wait_for(process, url, 200)
        process.send_signal(sig)
        wait_for(process, url, 503, "/health/ready")
        process.send_signal(sig)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + sig


def test_the_engine_never_outlives_the_server(tiny: str) -> None:
    """Whatever ends the server."""
    with serving(tiny) as (process, url):
        line = read_line(process, "its engine")
        found = re.search(r"its engine (\d+)", line)
        assert found is not None
        wait_for(process, url, 200)
        process.kill()
        process.wait()
        status = Path(f"/proc/{found[1]}/status")
        eventually(lambda: not status.exists() or "(zombie)" in status.read_text())


def test_several_models(tiny: str, tmp_path: Path) -> None:
    """One from an argument, one by --also, and one of a file with options of its own."""
    also = tmp_path / "other"
    shutil.copytree(tiny, also)
    (tmp_path / "models.toml").write_text(f'[small]\nmodel = "{tiny}"\nkv-bytes = "8MiB"\n')
    options = [tiny, "--also", also, "--models", tmp_path / "models.toml", "--max-loaded", 1, "--threads", 1]
    command = [sys.executable, "-m", "twostroke", "serve", *map(str, options), "--kv-bytes", "16MiB", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, _ = address_of(process)
            wait_for(process, url, 200)
            names = [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
            assert names == [Path(tiny).name, "other", "small"]
            texts: set[str] = set()
            for name in names:
                body = {"model": name, "prompt": "the", "max_tokens": 8, "temperature": 0}
                texts.add(httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"])
            assert len(texts) == 1
            assert httpx.get(f"{url}/health").json()["models"][names[0]] == "unloaded"
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_replicas_that_cannot_be(tiny: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    for count in (0, -1, cores + 1):
        refused = run("serve", tiny, "--replicas", count, "--check-config")
        assert refused.exit_code == 1
        assert f"must be from 1 to {cores}" in refused.stderr.replace("\n", " ")
    assert run("serve", tiny, "--replicas", 1, "--check-config").exit_code == 0
    monkeypatch.setattr(serve_options, "usable_cores", lambda: 8)
    for changes, several, message in (
        ({}, True, "for one model"),
        ({"tp": 2}, False, "--replicas and --tp"),
        ({"device": "cuda:1"}, False, "of a CPU"),
        ({"backend": "triton"}, False, "of a CPU"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            require_replicas(8, PositionalModelOptions(model=tiny, **changes), several)


def test_replicas_share_the_machine(tiny: str) -> None:
    """Cores, threads and memory, each its part."""
    options = PositionalModelOptions(model=tiny, spare_bytes=0)
    opened: list[OpenOptions] = []

    class Waiting:
        def open(self, given: OpenOptions) -> None:
            opened.append(given)

    opening = opening_of(options, StepOptions(), 1 << 20, (), "text")
    for launch in replicas_of(opening, 1, cast(Any, Waiting)) + replicas_of(opening, 2, cast(Any, Waiting)):
        launch(0)
    alone, first, second = (one.arguments for one in opened)
    assert alone["options"].threads == usable_cores()
    assert first["options"].threads == second["options"].threads == max(1, usable_cores() // 2)
    assert first["kv_bytes"] == second["kv_bytes"] < alone["kv_bytes"]
    assert second["spare_bytes"] == first["spare_bytes"] + first["kv_bytes"]
    assert not set(opened[1].cores) & set(opened[2].cores)
    assert set(opened[1].cores) | set(opened[2].cores) <= os.sched_getaffinity(0)


def test_several_models_that_cannot_be(tiny: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    wrong = tmp_path / "models.toml"
    for text, message in (
        ("", "there is no model"),
        ("a = 1", "a must be a table"),
        ('[""]\nmodel = "a"', "a table has no name"),
        ("[a]\nport = 1", "there is no option port"),
        ("[", "is not TOML"),
        ('[a]\nkv-bytes = -1\nmodel = "x"', "kv_bytes must be"),
    ):
        wrong.write_text(text)
        refused = run("serve", tiny, "--models", wrong, "--check-config")
        assert refused.exit_code == 1
        assert message in refused.stderr
    assert "--served-name" in run("serve", tiny, "--also", tiny, "--served-name", "x", "--check-config").stderr
    assert "model_name" in run("serve", tiny, "--served-name", "", "--check-config").stderr
    assert run("serve", tiny, "--also", "b", "--max-loaded", 0, "--check-config").exit_code != 0
    for given in (("--max-loaded", 3), ("--unload-after", 5)):
        assert f"{given[0]} is for several models" in run("serve", tiny, *given, "--check-config").stderr
    for same in ((tiny, "--also", "b"), ("--model", tiny, "--model=b"), ("-m", tiny, "-m", "b")):
        fine = run("serve", *same, "--check-config")
        assert f"{tiny}, b would be served" in fine.stderr.replace("\n", "")
