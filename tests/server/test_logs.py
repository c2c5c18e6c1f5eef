"""The log: a line for each call, for people or as JSON."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import LOCAL, Serving, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM
from twostroke.server.observability.logs import JsonFormatter, TextFormatter, request_id


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        yield one


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each call's line so far."""
    return [record.__dict__["fields"] for record in caplog.records if record.message == "request"]


def test_logs(running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """One line per request, with the client's request id, which the response repeats."""
    caplog.set_level(logging.INFO)
    with running.http() as http:
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "stream": True}
        assert (
            http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"}).headers["x-request-id"]
            == "mine-1"
        )
        odd = http.get("/version", headers={"x-request-id": "two words"}).headers["x-request-id"]
        assert odd.startswith("req_")
    eventually(lambda: len([record for record in caplog.records if record.message == "request"]) == 2)
    lines: list[Any] = [record.__dict__["fields"] for record in caplog.records if record.message == "request"]
    facts = next(line for line in lines if line["path"] == "/v1/completions")  # either may be written first
    assert facts["ms"] > 0
    assert {key: facts[key] for key in ("status", "prompt_tokens", "output_tokens")} == {
        "status": 200,
        "prompt_tokens": 2,
        "output_tokens": 3,
    }


def test_log_formats() -> None:
    record = logging.LogRecord("twostroke.x", logging.INFO, "", 0, "request of %s", ("me",), None)
    record.fields = {"status": 200}
    token = request_id.set("r1")
    try:
        line = json.loads(JsonFormatter().format(record))
        text = TextFormatter().format(record)
    finally:
        request_id.reset(token)
    assert {key: line[key] for key in ("level", "message", "request_id", "status")} == {
        "level": "info",
        "message": "request of me",
        "request_id": "r1",
        "status": 200,
    }
    assert text.endswith("INFO request of me id=r1 status=200")


def test_a_line_has_what_accounting_needs(running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """Model, tokens, cached tokens, time to the first token, finish reason."""
    caplog.set_level(logging.INFO)
    with running.http() as http:
        body = {"model": "tiny:plain", "prompt": [7] * 40, "max_tokens": 3, "ignore_eos": True}
        for _ in range(2):
            http.post("/v1/completions", json=body)
    eventually(lambda: len(lines(caplog)) == 2)
    line = lines(caplog)[1]
    assert line.pop("ms") >= line.pop("ttft_ms") > 0
    assert line == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "tiny:plain",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "output_tokens": 3,
        "finish_reason": "length",
    }


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_call_has_its_tokens(stream: bool, running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """A client that goes has used what was computed for it."""
    caplog.set_level(logging.INFO)
    with running.http() as http, running.leaving({"prompt": "the", "stream": stream, "n": 8, **LONG}):
        eventually(lambda: re.search(r'twostroke_tokens_total{kind="output"} [1-9]', http.get("/metrics").text))
    eventually(lambda: [line for line in lines(caplog) if line["path"] == "/v1/completions"])
    (line,) = (line for line in lines(caplog) if line["path"] == "/v1/completions")
    assert line["prompt_tokens"] > 0
    assert line["output_tokens"] > 0
    assert line["finish_reason"] == "abort"
    assert line["client" if stream else "status"] == ("gone" if stream else 499)


@LOCAL
def test_a_fault_of_a_handler_is_an_answer_of_500(
    running: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log and in the metrics: a client that has gone is 499."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(running.llm.tokenizer, "encode", lambda *_, **__: 1 // 0)
    with running.http() as http:
        assert http.post("/tokenize", json={"prompt": "a"}).status_code == 500
        eventually(lambda: lines(caplog))
        assert lines(caplog)[0]["status"] == 500
    with running.http() as http:
        assert 'twostroke_http_responses_total{status="500"} 1.0' in http.get("/metrics").text


def test_probes_are_for_debugging(running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running.http() as http:
        for path in ("/health", "/health/live", "/health/ready", "/version"):
            http.get(path)
    eventually(lambda: lines(caplog))
    assert [line["path"] for line in lines(caplog)] == ["/version"]


def test_a_line_names_the_key(open_tiny: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "keys").write_text("# tenants\nanna a-key\nb-key\n")
    with serving(open_tiny(), api_key_file=str(tmp_path / "keys")) as running, running.http() as http:
        for key in ("a-key", "b-key"):
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
    assert [line.get("key") for line in lines(caplog)] == ["anna", None]
