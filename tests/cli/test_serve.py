"""`twostroke serve` as a process: it prints its address, answers, and ends on SIGTERM."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

TECHNIQUE = """
from dataclasses import dataclass

from twostroke import Decode, Method, Prefill


@dataclass(frozen=True)
class Twice(Method, name="twice"):
    def program(self, prompt):
        yield Decode((yield Prefill(prompt * 2)))
"""


DOUBLED = {"name": "repeat", "keep": "all"}


def test_serve(tiny: str, tmp_path: Path) -> None:
    """With a technique from a file outside the tree, by its name and by the model's alias."""
    (tmp_path / "mine.py").write_text(TECHNIQUE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", tiny, "--threads", "1", "--kv-bytes", "16MiB", "--port", port, "--served-name", "tiny"]
    options += ["--method-module", tmp_path / "mine.py"]
    command = [sys.executable, "-m", "twostroke", "serve", *map(str, options), "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 40
            while True:
                try:
                    assert httpx.get(f"{url}/health").status_code == 200
                    break
                except httpx.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.05)
            body = {"model": "tiny", "prompt": "the", "max_tokens": 8, "temperature": 0}
            plain = httpx.post(f"{url}/v1/completions", json=body).json()
            assert plain["usage"]["prompt_tokens"] == 1
            doubled = httpx.post(f"{url}/v1/completions", json=body | {"method": DOUBLED}).json()
            assert doubled["choices"][0]["text"] != plain["choices"][0]["text"]
            assert "tiny:twice" in [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]
            for changes in ({"method": "twice"}, {"method": {"name": "twice"}}, {"model": "tiny:twice"}):
                made = httpx.post(f"{url}/v1/completions", json=body | changes).json()
                assert made["choices"][0]["text"] == doubled["choices"][0]["text"]
        finally:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    assert f"127.0.0.1:{port}" in errors
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    line, *_ = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (line["status"], line["prompt_tokens"], line["level"]) == (200, 1, "info")
    assert "Traceback" not in errors


@pytest.mark.parametrize("options", [("--log-format", "xml"), ("--itl-ms", "0"), ("--port", "70000")])
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
