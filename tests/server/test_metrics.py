"""Metrics, and the prefix cache that they show."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import FAILING, Serving, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM


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


def test_snapshots_of_states(tiny_llm: Callable[..., LLM]) -> None:
    """Two prompts that part where no snapshot is: the second one finds 96 tokens of K and V, computes all, and leaves
    a snapshot there beside those of both ends."""
    with serving(tiny_llm("qwen3_5")) as running:
        for last in (7, 8):
            running.client.completions.create(model="tiny", prompt=[7] * 100 + [last] * 40, max_tokens=2)
        seen, pool, index = read(running), running.llm.pool, running.llm.model.index
        assert index is not None
        assert seen["prefix_tokens_hit_total"] == 0
        assert seen["prefix_tokens_unusable_total"] == 96
        assert seen["kv_snapshots"] == 3
        assert seen["kv_snapshot_bytes"] == 3 * pool.snapshot_pages * pool.page_bytes >= 3 * pool.geometry.state_bytes
        assert seen["kv_snapshots_evicted_total"] == 0
        index.evict(pool.num_pages)
        seen = read(running)
        assert (seen["kv_snapshots"], seen["kv_snapshots_evicted_total"]) == (0, 3)


def test_aborted_and_failed_requests(running: Serving, failing_program: None) -> None:
    stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG)
    next(iter(stream))
    busy = read(running)
    assert busy["requests:running"] == 1
    assert busy["kv_pages:used"] > 0
    stream.close()
    eventually(lambda: read(running)["aborted_requests_total"] == 1)
    assert read(running)["finished_requests_total:aborted"] == 1
    with running.http() as http:
        assert http.post("/v1/completions", json={"prompt": FAILING}).status_code == 400
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


def test_series_exist_before_their_first_event(running: Serving) -> None:
    """An alert on an increase sees the first one; and nothing is exported that nobody asked for."""
    with running.http() as http:
        text = http.get("/metrics").text
    for line in (
        'finished_requests_total{outcome="aborted"}',
        'finished_requests_total{outcome="error"}',
        'rejected_requests_total{reason="queue_full"}',
        'errors_total{error="OutOfPages"}',
        'finish_reasons_total{reason="length"}',
        'http_responses_total{status="503"}',
        'tokens_total{kind="output"}',
    ):
        assert f"twostroke_{line} 0.0\n" in text
    assert "_created" not in text
    for name in ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"):
        assert f"\n{name} " in text


def test_what_is_served_is_named(running: Serving, open_tiny: Callable[..., LLM]) -> None:
    """A fleet whose bits are not equal is one with several identities."""

    def identity(running: Serving) -> dict[str, str]:
        with running.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
        return next(one.samples[0].labels for one in families if one.name == "twostroke_build_info")

    seen = identity(running)
    assert seen == {
        "version": version("twostroke"),
        "model": running.llm.name,
        "backend": running.llm.backend.label,
        "identity": running.llm.model.id,
    }
    with serving(open_tiny(page_size=32)) as other:
        assert identity(other)["identity"] != seen["identity"]


def test_how_choices_ended_and_calls_were_answered(running: Serving) -> None:
    """Each choice by its reason, each call by its status."""
    stream = running.client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG)
    next(iter(stream))
    stream.close()
    with running.http() as http:
        body = {"prompt": [5, 6], "max_tokens": 2, "n": 3, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "timeout": 1e-9, **LONG}).status_code == 504
        assert http.post("/v1/completions", json={"model": "other", "prompt": "a"}).status_code == 404
        http.get("/nowhere")
    eventually(lambda: read(running)["finish_reasons_total:abort"] == 2)
    seen = read(running)
    assert seen["finish_reasons_total:length"] == 3
    assert (seen["http_responses_total:504"], seen["http_responses_total:404"]) == (1, 2)
    assert seen["http_responses_total:200"] > 2


def test_openmetrics_where_it_is_asked_for(running: Serving) -> None:
    asked = {"accept": "application/openmetrics-text; version=1.0.0"}
    with running.http() as http:
        plain, open = http.get("/metrics"), http.get("/metrics", headers=asked)
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert open.text.endswith("# EOF\n")
    families = {family.name: family for family in openmetrics_families(open.text)}
    assert families["twostroke_preemptions"].type == "counter"
