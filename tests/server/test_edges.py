"""What belongs to no API: CORS, HEAD, paths that do not exist, the version, and vLLM's metrics."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Serving, asgi, serving
from twostroke.api.llm import LLM
from twostroke.engine.engine_thread import EngineThread
from twostroke.errors import InvalidRequest
from twostroke.server.body_validation.supervisor import LONG_BODY_BYTES
from twostroke.server.errors import ApiError
from twostroke.server.http.surrogates import refuse_lone_surrogates
from twostroke.server.settings import Settings

PAGE = "https://chat.example"


def test_a_page_of_an_allowed_origin(open_tiny: Callable[..., LLM]) -> None:
    """A CORS preflight needs no key, and the answer, an error too, may be read by the page."""
    asks = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }

    async def check() -> None:
        async with asgi(open_tiny(), cors=[PAGE, "http://localhost:3000"], api_key="secret") as http:
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
                answer = await http.options(path, headers=asks)
                assert answer.status_code == 200, answer.text
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "POST" in answer.headers["access-control-allow-methods"]
                assert "authorization" in answer.headers["access-control-allow-headers"].lower()
            denied = await http.get("/v1/models", headers={"origin": PAGE})
            assert (denied.status_code, denied.headers["access-control-allow-origin"]) == (401, PAGE)
            known = await http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer secret"})
            assert (known.status_code, known.headers["access-control-allow-origin"]) == (200, PAGE)
            assert "x-request-id" in known.headers["access-control-expose-headers"]
            other = await http.options("/v1/models", headers={**asks, "origin": "https://evil.example"})
            assert "access-control-allow-origin" not in other.headers
        async with asgi(open_tiny(), cors=["*"]) as http:
            assert (await http.get("/health", headers={"origin": PAGE})).headers["access-control-allow-origin"] == "*"
        async with asgi(open_tiny()) as http:
            assert "access-control-allow-origin" not in (await http.get("/health", headers={"origin": PAGE})).headers

    asyncio.run(check())


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/page", ""])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(InvalidRequest, match="cors must be origins such as"):
        Settings(cors=(origin,))


def test_head(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever GET is, with the headers of GET and no body."""
    monkeypatch.setattr(EngineThread, "step_age_s", 0.5)  # else /health has as many digits as it happens to have
    with server.http() as http:
        for path in ("/health", "/metrics", "/version", "/v1/models", "/v1/models/tiny"):
            got, head = http.get(path), http.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-type"] == got.headers["content-type"]
            if path != "/metrics":  # it counts
                assert head.headers["content-length"] == str(len(got.content))
        assert http.head("/v1/models/nobody").status_code == 404
        assert http.head("/v1/completions").status_code == 405
        assert http.get("/health").status_code == 200, "the connection is still in order"


def test_paths_that_do_not_exist(server: Serving) -> None:
    with server.http() as http:
        missing = http.post("/v1/audio/speech", json={})
        assert missing.status_code == 404
        message = missing.json()["error"]["message"]
        assert message.startswith("there is no /v1/audio/speech here. There are: ")
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses/{id}", "/health"):
            assert path in message
        assert "\n" not in message
        wrong = http.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
        several = http.put("/v1/responses/resp_1")
        assert (several.status_code, several.headers["allow"]) == (405, "DELETE, GET, HEAD")
        anthropic = http.get("/v1/messages/nothing").json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")


def test_version(server: Serving) -> None:
    with server.http() as http:
        assert http.get("/version").json() == {"version": version("twostroke")}


def test_vllms_metrics(open_tiny: Callable[..., LLM]) -> None:
    """Beside ours, with the same counts; only where they are asked for."""
    with serving(open_tiny(), vllm_metrics=True) as running:
        for _ in range(2):
            running.client.completions.create(
                model="tiny", prompt=[7] * 40, max_tokens=5, extra_body={"ignore_eos": True}
            )
        text = httpx.get(f"{running.url}/metrics").text
    seen: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels and sample.labels.get("model_name", "tiny") == "tiny":
                seen[sample.name] += sample.value
    exact = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 2 * 39,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:num_preemptions_total": 0,
        "vllm:prompt_tokens_total": 80,
        "vllm:generation_tokens_total": 10,
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:time_per_output_token_seconds_count": 8,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 80,
        "vllm:request_generation_tokens_sum": 10,
        "vllm:request_params_max_tokens_sum": 10,
        "vllm:request_params_n_sum": 2,
        "vllm:iteration_tokens_total_sum": 56,
    }
    assert {name: seen[name] for name in exact} == exact
    assert "twostroke_requests" in seen
    with serving(open_tiny()) as plain:
        assert "vllm:" not in httpx.get(f"{plain.url}/metrics").text


def test_a_refusal_of_the_body_validator_is_written_as_the_api_does(server: Serving) -> None:
    """A long body is tried out in another process, which answers in the same form."""
    long = "the fox " * (LONG_BODY_BYTES // 8 + 100)
    said = [{"role": "user", "content": long}]
    with server.http() as http:
        claude = http.post("/v1/messages", json={"model": "tiny", "max_tokens": 3, "messages": said})
        assert (claude.status_code, claude.json()["error"]["type"]) == (400, "invalid_request_error")
        assert claude.json()["type"] == "error"
        local = http.post("/api/chat", json={"model": "tiny", "messages": said})
        assert (local.status_code, list(local.json())) == (400, ["error"])
        response = http.post("/v1/responses", json={"model": "tiny", "input": long})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        kept = http.post("/v1/responses", json={"model": "tiny", "input": "hi", "max_output_tokens": 2}).json()["id"]
        more = {"model": "tiny", "input": "so?", "max_output_tokens": 2, "metadata": {"long": long}}
        assert http.post("/v1/responses", json={**more, "previous_response_id": kept}).status_code == 200


HALF = r"\ud83d"
WHOLE = [r"\ud83d\ude00", r"\\ud83d", r"\\\ud83d\ude00", "é😀\ud7ff\ue000", r"\n\"\u00e9"]
HALVES = [HALF, r"\ude00", r"\ude00\ud83d", r"\ud83d\ud83d\ude00", r"\\\ud83d", r"é\ud83dx", r"\uD83D\\ude00"]


@pytest.mark.parametrize("text", WHOLE)
def test_pairs_and_other_escapes_are_text(text: str) -> None:
    refuse_lone_surrogates(f'{{"a": "{text}"}}'.encode())


@pytest.mark.parametrize("text", HALVES)
def test_half_of_a_pair_is_none(text: str) -> None:
    body = f'{{"a": "{text}"}}'
    for written in (body.encode(), json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "surrogatepass")):
        with pytest.raises(ApiError, match="half of a surrogate pair"):
            refuse_lone_surrogates(written)


BROKEN = [
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "regex": "%s"}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"%s": 1}}'),
    ("/v1/responses", '{"input": "a", "metadata": {"a": "%s"}}'),
    ("/v1/responses", '{"input": "a", "tools": [{"type": "%s"}]}'),
    ("/v1/messages", '{"model": "claude-%s", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}'),
    ("/api/chat", '{"model": "tiny", "messages": [{"role": "user", "content": "%s"}]}'),
]


@pytest.mark.parametrize(("path", "body"), BROKEN)
@pytest.mark.parametrize("space", ["", " " * 20_000])
def test_a_body_with_half_of_a_pair_is_refused(server: Serving, path: str, body: str, space: str) -> None:
    """In fields that the answer repeats or that a warning names, it could not be sent back."""
    with server.http() as http:
        answer = http.post(path, content=body % HALF + space, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "half of a surrogate pair" in answer.text


def test_a_body_that_is_no_json_says_so(server: Serving) -> None:
    with server.http() as http:
        for body in (b'{"messages": "\xff"}', b"[" * 15_000):
            answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["message"][:20]) == (400, "the body is not JSON")


def test_the_root_says_that_the_server_runs(server: Serving) -> None:
    with server.http() as http:
        assert http.head("/").status_code == 200
        assert http.get("/").text == "Twostroke is running"
