"""/v1/contexts: a named beginning of prompts, held until it expires, and answers equal to those of whole prompts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.methods.watching import needs_native
from tests.server.conftest import Serving, eventually, serving
from tests.server.loop_clock import LoopClock
from twostroke.api.llm import LLM
from twostroke.server.contexts.contexts import Contexts

FOX = "the quick brown fox jumps over the lazy dog "
MESSAGES: Any = [{"role": "system", "content": "be quick"}, {"role": "user", "content": FOX * 5},
                 {"role": "assistant", "content": "the fox"}]  # fmt: skip
QUESTION: Any = [{"role": "user", "content": "the dog?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "remember", "description": "Keep " + FOX * 3}},
              {"type": "function", "function": {"name": "forget"}}]  # fmt: skip
IDS = [7, 8, 9, 10, 11] * 40
OPTIONS: Any = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": True, "top_logprobs": 2}


@pytest.fixture
def open_tiny(tiny_directory: Callable[[str], Path]) -> Callable[..., LLM]:
    """A model that the native backend runs, whose bits do not depend on the schedule."""

    def opened(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1} | options
        return LLM(str(tiny_directory("qwen3")), **chosen)

    return opened


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        yield one


def post(running: Serving, path: str, status: int = 200, /, **body: Any) -> Any:
    with running.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def put(running: Serving, status: int = 200, /, **body: Any) -> Any:
    return post(running, "/v1/contexts", status, **body)


def cold(running: Serving) -> None:
    """Nothing is left in the prefix index."""
    post(running, "/reset_prefix_cache")


def said(answer: dict[str, Any]) -> Any:
    """All of an answer that must be equal."""
    if "choices" in answer:
        return [(c.get("message", {}).get("content"), c.get("text"), c["logprobs"]) for c in answer["choices"]]
    return [item["content"][0]["text"] for item in answer["output"]]


def cached(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


def prompt(answer: dict[str, Any]) -> int:
    return answer["usage"].get("prompt_tokens") or answer["usage"]["input_tokens"]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, {"messages": QUESTION}, {"messages": MESSAGES + QUESTION}),
    "tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": TOOLS[:1]},
        {"messages": QUESTION, "tools": TOOLS[1:]},
        {"messages": MESSAGES + QUESTION, "tools": TOOLS},
    ),
    "responses": ("/v1/responses", {"messages": MESSAGES}, {"input": QUESTION}, {"input": MESSAGES + QUESTION}),
    "text": ("/v1/completions", {"input": FOX * 6}, {"prompt": FOX[:-3]}, {"prompt": FOX * 6 + FOX[:-3]}),
    "ids": ("/v1/completions", {"tokens": IDS}, {"prompt": [5, 6]}, {"prompt": [*IDS, 5, 6]}),
    "several": (
        "/v1/completions",
        {"prompt": IDS},
        {"prompt": [[5, 6], [6]], "n": 2},
        {"prompt": [[*IDS, 5, 6], [*IDS, 6]], "n": 2},
    ),
}


def options(path: str) -> dict[str, Any]:
    if path.endswith("chat/completions"):
        return OPTIONS
    if path.endswith("responses"):
        return {"max_output_tokens": 12, "seed": 5}
    return OPTIONS | {"logprobs": 2, "top_logprobs": None}


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_answers_equal_those_of_the_whole_prompt(running: Serving, name: str) -> None:
    """To the bit, when the context is in the pool, and when it has left it, which computes none of it again."""
    path, beginning, rest, whole = CASES[name]
    expected = post(running, path, **whole, **options(path))
    cold(running)
    context = put(running, name="mine", **beginning)
    assert context["tier"] == "pool"
    for away in (False, True):
        if away:
            cold(running)
            with running.http() as http:
                assert http.get("/v1/contexts/mine").json()["tier"] == "host"
        answer = post(running, path, context="mine", **rest, **options(path))
        assert said(answer) == said(expected)
        assert prompt(answer) == prompt(expected)
        if name != "tools":  # which come first in the prompt, so it goes another way there
            assert cached(answer) >= len(answer.get("choices", [0])) // rest.get("n", 1) * (
                context["tokens"] // 16 * 16
            )


@needs_native
@pytest.mark.parametrize("method", ["repeat", "drop", "compress"])
def test_techniques(running: Serving, method: str) -> None:
    rest = {"prompt": [5, 6], "method": method, "max_tokens": 8, "temperature": 0}
    expected = post(running, "/v1/completions", **rest | {"prompt": [*IDS, 5, 6]})
    put(running, name="mine", tokens=IDS)
    cold(running)
    assert said(post(running, "/v1/completions", context="mine", **rest)) == said(expected)


def test_a_context_is_shown_listed_and_deleted(running: Serving) -> None:
    first, second = put(running, name="first", tokens=IDS), put(running, messages=MESSAGES, ttl=7200)
    llm = running.llm
    assert first["object"] == "context"
    assert first["tokens"] == len(IDS)
    assert len(IDS) // 16 * llm.pool.page_bytes < first["bytes"] < len(IDS) // 16 * llm.pool.page_bytes + 2000
    assert first["expires_at"] - first["created_at"] in (3600, 3601)
    assert second["expires_at"] - second["created_at"] in (7200, 7201)
    assert second["name"].startswith("ctx_")
    with running.http() as http:
        assert http.get("/v1/contexts").json() == {"object": "list", "data": [first, second]}
        assert http.get("/v1/contexts/first").json() == first
        gone = {"object": "context", "name": "first", "deleted": True}
        assert http.delete("/v1/contexts/first").json() == gone
        assert http.get("/v1/contexts").json()["data"] == [second]
        for call in (http.get, http.delete):
            refused = call("/v1/contexts/first")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "context_not_found"
    held = post(running, "/v1/chat/completions", 404, messages=QUESTION, context="first")["error"]
    assert (held["code"], held["param"]) == ("context_not_found", "context")
    assert held["message"] == "there is no context 'first': it was deleted, has expired, or was made before a restart"


def test_memory_is_given_back(running: Serving) -> None:
    """A context holds pages of the host and none of the pool beyond those of the prefix index."""
    put(running, name="mine", tokens=IDS)
    pages = len(IDS) // 16
    assert running.llm.pool.num_copies == pages
    eventually(lambda: running.pages_used == 0)
    with running.http() as http:
        http.delete("/v1/contexts/mine")
    eventually(lambda: running.llm.pool.num_copies == 0)


def test_a_context_expires(running: Serving) -> None:
    put(running, name="short", tokens=IDS, ttl=0.05)
    with running.http() as http:
        eventually(lambda: http.get("/v1/contexts/short").status_code == 404)
    eventually(lambda: running.llm.pool.num_copies == 0)
    assert put(running, name="short", tokens=IDS[:50])["tokens"] == 50, "the name is free again"


@needs_native
def test_a_context_outlives_pressure_on_the_pool(open_tiny: Callable[..., LLM]) -> None:
    """Prompts that fill the pool push it out of the prefix index; its KV comes back, and is not computed again."""
    page_bytes = open_tiny().pool.page_bytes
    with serving(open_tiny(kv_bytes=20 * page_bytes)) as running:
        expected = post(running, "/v1/completions", prompt=[*IDS, 5, 6], max_tokens=8, seed=3)
        put(running, name="mine", tokens=IDS)
        for token in (20, 21):
            post(running, "/v1/completions", prompt=[token] * 290, max_tokens=2)
        with running.http() as http:
            assert http.get("/v1/contexts/mine").json()["tier"] == "host"
        answer = post(running, "/v1/completions", prompt=[5, 6], context="mine", max_tokens=8, seed=3)
        assert said(answer) == said(expected)
        assert cached(answer) == len(IDS) // 16 * 16


def test_the_same_again_lives_longer_and_another_is_refused(running: Serving) -> None:
    before = put(running, name="mine", tokens=IDS, ttl=100)
    again = put(running, name="mine", tokens=IDS, ttl=200)
    assert again["expires_at"] >= before["expires_at"] + 100
    assert again | {"expires_at": 0} == before | {"expires_at": 0}
    error = put(running, 409, name="mine", tokens=IDS[:-1])["error"]
    assert error["code"] == "context_exists"
    with running.http() as http:
        assert http.get("/v1/contexts/mine").json() == again


def test_limit(open_tiny: Callable[..., LLM]) -> None:
    """Nothing is dropped for a new context: it is refused, and there is room once another is deleted."""
    llm = open_tiny()
    with serving(llm, max_context_bytes=20 * llm.pool.page_bytes) as running:
        put(running, name="first", tokens=IDS)
        error = put(running, 413, name="second", tokens=IDS[::-1])["error"]
        assert error["code"] == "contexts_full"
        assert "delete others, or serve with a larger --max-context-bytes" in error["message"]
        with running.http() as http:
            assert [one["name"] for one in http.get("/v1/contexts").json()["data"]] == ["first"]
            http.delete("/v1/contexts/first")
        put(running, name="second", tokens=IDS[::-1])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "give either messages or prompt"),
        ({"messages": MESSAGES, "prompt": "the"}, "give either messages or prompt"),
        ({"messages": []}, "at least 1 item"),
        ({"prompt": []}, "empty"),
        ({"prompt": ["a", "b"]}, "a text or a list of token ids"),
        ({"prompt": [5, 1 << 30]}, "token ids must be from 0 to"),
        ({"prompt": [5] * 5000}, "tokens"),
        ({"prompt": "the", "name": "a/b"}, "name: "),
        ({"prompt": "the", "ttl": 0}, "ttl: "),
        ({"prompt": "the", "ttl": 700_000}, "ttl: "),
    ],
)
def test_bad_bodies(running: Serving, body: dict[str, Any], words: str) -> None:
    assert words in put(running, 400, **body)["error"]["message"]
    with running.http() as http:
        assert http.get("/v1/contexts").json()["data"] == []


def test_a_context_of_another_kind(running: Serving) -> None:
    put(running, name="text", prompt="the fox")
    put(running, name="chat", messages=MESSAGES)
    for path, body, words in (
        ("/v1/chat/completions", {"messages": QUESTION, "context": "text"}, "has no messages"),
        ("/v1/responses", {"input": "the", "context": "text"}, "has no messages"),
        ("/v1/completions", {"prompt": "the", "context": "chat"}, "is for chat completions and responses"),
    ):
        error = post(running, path, 400, **body)["error"]
        assert words in error["message"]
        assert error["param"] == "context"


def test_another_model_and_no_index(running: Serving, open_tiny: Callable[..., LLM]) -> None:
    assert put(running, 404, model="another", prompt="the")["error"]["code"] == "model_not_found"
    with serving(open_tiny(prefix_index="off")) as without:
        assert put(without, 400, prompt="the")["error"]["code"] == "no_contexts"


def test_the_key_of_the_server(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny(), api_key="k") as running, running.http() as http:
        for call in (http.get, http.delete):
            assert call("/v1/contexts/mine").status_code == 401
        assert http.post("/v1/contexts", json={"prompt": "the"}).status_code == 401
        mine = {"authorization": "Bearer k"}
        assert http.post("/v1/contexts", json={"prompt": "the"}, headers=mine).status_code == 200


def test_long_bodies(running: Serving) -> None:
    """A long body goes through the body validator, which knows no context; both ways of using one pass it."""
    padding = " " * 20_000
    put(running, name="mine", messages=MESSAGES, metadata=padding)
    answer = post(running, "/v1/chat/completions", messages=QUESTION, context="mine", max_tokens=2, user=padding)
    assert answer["usage"]["prompt_tokens"] > 80
    assert put(running, 400, prompt="the fox " * 4000)["error"]["code"] == "context_length_exceeded"


def test_input_tokens_and_shortening(running: Serving) -> None:
    put(running, name="mine", messages=MESSAGES)
    body = {"input": QUESTION, "context": "mine"}
    counted = post(running, "/v1/responses/input_tokens", **body)["input_tokens"]
    answer = post(running, "/v1/responses", **body, truncation="auto", max_output_tokens=2)
    assert answer["usage"]["input_tokens"] == counted
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 0


class Asking:
    """A stream that has begun."""

    def __init__(self, http: httpx.Client, **body: Any) -> None:
        self._answer = http.stream("POST", "/v1/completions", json=body | {"stream": True})
        self._lines = self._answer.__enter__().iter_lines()
        self.first = next(self._lines)

    def rest(self) -> list[str]:
        lines = [self.first, *(line for line in self._lines if line)]
        self._answer.__exit__(None, None, None)
        return [line.split('"text":')[1].split(",")[0] for line in lines if '"text":' in line]


@needs_native
@pytest.mark.parametrize("end", ["delete", "expire"])
def test_a_context_ends_while_it_is_in_use(
    running: Serving, end: str, loop_clock: LoopClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request goes on, and the answer is the same; what it held is given back at its end."""
    body: Any = {"prompt": [5, 6], "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with running.http() as http:
        expected = Asking(http, **body | {"prompt": [*IDS, 5, 6]}).rest()
        put(running, name="mine", tokens=IDS, ttl=3600)
        cold(running)
        asking = Asking(http, context="mine", **body)
        if end == "delete":
            with running.http() as other:
                assert other.delete("/v1/contexts/mine").status_code == 200
        else:
            later = time.time() + 3601
            monkeypatch.setattr("twostroke.server.contexts.context.time.time", lambda: later)
            loop_clock.passes(3601)
            with running.http() as other:
                assert other.get("/v1/contexts/mine").status_code == 404
        cold(running)
        assert asking.rest() == expected
    eventually(lambda: running.llm.pool.num_copies == 0)


def at_once(running: Serving, *bodies: dict[str, Any]) -> list[tuple[int, Any]]:
    """Statuses and answers of contexts that are all being computed before the first one is done."""
    with ThreadPoolExecutor() as threads, running.http() as http:
        with running.llm.engine.lock:  # nobody steps meanwhile
            calls = [threads.submit(http.post, "/v1/contexts", json=body) for body in bodies]
            eventually(lambda: http.get("/health").json()["in_flight"] == len(bodies))
        answers = [call.result() for call in calls]
    return sorted(((one.status_code, one.json()) for one in answers), key=lambda one: one[0])


def test_two_posts_of_one_name(running: Serving) -> None:
    """The same content is held once; of two contents one is refused, and its memory is given back."""
    same = at_once(running, *[{"name": "same", "tokens": IDS}] * 2)
    assert [status for status, _ in same] == [200, 200]
    eventually(lambda: running.llm.pool.num_copies == len(IDS) // 16)
    other = at_once(running, {"name": "one", "tokens": [20] * 64}, {"name": "one", "tokens": [21] * 64})
    assert [status for status, _ in other] == [200, 409]
    assert other[1][1]["error"]["code"] == "context_exists"
    with running.http() as http:
        assert [one["name"] for one in http.get("/v1/contexts").json()["data"]] == ["same", "one"]
    eventually(lambda: running.llm.pool.num_copies == len(IDS) // 16 + 4)


def test_the_limit_counts_what_is_being_computed(open_tiny: Callable[..., LLM]) -> None:
    llm = open_tiny()
    with serving(llm, max_context_bytes=20 * llm.pool.page_bytes) as running, ThreadPoolExecutor() as threads:
        contexts: Contexts = running.state.contexts
        with llm.engine.lock, running.http() as http:  # nobody steps meanwhile
            first = threads.submit(put, running, tokens=IDS)
            eventually(lambda: contexts.size)
            assert http.post("/v1/contexts", json={"tokens": IDS[::-1]}).status_code == 413
        assert first.result()["bytes"] == contexts.size
        put(running, tokens=IDS[:32])


def test_a_client_that_goes_leaves_nothing(running: Serving) -> None:
    contexts: Contexts = running.state.contexts
    with running.llm.engine.lock:
        with running.leaving({"tokens": IDS, "name": "mine"}, "/v1/contexts"):
            eventually(lambda: contexts.size)
        eventually(lambda: contexts.size == 0)
    assert contexts.all == []
    eventually(lambda: running.llm.engine.num_waiting + running.llm.engine.num_running == 0)
    assert running.llm.pool.num_copies == 0


@needs_native
def test_many_requests_of_two_contexts_in_a_pool_that_holds_one(open_tiny: Callable[..., LLM]) -> None:
    """Pages go out and come back all the time; every answer is that of a large pool without contexts."""
    beginnings = {"first": IDS, "second": IDS[::-1]}
    asked: Any = [(name, [5 + i, 6], i) for i in range(6) for name in beginnings]
    fields: Any = {"max_tokens": 12, "n": 2, "logprobs": 1}
    with serving(open_tiny()) as large:
        expected = [
            said(post(large, "/v1/completions", prompt=beginnings[name] + rest, seed=seed, **fields))
            for name, rest, seed in asked
        ]
    page_bytes = large.llm.pool.page_bytes
    with serving(open_tiny(kv_bytes=22 * page_bytes)) as running, ThreadPoolExecutor(8) as threads:
        for name, ids in beginnings.items():
            put(running, name=name, tokens=ids)
        calls = [
            threads.submit(post, running, "/v1/completions", context=name, prompt=rest, seed=seed, **fields)
            for name, rest, seed in asked
        ]
        assert [said(call.result()) for call in calls] == expected
