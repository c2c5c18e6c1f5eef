"""Observability: metrics, the prefix cache, logs, spans."""

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import LONG, Serving, eventually, serving
from twostroke.api.llm import LLM
from twostroke.server.observability.logs import JsonFormatter, TextFormatter, request_id


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        yield one


def read(running: Serving) -> dict[str, float]:
    """Samples by name and labels, without buckets and creation times."""
    with running.http() as http:
        families = list(text_string_to_metric_families(http.get("/metrics").text))
    return {
        ":".join([sample.name.removeprefix("twostroke_"), *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels and not sample.name.endswith("_created")
    }


def test_every_metric(running: Serving) -> None:
    client, more = running.client, {"ignore_eos": True}
    for _ in range(2):
        client.completions.create(model="tiny", prompt=[7] * 40, max_tokens=5, extra_body=more)
    seen = read(running)
    assert seen["prefix_tokens_queried_total"] == 2 * 39
    assert seen["prefix_tokens_hit_total"] == 32
    assert seen["tokens_total:prompt"] == 80
    assert seen["tokens_total:computed"] == 48
    assert seen["tokens_total:output"] == 10
    assert seen["finished_requests_total:done"] == 2
    for name in ("time_to_first_token", "time_per_output_token", "request", "queue", "prefill", "decode"):
        assert seen[f"{name}_seconds_count"] == 2
        assert seen[f"{name}_seconds_sum"] > 0
    assert seen["inter_token_latency_seconds_count"] == 8
    parts = seen["queue_seconds_sum"] + seen["prefill_seconds_sum"]
    assert seen["time_to_first_token_seconds_sum"] == pytest.approx(parts)
    assert seen["step_tokens_sum:prefill"] == 48
    assert seen["step_tokens_sum:decode"] == 8
    assert seen["step_seconds_count:prefill"] == 2
    assert seen["step_seconds_count:decode"] == 8
    states = [seen[f"kv_pages:{state}"] for state in ("used", "cached", "free")]
    assert states[0] == 0
    assert states[1] == running.llm.model.index.num_pages > 0  # pyright: ignore[reportOptionalMemberAccess]
    assert sum(states) == running.llm.pool.num_pages
    assert seen["requests:running"] == seen["requests:waiting"] == seen["preemptions_total"] == 0


def test_aborted_and_failed_requests(running: Serving) -> None:
    stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG)
    next(iter(stream))
    busy = read(running)
    assert busy["requests:running"] == 1
    assert busy["kv_pages:used"] > 0
    stream.close()
    eventually(lambda: read(running)["aborted_requests_total"] == 1)
    assert read(running)["finished_requests_total:aborted"] == 1
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
    assert read(running)["errors_total:InvalidRequest"] == 1


def test_predicted_step_times(running: Serving, open_tiny: Callable[..., LLM]) -> None:
    """With an objective every step is predicted."""
    options: Any = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    running.client.completions.create(**options)
    assert not any(name.startswith("predicted") for name in read(running))
    with serving(open_tiny(itl_ms=20)) as paced:
        paced.client.completions.create(**options)
        seen = read(paced)
    for kind, steps in (("prefill", 1), ("decode", 4)):
        assert seen[f"predicted_step_seconds_count:{kind}"] == seen[f"step_seconds_count:{kind}"] == steps
        assert seen[f"predicted_step_seconds_sum:{kind}"] > 0


def test_turns_reuse_what_was_said_and_generated(running: Serving) -> None:
    """The second turn reuses the first turn's prompt and answer, in whole pages of 16 tokens.

    The answer's last token was sampled but never entered, so it is computed.
    """
    messages: Any = [{"role": "user", "content": "the fox " * 12}]
    (word,) = running.llm.tokenizer.encode(" fox", add_bos=False)
    options: Any = {"model": "tiny", "max_tokens": 60, "logit_bias": {str(word): 100}}
    first = running.client.chat.completions.create(messages=messages, **options)
    said = first.choices[0].message.content
    assert said == " fox" * 60
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then"}]
    second = running.client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == known // 16 * 16 > first.usage.prompt_tokens


def test_no_task_outlives_its_request(running: Serving) -> None:
    """After an abandoned stream, and after an answer that is read to the end."""
    with running.http() as http:
        before = read(running)["tasks"]
        stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG)
        next(iter(stream))
        busy = read(running)["tasks"]
        stream.close()
        http.post("/v1/completions", json={"prompt": "the", "max_tokens": 2})
    assert busy > before
    eventually(lambda: read(running)["tasks"] <= before)


def test_reset_prefix_cache(running: Serving) -> None:
    def cached() -> int:
        usage = running.client.completions.create(model="tiny", prompt=[7] * 40, max_tokens=2).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(), cached()] == [0, 32]
    with running.http() as http:
        assert http.post("/reset_prefix_cache").json() == {"pages": 2}
    assert [cached(), cached()] == [0, 32]


def test_logs(running: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """One line per request, with the client's request id, which the response repeats."""
    caplog.set_level(logging.INFO)
    with running.http() as http:
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "stream": True}
        assert (
            http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"}).headers["x-request-id"]
            == "mine-1"
        )
        odd = http.get("/health", headers={"x-request-id": "two words"}).headers["x-request-id"]
        assert odd.startswith("req_")
    eventually(lambda: len([record for record in caplog.records if record.message == "request"]) == 2)
    lines: list[Any] = [record.__dict__["facts"] for record in caplog.records if record.message == "request"]
    facts = next(line for line in lines if line["path"] == "/v1/completions")  # either may be written first
    assert facts["ms"] > 0
    assert {key: facts[key] for key in ("status", "prompt_tokens", "output_tokens")} == {
        "status": 200,
        "prompt_tokens": 2,
        "output_tokens": 3,
    }


def test_log_formats() -> None:
    record = logging.LogRecord("twostroke.x", logging.INFO, "", 0, "request of %s", ("me",), None)
    record.facts = {"status": 200}
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


def test_spans(running: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's span holds its stages, end to end."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    running.client.completions.create(model="tiny", prompt=[5, 6], max_tokens=3, extra_body={"ignore_eos": True})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole: Any = spans["request"]
    assert dict(whole.attributes)["gen_ai.usage.output_tokens"] == 3
    stages: list[Any] = [spans[name] for name in ("queue", "prefill", "decode")]
    assert [stage.parent.span_id for stage in stages] == [whole.context.span_id] * 3
    edges = [whole.start_time, *(edge for stage in stages for edge in (stage.start_time, stage.end_time))]
    assert edges == sorted(edges)
    assert edges[0] == edges[1]
