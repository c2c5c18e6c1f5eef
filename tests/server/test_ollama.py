"""Ollama's client: answers over HTTP equal those of `LLM.chat`."""

import json
from typing import Any

import httpx
import ollama
import pytest

from tests.patience import PATIENCE_S
from tests.server import scripted
from tests.server.conftest import LOCAL, Serving
from twostroke.api.llm import LLM
from twostroke.server.ollama.answers import OllamaAnswer

MESSAGES: Any = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the fox?"}]
OPTIONS: Any = {"num_predict": 20, "temperature": 1.0, "top_k": 30, "top_p": 0.95, "seed": 5, "num_ctx": 4096}
SAMPLED: Any = {"max_tokens": 20, "temperature": 1.0, "top_k": 30, "top_p": 0.95, "seed": 5}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "remember", "description": "x", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def local(server: Serving) -> ollama.Client:
    return ollama.Client(host=server.url, timeout=PATIENCE_S)


def test_chat(local: ollama.Client, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, **SAMPLED)
    made = local.chat("tiny", MESSAGES, options=OPTIONS, keep_alive="5m", think=False)
    assert made.message.content == expected.text
    assert (made.model, made.done, made.message.role) == ("tiny", True, "assistant")
    assert made.done_reason == expected.finish_reason
    assert made.eval_count == len(expected.tokens)
    assert made.prompt_eval_count == len(reference.tokenizer.encode_chat(MESSAGES))
    for duration in (made.total_duration, made.prompt_eval_duration, made.eval_duration):
        assert isinstance(duration, int)
        assert 0 < duration < 30e9
    assert (made.total_duration or 0) >= (made.eval_duration or 0)
    assert local.chat("tiny:latest", MESSAGES, options=OPTIONS).message.content == expected.text
    parts = list(local.chat("tiny", MESSAGES, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == expected.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == len(expected.tokens)


def test_a_chat_that_outgrows_the_context(local: ollama.Client, server: Serving) -> None:
    """As Ollama does it, the oldest turns go; with `truncate` false the chat is refused."""
    turns: Any = [{"role": role, "content": "the fox? " * 100} for _ in range(4) for role in ("user", "assistant")]
    turns = [MESSAGES[0], *turns, MESSAGES[1]]
    encode, most = server.llm.tokenizer.encode_chat, server.llm.config.max_position
    kept = next(chat for i in range(1, 10, 2) if len(encode(chat := [turns[0], *turns[i:]])) + 20 <= most)
    assert 2 < len(kept) < len(turns)
    made = local.chat("tiny", turns, options=OPTIONS)
    assert made.prompt_eval_count == len(encode(kept))
    assert made.message.content == local.chat("tiny", kept, options=OPTIONS).message.content
    body = {"model": "tiny", "messages": turns, "stream": False, "options": OPTIONS}
    told = httpx.post(f"{server.url}/api/chat", json=body)
    assert told.json()["left_out"]["messages"] == len(turns) - len(kept)
    assert "oldest messages" in told.headers["x-twostroke-warnings"]
    refused = httpx.post(f"{server.url}/api/chat", json=body | {"truncate": False})
    assert refused.status_code == 400


def test_generate(local: ollama.Client, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, **SAMPLED)
    made = local.generate("tiny", "the fox?", system="be quick", options=OPTIONS)
    assert made.response == expected.text
    parts = list(local.generate("tiny", "the fox?", system="be quick", options=OPTIONS, stream=True))
    assert "".join(part.response or "" for part in parts) == expected.text
    raw = local.generate("tiny", "the quick", raw=True, options=OPTIONS)
    assert raw.response == reference.generate(["the quick"], **SAMPLED)[0].text
    assert raw.prompt_eval_count == len(reference.tokenizer.encode("the quick"))


def test_options(local: ollama.Client, reference: LLM) -> None:
    whole = reference.chat(MESSAGES, **SAMPLED).text
    stop = whole[len(whole) // 2 :][:2]
    assert local.chat("tiny", MESSAGES, options={**OPTIONS, "stop": stop}).message.content == whole[: whole.index(stop)]
    least = {"min_p": 0.1, "repeat_penalty": 1.2, "presence_penalty": 0.5}
    ours: Any = {"min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    expected = reference.chat(MESSAGES, **SAMPLED, **ours).text
    assert local.chat("tiny", MESSAGES, options={**OPTIONS, **least}).message.content == expected
    own = reference.chat(MESSAGES, max_tokens=20, seed=5, temperature=0.8, top_k=40, top_p=0.9).text
    assert local.chat("tiny", MESSAGES, options={"num_predict": 20, "seed": 5}).message.content == own
    listed = local.chat("tiny", MESSAGES, options={**OPTIONS, "num_predict": 3}, logprobs=True, top_logprobs=2)
    assert [len(one.top_logprobs or ()) for one in listed.logprobs or ()] == [2, 2, 2]
    assert local.chat("tiny", []).done_reason == "load"
    assert local.generate("tiny", "").done_reason == "load"


def test_formats(local: ollama.Client) -> None:
    options: Any = {"num_predict": 200, "seed": 1}
    made = local.chat("tiny", MESSAGES, format=SCHEMA, options=options)
    assert set(json.loads(made.message.content or "")) == {"name", "age"}
    assert (local.generate("tiny", "x", format="json", options={"num_predict": 9}).response or "").startswith("{")


def test_tools(server: Serving) -> None:
    """Results name a tool, and are the results of its calls in their order."""
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [
            {"function": {"name": "remember", "arguments": {"name": "a", "age": 1}}},
            {"function": {"name": "forget", "arguments": {}}},
        ]},
        {"role": "tool", "tool_name": "forget", "content": "gone"},
        {"role": "tool", "tool_name": "remember", "content": "done"},
    ]  # fmt: skip
    arguments = ('{"name": "a", "age": 1}', "{}")
    names = ("remember", "forget")
    same: Any = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": f"call_2_{i}", "type": "function", "function": {"name": names[i], "arguments": arguments[i]}}
            for i in range(2)
        ]},
        {"role": "tool", "tool_call_id": "call_2_1", "name": "forget", "content": "gone"},
        {"role": "tool", "tool_call_id": "call_2_0", "name": "remember", "content": "done"},
    ]  # fmt: skip
    body = {"model": "tiny", "messages": turns, "tools": TOOLS, "options": {"num_predict": 4}, "stream": False}
    with server.http() as http:
        made = http.post("/api/chat", json=body).json()
    chat = server.client.chat.completions.create(model="tiny", messages=same, tools=TOOLS, max_tokens=4)
    assert chat.usage is not None
    assert made["prompt_eval_count"] == chat.usage.prompt_tokens


def test_models(local: ollama.Client) -> None:
    (model,) = local.list().models
    assert model.model == "tiny"
    assert model.size is not None
    assert model.size > 0
    shown = local.show("tiny")
    assert shown.capabilities == ["completion", "tools"]
    info: Any = shown.modelinfo
    assert info[f"{info['general.architecture']}.context_length"] > 0
    assert info["general.parameter_count"] > 0
    (loaded,) = local.ps().models
    assert loaded.context_length == info[f"{info['general.architecture']}.context_length"]
    assert local.pull("tiny").status == "success"


def test_version(server: Serving) -> None:
    """Clients read three numbers, and compare them."""
    with server.http() as http:
        parts = http.get("/api/version").json()["version"].split(".")
    assert [int(part) for part in parts] >= [0, 6, 4]


def test_refusals(local: ollama.Client, server: Serving) -> None:
    for call in (
        lambda: local.chat("other", MESSAGES),
        lambda: local.show("other"),
        lambda: local.pull("other"),
        lambda: next(iter(local.chat("other", MESSAGES, stream=True))),
    ):
        with pytest.raises(ollama.ResponseError, match="there is no model 'other'") as missing:
            call()
        assert missing.value.status_code == 404
    for call in (
        lambda: local.push("tiny"),
        lambda: local.create("new", from_="tiny"),
        lambda: local.delete("tiny"),
        lambda: local.copy("tiny", "new"),
    ):
        with pytest.raises(ollama.ResponseError, match="cannot be changed through this server"):
            call()
    with pytest.raises(ollama.ResponseError, match="images are not supported"):
        local.chat("tiny", [{"role": "user", "content": "x", "images": ["aGk="]}])
    with pytest.raises(ollama.ResponseError, match="temperature"):
        local.chat("tiny", MESSAGES, options={"temperature": -1})
    with server.http() as http:
        assert "format" in http.post("/api/generate", json={"model": "tiny", "prompt": "x", "format": "yaml"}).text
        wrong = http.post("/api/chat", json={"model": "tiny", "messages": 5})
        assert (wrong.status_code, list(wrong.json())) == (400, ["error"])
        assert isinstance(wrong.json()["error"], str)
        assert list(http.get("/api/nothing").json()) == ["error"]


def test_calls_are_sent_as_a_whole(reference: LLM) -> None:
    """In a stream each call comes once it is complete, with arguments as an object."""
    text = 'hi <tool_call>\n{"name": "remember", "arguments": {"name": "a", "age": 1}}\n</tool_call>\n' * 2
    active_call = scripted.active_call(reference.tokenizer, [{"name": "remember", "parameters": SCHEMA}])

    def answer() -> OllamaAnswer:
        return OllamaAnswer("tiny", active_call, reference.tokenizer, chat=True, logprobs=False)

    stream, tokens = answer(), scripted.tokens(text)
    lines = [event for token in tokens for event in stream.events(0, token)] + list(stream.closing())
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    expected = [{"index": i, "name": "remember", "arguments": {"name": "a", "age": 1}} for i in range(2)]
    assert [call["function"] for call in calls] == expected
    whole = answer()
    for token in tokens:
        whole.add_token(0, token)
    made = whole.body()
    assert [call["function"] for call in made["message"]["tool_calls"]] == expected
    assert made["message"]["content"] == "".join(line["message"]["content"] for line in lines)
    assert made["done_reason"] == "stop"


def test_curl_as_in_its_documentation(server: Serving) -> None:
    """It names a form's content type. A page of a browser, which any site may show, must name JSON's."""
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    with server.http() as http:
        assert http.post("/api/chat", content=body, headers=form).json()["eval_count"] == 2
        assert http.post("/api/chat", content=body).json()["eval_count"] == 2
        assert http.post("/api/chat", content=body, headers=form | {"origin": "https://x.example"}).status_code == 403
        assert http.post("/v1/chat/completions", content=body, headers=form).status_code == 403


def test_options_that_ask_for_nothing(local: ollama.Client, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, temperature=0.0).text
    for options in ({"num_predict": 0}, {"num_predict": -1, "stop": [""]}, {"num_predict": -2, "stop": []}):
        assert local.chat("tiny", MESSAGES, options={"temperature": 0, **options}).message.content == expected


def test_a_format_is_followed_as_far_as_it_can_be(server: Serving) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}, "maxItems": 2}
    body = {"model": "tiny", "prompt": "a", "stream": False, "format": schema, "options": {"num_predict": 200}}
    with server.http() as http:
        made = http.post("/api/generate", json=body).json()
    assert all(isinstance(one, int) for one in json.loads(made["response"]))
    assert "'contains' at #/contains is skipped" in made["warnings"][0]


def test_a_talk_goes_on_from_its_context(server: Serving) -> None:
    """/api/generate gives back the tokens so far, in the last line of a stream too, and goes on from them."""
    ask: dict[str, Any] = {"model": "tiny", "options": {"num_predict": 3, "temperature": 0}}
    with server.http() as http:
        first = http.post("/api/generate", json={**ask, "prompt": "the fox " * 12, "stream": False}).json()
        assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
        lines = http.post("/api/generate", json={**ask, "prompt": "the fox " * 12}).text.splitlines()
        assert json.loads(lines[-1])["context"] == first["context"]
        assert all("context" not in json.loads(line) for line in lines[:-1])
        alone = http.post("/api/generate", json={**ask, "prompt": "and then", "stream": False}).json()
        more = {**ask, "prompt": "and then", "stream": False, "context": first["context"]}
        second = http.post("/api/generate", json=more).json()
        assert second["context"][: len(first["context"])] == first["context"]
        bos = int(alone["context"][0] == server.llm.tokenizer.bos_id)
        assert second["prompt_eval_count"] == len(first["context"]) + alone["prompt_eval_count"] - bos
        assert sum(second["cached_tokens_by_tier"].values()) >= len(first["context"]) // 16 * 16 - 16
        chat = http.post("/api/chat", json={**ask, "messages": MESSAGES, "stream": False}).json()
        assert "context" not in chat
        for context in ([10**6], [-1], ["a"], "abc"):
            answer = http.post("/api/generate", json={**more, "context": context})
            assert answer.status_code == 400, answer.text


def test_a_raw_prompt_goes_through_no_template(server: Serving) -> None:
    """What would be passed over beside it is refused, as Ollama does."""
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": "the",
        "raw": True,
        "stream": False,
        "options": {"num_predict": 2},
    }
    with server.http() as http:
        made = http.post("/api/generate", json=ask | {"system": "", "template": "", "context": []})
        assert made.status_code == 200, made.text
        assert "context" not in made.json()
        for field, value in (("system", "be kind"), ("template", "{{ .Prompt }}"), ("context", [5])):
            answer = http.post("/api/generate", json=ask | {field: value})
            assert (answer.status_code, field in answer.json()["error"]) == (400, True)


@LOCAL
def test_a_models_parameters_have_ollamas_names(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "generation", {"repetition_penalty": 1.05, "top_p": 0.9})
    with server.http() as http:
        assert http.post("/api/show", json={"model": "tiny"}).json()["parameters"] == "repeat_penalty 1.05\ntop_p 0.9"
