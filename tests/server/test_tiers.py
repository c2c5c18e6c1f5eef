"""Tiers over HTTP: where a prompt's tokens were found, in every API, and what Prometheus sees."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.kv.tiers.memory_store import MemoryStore, Pages
from tests.server.conftest import Serving, serving
from tests.server.test_metrics import read
from twostroke.api import open_engine
from twostroke.api.llm import LLM
from twostroke.engine.forecast import Forecast
from twostroke.kv.tiers.tiers import Tiers
from twostroke.server.observability.collectors import TIER_REASONS

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 4}]
PROMPT = [7, 8, 9, 10] * 12 + [5, 6]
OPTIONS: Any = {"max_tokens": 3, "temperature": 0}
NOTHING = {"pool": 0, "host": 0, "disk": 0, "remote": 0}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT, **OPTIONS}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **OPTIONS}),
    "responses": ("/v1/responses", {"input": MESSAGES, "max_output_tokens": 3, "temperature": 0}),
    "anthropic": ("/v1/messages", {"model": "tiny", "messages": MESSAGES, **OPTIONS}),
    "ollama": ("/api/chat", {"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 3}}),
}


@pytest.fixture
def open_over(open_tiny: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Opens a model over given tiers. Loading is always predicted to be quicker than computing."""
    monkeypatch.setattr(Forecast, "prefill", lambda *_: lambda context, count: 1.0 * count)

    def opened(tiers: Tiers, **options: Any) -> LLM:
        tiers.first_touch_s = 0.0
        monkeypatch.setattr(open_engine, "open_tiers", lambda *_: tiers)
        return open_tiny(**options)

    return opened


def usage_of(name: str, body: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """The tokens of a prompt, how many of them were cached, and those by tier."""
    usage = body.get("usage", {})
    match name:
        case "completions" | "chat":
            details = usage["prompt_tokens_details"]
            return usage["prompt_tokens"], details["cached_tokens"], details["cached_tokens_by_tier"]
        case "responses":
            details = usage["input_tokens_details"]
            return usage["input_tokens"], details["cached_tokens"], details["cached_tokens_by_tier"]
        case "anthropic":
            cached = usage["cache_read_input_tokens"]
            return usage["input_tokens"] + cached, cached, usage["cached_tokens_by_tier"]
        case _:
            by_tier = body["cached_tokens_by_tier"]
            return body["prompt_eval_count"], sum(by_tier.values()), by_tier


def ask(running: Serving, name: str, **more: Any) -> Any:
    path, body = CALLS[name]
    with running.http() as http:
        answer = http.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        return answer


@pytest.mark.parametrize("name", CALLS)
def test_usage_says_where_tokens_were_found(open_over: Callable[..., LLM], name: str) -> None:
    """Computed; in the pool; and after a restart on disk."""
    pages: Pages = {}
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        first = usage_of(name, ask(running, name).json())
        again = usage_of(name, ask(running, name).json())
        assert llm.tiers.flush()
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        restarted = usage_of(name, ask(running, name).json())
    prompt, whole = first[0], (first[0] - 1) // 16 * 16
    assert whole > 0
    assert first == (prompt, 0, NOTHING)
    assert again == (prompt, whole, NOTHING | {"pool": whole})
    assert restarted == (prompt, whole, NOTHING | {"disk": whole})


def test_a_stream_says_it_too(open_over: Callable[..., LLM]) -> None:
    with open_over(Tiers()) as llm, serving(llm) as running:
        ask(running, "chat")
        streamed = ask(running, "chat", stream=True, stream_options={"include_usage": True}).text
    assert '"cached_tokens_by_tier":{"pool":' in streamed


def test_a_repeated_prompt_counts_once(open_over: Callable[..., LLM]) -> None:
    """By tier and in sum, no more tokens were found than the prompt has."""
    pages: Pages = {}
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        ask(running, "completions", prompt=PROMPT * 2)
        assert llm.tiers.flush()
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        prompt, cached, by_tier = usage_of("completions", ask(running, "completions", method="repeat").json())
    assert (prompt, cached) == (len(PROMPT), len(PROMPT))
    assert by_tier == NOTHING | {"disk": len(PROMPT)}


def test_metrics_of_a_disk(open_over: Callable[..., LLM]) -> None:
    """A prompt is written, and after a restart it is found: pages, bytes, lookups, room and tokens agree."""
    pages: Pages = {}
    whole = (len(PROMPT) - 1) // 16
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        size = llm.pool.page_bytes
        ask(running, "completions")
        assert llm.tiers.flush()
        seen = read(running)
        assert seen["tier_lookups_total:hit:disk"] == 0
        assert seen["tier_lookups_total:miss:disk"] == whole
        assert seen["tier_pages_total:out:disk"] == whole
        assert seen["tier_bytes_total:out:disk"] == seen["tier_used_bytes:disk"] == whole * size
        assert seen["tier_pages_total:in:disk"] == 0
    with open_over(Tiers(8 << 20, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        ask(running, "completions")
        seen = read(running)
    assert seen["tier_lookups_total:hit:disk"] == seen["tier_pages_total:in:disk"] == whole
    assert seen["tier_lookups_total:miss:disk"] == 0
    assert seen["tier_bytes_total:in:disk"] == whole * size
    assert [seen[f"tier_snapshots_total:{direction}:disk"] for direction in ("in", "out")] == [0, 0]
    assert seen["tier_seconds_total:in:disk"] > 0
    assert seen["tier_limit_bytes:disk"] == 1 << 40
    assert seen["tier_limit_bytes:host"] == 8 << 20
    assert seen["tier_used_bytes:host"] == seen["tier_waiting_bytes:disk"] == 0
    assert seen["tier_answering:disk"] == 1
    assert {seen[f"tier_skipped_pages_total:{reason}:disk"] for reason in TIER_REASONS} == {0}
    assert [seen[f"cached_tokens_total:{tier}"] for tier in NOTHING] == [0, 0, 16 * whole, 0]


def test_metrics_of_refusals(open_over: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost gate keeps pages out that are quicker to compute; a store counts damage, and the circuit shows."""
    pages: Pages = {}
    whole = (len(PROMPT) - 1) // 16
    with open_over(Tiers(0, MemoryStore("disk", pages))) as llm, serving(llm) as running:
        ask(running, "completions")
        assert llm.tiers.flush()
    store = MemoryStore("disk", pages)
    with open_over(Tiers(0, store)) as llm, serving(llm) as running:
        llm.tiers.speeds[
            "disk"
        ].bytes_per_s = 1e-9  # it takes longer than computing, once more than a page is asked for
        monkeypatch.setattr(llm.model.backing_stores, "worth_asking", lambda *_: True)
        store.counters.skipped("corrupt", 2)
        store.answering = False
        assert usage_of("completions", ask(running, "completions").json()) == (len(PROMPT), 0, NOTHING)
        seen = read(running)
    assert seen["tier_skipped_pages_total:slow:disk"] == whole
    assert seen["tier_skipped_pages_total:corrupt:disk"] == 2
    assert seen["tier_answering:disk"] == 0


def test_metrics_of_the_host(open_over: Callable[..., LLM]) -> None:
    """A pool too small for two prompts: the older one goes to the host, and comes back."""
    with open_over(Tiers(8 << 20)) as llm:
        page_bytes = llm.pool.page_bytes
    with open_over(Tiers(8 << 20), kv_bytes=40 * page_bytes) as llm, serving(llm) as running:
        for token in (5, 6, 5):
            usage = ask(running, "completions", prompt=[token] * 500).json()["usage"]
        seen = read(running)
    found = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert found["host"] == seen["cached_tokens_total:host"] > 0
    assert seen["tier_pages_total:in:host"] * 16 >= found["host"]
    assert seen["tier_bytes_total:out:host"] == seen["tier_pages_total:out:host"] * page_bytes > 0
    assert 0 < seen["tier_used_bytes:host"] <= seen["tier_limit_bytes:host"]


def test_without_tiers_there_are_no_samples_of_them(open_over: Callable[..., LLM]) -> None:
    with open_over(Tiers()) as llm, serving(llm) as running:
        assert not [name for name in read(running) if name.startswith("tier_")]
