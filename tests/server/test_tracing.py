"""Spans of OpenTelemetry belong to the call that they are of."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.conftest import FAILING, Serving, asgi, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "x-request-id": "mine-1"}
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return provider


@pytest.fixture
def exporter(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        yield one


def whole(exporter: InMemorySpanExporter) -> list[Any]:
    """The spans of prompts, without their stages."""
    return [span for span in exporter.get_finished_spans() if " " in span.name]


def test_a_span_holds_its_stages(running: Serving, exporter: InMemorySpanExporter) -> None:
    """End to end, in the caller's trace, with the attributes of the conventions."""
    with running.http() as http:
        answer = http.post("/v1/completions", json=BODY, headers=HEADERS).json()
    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    request = spans["text_completion tiny"]
    assert (request.context.trace_id, request.parent.span_id) == (TRACE, PARENT)
    assert request.kind == trace.SpanKind.SERVER
    assert request.status.status_code == trace.StatusCode.UNSET
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "twostroke",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "twostroke.request_id": "mine-1",
        "twostroke.outcome": "done",
        "twostroke.cached_tokens.pool": 0,
    }
    assert {name: request.attributes[name] for name in expected} == expected
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert [stage.parent.span_id for stage in stages] == [request.context.span_id] * 3
    assert {stage.context.trace_id for stage in stages} == {TRACE}
    edges = [request.start_time, *(edge for stage in stages for edge in (stage.start_time, stage.end_time))]
    assert edges == sorted(edges)
    assert edges[0] == edges[1]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", BODY | {"stream": True}, "text_completion"),
    ("/v1/chat/completions", {"model": "tiny", "max_tokens": 3, **CHAT}, "chat"),
    ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 3}, "chat"),
    ("/v1/messages", {"model": "tiny", "max_tokens": 3, **CHAT}, "chat"),
    ("/api/chat", {"model": "tiny", "options": {"num_predict": 3}, **CHAT}, "chat"),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "options": {"num_predict": 3}}, "text_completion"),
    ("/v1/contexts", {"prompt": [5] * 40, "name": "a"}, "text_completion"),
    ("/attention", {"tokens": [5, 6, 7]}, "text_completion"),
]


def test_spans_of_every_kind_of_call(running: Serving, exporter: InMemorySpanExporter) -> None:
    """Each is in its caller's trace, and knows the call's id."""
    with running.http() as http:
        for number, (path, body, operation) in enumerate(CALLS, 1):
            headers = {"traceparent": f"00-{number:032x}-{PARENT:016x}-01", "x-request-id": f"call-{number}"}
            sent = (
                {key: value for key, value in body.items() if key != "prompt"} if CHAT.items() <= body.items() else body
            )
            answer = http.post(path, json=sent, headers=headers)
            assert answer.status_code == 200, (path, answer.text)
            eventually(lambda number=number: len(whole(exporter)) == number)
            span = whole(exporter)[-1]
            assert span.context.trace_id == number, path
            assert span.attributes["twostroke.request_id"] == f"call-{number}"
            assert span.attributes["gen_ai.operation.name"] == operation


def test_what_ends_early_is_an_error(running: Serving, exporter: InMemorySpanExporter, failing_program: None) -> None:
    """A deadline, a client that goes, and a prompt that fails."""
    with running.http() as http:
        assert http.post("/v1/completions", json=BODY | {"timeout": 1e-9, **LONG}).status_code == 504
        stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG)
        next(iter(stream))
        stream.close()
        eventually(lambda: len(whole(exporter)) == 2)
        assert http.post("/v1/completions", json={"prompt": FAILING}).status_code == 400
        eventually(lambda: len(whole(exporter)) == 3)
    late, gone, failed = whole(exporter)
    assert [span.status.status_code for span in (late, gone, failed)] == [trace.StatusCode.ERROR] * 3
    kinds = ["timeout", "client_closed_request", "InvalidRequest"]
    assert [span.attributes["error.type"] for span in (late, gone, failed)] == kinds
    assert [span.attributes["twostroke.outcome"] for span in (late, gone, failed)] == ["aborted", "aborted", "error"]
    reasons = [("abort",), ("abort",), ("error",)]
    assert [span.attributes["gen_ai.response.finish_reasons"] for span in (late, gone, failed)] == reasons
    assert "timeout" in late.status.description


def test_inside_the_span_of_an_instrumentation(
    open_tiny: Callable[..., LLM], provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """The span that is current when the call arrives is the parent, whatever the headers say."""

    async def call() -> tuple[int, int]:
        async with asgi(open_tiny()) as client:
            with provider.get_tracer("web").start_as_current_span("POST") as outer:
                answer = await client.post("/v1/completions", json=BODY, headers=HEADERS)
        return answer.status_code, outer.get_span_context().span_id

    status, parent = asyncio.run(call())
    assert status == 200
    (request,) = whole(exporter)
    assert request.parent.span_id == parent
    assert request.kind == trace.SpanKind.INTERNAL
