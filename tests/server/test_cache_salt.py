"""Tenants with salts share no KV: what one has sent shows neither in another's usage nor in its times."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Serving, serving
from twostroke.api.llm import LLM

SECRET = "the quick brown fox jumps over the lazy dog and then the cat " * 4
CHAT = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}


def openai_cached(made: dict[str, Any]) -> int:
    return made["usage"]["prompt_tokens_details"]["cached_tokens"]


CALLS: list[tuple[str, dict[str, Any], Callable[[dict[str, Any]], int]]] = [
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}, openai_cached),
    ("/v1/chat/completions", CHAT, openai_cached),
    (
        "/v1/responses",
        {"input": SECRET, "max_output_tokens": 2},
        lambda made: made["usage"]["input_tokens_details"]["cached_tokens"],
    ),
    ("/v1/messages", {"model": "tiny", **CHAT}, lambda made: made["usage"]["cache_read_input_tokens"]),
    (
        "/api/generate",
        {"model": "tiny", "prompt": SECRET, "stream": False, "options": {"num_predict": 2}},
        lambda made: sum(made["cached_tokens_by_tier"].values()),
    ),
]


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        yield one


@pytest.mark.parametrize(("path", "body", "cached"), CALLS, ids=[path for path, _, _ in CALLS])
def test_salts_share_nothing(
    path: str, body: dict[str, Any], cached: Callable[[dict[str, Any]], int], running: Serving
) -> None:
    """Nobody finds the pages of another salt, and each finds its own; answers have the same text."""
    with running.http() as http:

        def ask(**salt: str) -> int:
            answer = http.post(path, json=body | salt)
            assert answer.status_code == 200, answer.text
            assert "x-twostroke-warnings" not in answer.headers
            return cached(answer.json())

        found = [ask(cache_salt="a"), ask(), ask(cache_salt="b")]
        assert found == [0, 0, 0]
        again = [ask(cache_salt="a"), ask(), ask(cache_salt="b")]
        assert again[0] == again[1] == again[2] > 0


def test_contexts_have_salts(running: Serving) -> None:
    """What a context holds is found with its own salt alone, or by who knows its name."""
    with running.http() as http:
        made = http.post("/v1/contexts", json={"prompt": SECRET, "name": "mine", "cache_salt": "a"})
        assert made.status_code == 200, made.text
        assert openai_cached(http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2}).json()) == 0
        named = {"prompt": " so", "context": "mine", "max_tokens": 2, "cache_salt": "a"}
        assert openai_cached(http.post("/v1/completions", json=named).json()) > 0


def test_an_answer_is_the_same_with_any_salt(running: Serving) -> None:
    body = {"prompt": SECRET, "max_tokens": 8, "temperature": 0}
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    with running.http() as http:
        texts = {http.post("/v1/completions", json=body | salt).json()["choices"][0]["text"] for salt in salts}
    assert len(texts) == 1


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_salts_that_are_none(salt: Any, running: Serving) -> None:
    with running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "the", "cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


def test_pages_with_a_salt_stay_in_the_process(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    """Others read what is on disk: only prompts without a salt are written there."""
    with serving(open_tiny(kv_disk=str(tmp_path / "kv"))) as running, running.http() as http:

        def written() -> float:
            running.llm.tiers.flush()
            return len(list((tmp_path / "kv").glob("pages/*/*")))

        body = {"prompt": SECRET, "max_tokens": 2}
        for _ in range(3):
            http.post("/v1/completions", json=body | {"cache_salt": "a"})
        assert written() == 0
        for _ in range(3):
            http.post("/v1/completions", json=body)
        assert written() > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_pages_in_slower_tiers(tier: str, open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    """What has left the pool is found by its own salt alone; on disk there is only what has none."""
    options: dict[str, Any] = {"kv_host": 4 << 20} if tier == "host" else {"kv_disk": str(tmp_path / "kv")}
    with serving(open_tiny(kv_bytes=96 << 10, **options)) as running, running.http() as http:
        stores = running.llm.model.backing_stores
        if stores is not None:
            stores.computing = lambda context, count: 1.0 * count  # to load seems quicker than to compute

        def found(**salt: str) -> dict[str, int]:
            """Where the tokens of the secret were, which leave the pool then."""
            body = {"model": "tiny", "prompt": SECRET, "raw": True, "stream": False, "options": {"num_predict": 2}}
            made = http.post("/api/generate", json=body | salt).json()
            for i in range(4):
                http.post("/v1/completions", json={"prompt": f"{i} of the others " * 30, "max_tokens": 1})
            running.llm.tiers.flush()
            return {name: count for name, count in made["cached_tokens_by_tier"].items() if count}

        salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
        assert [found(**salt) for salt in salts] == [{}, {}, {}]
        own = [found(**salt) for salt in salts]
        assert tier in own[0]
        assert [tier in one for one in own[1:]] == [tier == "host"] * 2
