"""Keys with limits where calls overlap, leave, or come by other APIs; and that what one asks of the page is its own."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import asgi, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM

PROMPT = "the quick brown fox jumps over the lazy dog and then the cat jumps over the lazy fox again and again"
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "/api/generate": {"model": "tiny", "prompt": "the", "stream": False, "options": {"num_predict": 1}},
    "/v1/contexts": {"prompt": "the"},
    "/infill": {"input_prefix": "the", "input_suffix": "the"},
    "/tokenize": {"prompt": "the"},
}


def keys(directory: Path, text: str) -> str:
    file = directory / "keys.toml"
    file.write_text(text)
    return str(file)


def metric(http: httpx.Client, name: str, labels: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"twostroke_key_{name}{{{labels}}}"))


@pytest.mark.parametrize("path", CALLS)
def test_each_api_says_in_its_form_that_a_key_is_over_its_limit(
    path: str, open_tiny: Callable[..., LLM], tmp_path: Path
) -> None:
    file = keys(tmp_path, '[anna]\nkey = "a"\nrequests_per_minute = 1\n')

    async def calls() -> list[httpx.Response]:
        async with asgi(open_tiny(), api_key_file=file) as http:
            return [await http.post(path, json=CALLS[path], headers={"x-api-key": "a"}) for _ in range(2)]

    first, second = asyncio.run(calls())
    assert first.status_code != 429
    assert (first.headers["x-ratelimit-remaining-requests"], second.status_code) == ("0", 429)
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert second.headers["x-ratelimit-reset-requests"].endswith("s")
    error = second.json()["error"]
    if path.startswith("/api/"):
        assert error.startswith("the key anna has used its 1 requests a minute")
    else:
        assert (error["type"], second.json().get("type")) == (
            "rate_limit_error",
            "error" if path == "/v1/messages" else None,
        )


def test_a_client_that_leaves_gives_back_its_place_and_its_tokens(
    open_tiny: Callable[..., LLM], tmp_path: Path
) -> None:
    """A stream holds both until its client leaves; another name is not held up by it."""
    file = keys(
        tmp_path,
        '[anna]\nkey = "a"\nmax_parallel_requests = 1\ntokens_per_minute = 2000\n[bert]\nkey = "b"\n',
    )
    with serving(open_tiny(), api_key_file=file) as running, running.http() as http:
        anna, bert = {"x-api-key": "a"}, {"x-api-key": "b"}
        body = {"prompt": "the", "max_tokens": 1}
        with http.stream(
            "POST", "/v1/completions", json={"prompt": "the", "stream": True, **LONG}, headers=anna
        ) as one:
            chunks = one.iter_raw()  # it closes the stream when it is dropped
            next(chunks)
            assert int(one.headers["x-ratelimit-remaining-tokens"]) < 200
            refused = http.post("/v1/completions", json=body, headers=anna)
            assert (refused.status_code, "1 requests in flight, of 1 at once" in refused.text) == (429, True)
            assert http.post("/v1/completions", json=body, headers=bert).status_code == 200
            assert metric(http, "in_flight", 'key="anna"') == 1
        eventually(lambda: metric(http, "in_flight", 'key="anna"') == 0)
        after = http.post("/v1/completions", json=body, headers=anna)
        assert after.status_code == 200
        made = metric(http, "tokens_total", 'key="anna",kind="output"')
        assert int(after.headers["x-ratelimit-remaining-tokens"]) >= 2000 - 20 - made
        assert made < 1900, "the stream was not cancelled: the test shows nothing"
        assert metric(http, "refused_calls_total", 'key="anna",reason="parallel"') == 1


def test_places_at_once_are_never_more(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = keys(tmp_path, '[anna]\nkey = "a"\nmax_parallel_requests = 3\n')

    async def calls() -> list[int]:
        llm = open_tiny()
        async with asgi(llm, api_key_file=file) as http:
            body = {"prompt": "the", "max_tokens": 8, "ignore_eos": True}
            made = [http.post("/v1/completions", json=body, headers={"x-api-key": "a"}) for _ in range(8)]
            with llm.engine.lock:  # nobody steps before the others are refused
                calls = [asyncio.ensure_future(one) for one in made]
                while sum(one.done() for one in calls) < 5:
                    await asyncio.sleep(0.001)
            return sorted([one.status_code for one in await asyncio.gather(*calls)])

    assert asyncio.run(calls()) == [200] * 3 + [429] * 5


def test_the_page_of_a_private_key_leaves_nothing_for_others(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    """/explain and /attention compute prompts as well: what they enter is found by their key alone."""
    file = keys(tmp_path, '[anna]\nkey = "a"\nprivate = true\n[bert]\nkey = "b"\n')
    with serving(open_tiny(), api_key_file=file) as running, running.http() as http:
        tokens = running.llm.tokenizer.encode(PROMPT)

        def cached(key: str) -> int:
            made = http.post("/v1/completions", json={"prompt": tokens, "max_tokens": 1}, headers={"x-api-key": key})
            return made.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        for path, body in (("/explain", {"tokens": tokens, "answer": tokens[:2]}), ("/attention", {"tokens": tokens})):
            assert http.post(path, json=body, headers={"x-api-key": "a"}).status_code == 200
        assert (cached("b"), cached("a") > 0, cached("b") > 0) == (0, True, True)


def test_what_the_page_and_contexts_compute_is_counted(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = keys(tmp_path, '[anna]\nkey = "a"\ntokens_per_minute = 100_000\n')
    with serving(open_tiny(), api_key_file=file) as running, running.http() as http:
        tokens = running.llm.tokenizer.encode(PROMPT)
        count = len(tokens)
        for path, body, expected in (
            ("/v1/contexts", {"prompt": tokens}, count),
            ("/attention", {"tokens": tokens}, 2 * count),
            ("/explain", {"tokens": tokens, "answer": tokens[:2]}, 4 * count + 4),
        ):
            assert http.post(path, json=body, headers={"x-api-key": "a"}).status_code == 200
            eventually(lambda: metric(http, "in_flight", 'key="anna"') == 0)
            assert metric(http, "tokens_total", 'key="anna",kind="prompt"') == expected


def test_models_that_a_key_may_not_use_are_not_listed(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = keys(tmp_path, '[anna]\nkey = "a"\nmodels = ["tiny"]\n[bert]\nkey = "b"\nmodels = ["other"]\n')
    with serving(open_tiny(), api_key_file=file) as running, running.http() as http:
        for path, field in (("/v1/models", "data"), ("/api/tags", "models"), ("/api/ps", "models")):
            counts = [len(http.get(path, headers={"x-api-key": key}).json()[field]) for key in "ab"]
            assert counts == [1, 0], path
        assert http.get("/v1/models/tiny", headers={"x-api-key": "b"}).status_code == 403


def test_no_key_is_in_the_log(open_tiny: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file = keys(tmp_path, '[anna]\nkey = "sk-secret"\nrequests_per_minute = 1\n')
    with serving(open_tiny(), api_key_file=file) as running, running.http() as http:
        for given in ("sk-secret", "sk-secret", "sk-other"):
            http.post("/tokenize", json={"prompt": "the"}, headers={"authorization": f"Bearer {given}"})
        Path(file).write_text('[anna]\nkey = "sk-secret"\nkey = "sk-secret"\n')
        http.get("/v1/models", headers={"x-api-key": "sk-secret"})
    written = caplog.text + str([getattr(record, "fields", "") for record in caplog.records])
    assert "anna" in written
    assert "it is not TOML" in written
    assert "sk-" not in written


def test_contexts_of_two_keys_have_one_name_after_a_restart(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    file = keys(tmp_path, "".join(f'[{name}]\nkey = "{name}"\nprivate = true\n' for name in ("anna", "bert")))
    disk = str(tmp_path / "kv")
    with serving(open_tiny(kv_disk=disk), api_key_file=file) as running, running.http() as http:
        for key in ("anna", "bert"):
            made = {"name": "notes", "prompt": f"{PROMPT} {key}"}
            assert http.post("/v1/contexts", json=made, headers={"x-api-key": key}).status_code == 200
    with serving(open_tiny(kv_disk=disk), api_key_file=file) as running, running.http() as http:
        for key in ("anna", "bert"):
            asked = {"context": "notes", "prompt": " so", "max_tokens": 1, "echo": True}
            answer = http.post("/v1/completions", json=asked, headers={"x-api-key": key})
            assert f"again {key} so" in answer.json()["choices"][0]["text"]
        assert http.delete("/v1/contexts/notes", headers={"x-api-key": "anna"}).status_code == 200
        assert http.get("/v1/contexts/notes", headers={"x-api-key": "bert"}).status_code == 200
    assert [path.name for path in (tmp_path / "kv").rglob("*notes.json")] == ["bert@notes.json"]
