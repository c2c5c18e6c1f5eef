"""Fields that a body does not declare: aliases work, what changes nothing passes, the rest is told or refused."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import Serving, asgi
from twostroke.api.llm import LLM
from twostroke.server.openai.schemas import other_servers
from twostroke.server.openai.schemas.chat import ChatBody, ChatMessage
from twostroke.server.openai.schemas.completions import CompletionBody
from twostroke.server.openai.schemas.responses import ResponsesBody

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [5]},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def post(server: Serving, path: str, **fields: Any) -> Any:
    with server.http() as http:
        return http.post(path, json={**BODIES[path], **fields})


def answered(server: Serving, **fields: Any) -> str:
    answer = post(server, "/v1/chat/completions", max_tokens=30, **fields)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_told(path: str, server: Serving) -> None:
    """In the answer, in a header, and in the log; close names are suggested."""
    answer = post(server, path, temprature=0.5, mdoel="x", frob=None)
    assert answer.status_code == 200
    suggested = "mdoel is unknown: did you mean model?"
    assert suggested in answer.json()["warnings"]
    assert len(answer.json()["warnings"]) == 2, "null is a field left out"
    assert answer.headers["x-twostroke-warnings"] == "; ".join(answer.json()["warnings"])
    if "temperature" in json.dumps(server.http().get("/openapi.json").json()["paths"][path]) or path.startswith("/v1"):
        assert answer.json()["warnings"][0] == "temprature is unknown: did you mean temperature?"


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields(path: str, open_tiny: Callable[..., LLM]) -> None:
    async def check() -> None:
        async with asgi(open_tiny(), strict_fields=True) as http:
            assert (await http.post(path, json=BODIES[path])).status_code == 200
            assert (await http.post(path, json={**BODIES[path], "frob": None})).status_code == 200
            answer = await http.post(path, json={**BODIES[path], "mdoel": 1})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "mdoel"
            assert answer.json()["error"]["message"] == "mdoel is unknown: did you mean model?"

    asyncio.run(check())


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [{"role": "user", "content": "hi", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "txet": ""}]}]},
         "messages[0].content[0].txet"),
        ({"response_format": {"type": "text", "stict": True}}, "response_format.stict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strct": True}}},
         "response_format.json_schema.strct"),
        ({"tools": [{"type": "function", "function": {"name": "f", "params": {}}}]}, "tools[0].function.params"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
        ({"stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "args": ""}}]},
                       {"role": "tool", "tool_call_id": "1", "content": "x"}]},
         "messages[1].tool_calls[0].function.args"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs.enable_thinkin"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_nested_fields_are_told(fields: dict[str, Any], told: str, server: Serving) -> None:
    answer = post(server, "/v1/chat/completions", **fields)
    assert answer.status_code == 200, answer.text
    assert [warning.split()[0] for warning in answer.json()["warnings"]] == [told]


def test_a_stream_tells_in_its_first_event(server: Serving) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        answer = post(server, path, frob=1, stream=True)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events[0]["warnings"] == ["frob is unknown"]
        assert all("warnings" not in event for event in events[1:])
        assert answer.headers["x-twostroke-warnings"] == "frob is unknown"


def test_the_header_is_ascii_and_short(server: Serving) -> None:
    odd = {f"f{i}é\r\nx-evil: 1{'é' * 9}": 1 for i in range(60)}
    answer = post(server, "/v1/completions", **odd)
    header = answer.headers["x-twostroke-warnings"]
    assert header.isascii()
    assert header.isprintable()
    assert len(header) == 1000
    assert "x-evil" not in answer.headers
    assert len(answer.json()["warnings"]) == 21
    assert answer.json()["warnings"][-1] == "40 more fields are unknown"
    assert len(post(server, "/v1/completions", **{"f" * 10**5: 1}).json()["warnings"][0]) < 100
    answer = post(server, "/v1/chat/completions", chat_template_kwargs={"odd\r\nx-evil: 1\0\x7f ": 1})
    assert answer.status_code == 200
    assert answer.headers["x-twostroke-warnings"].isprintable()
    assert "x-evil" not in answer.headers


def test_official_client_reads_the_warnings(client: openai.OpenAI) -> None:
    """The extension does not disturb it, whole or streamed."""
    extra: Any = {"frob": 1}
    chat = client.chat.completions.create(model="tiny", messages=USER, max_tokens=2, extra_body=extra)  # pyright: ignore
    assert chat.model_extra == {"warnings": ["frob is unknown"]}
    text = client.completions.create(model="tiny", prompt="hi", max_tokens=2, extra_body=extra)
    assert text.model_extra == {"warnings": ["frob is unknown"]}
    chunks = list(client.completions.create(model="tiny", prompt="hi", max_tokens=2, stream=True, extra_body=extra))
    assert chunks[0].model_extra == {"warnings": ["frob is unknown"]}
    response = client.responses.create(model="tiny", input="hi", max_output_tokens=2, extra_body=extra)
    assert response.model_extra is not None
    assert response.model_extra["warnings"] == ["frob is unknown"]


NOTHING: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "x"},
    "modalities": ["text"],
    "audio": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "add_special_tokens": False,
    "best_of": 1,
    "echo": False,
    "bad_words": [],
    "cache_prompt": True,
    "top_k": -1,
    "mirostat": 0,
    "function_call": "auto",
    "functions": [],
    "logprobs": False,
    "return_tokens_as_token_ids": False,
    "stream_options": {"include_obfuscation": False},
}


def test_what_asks_for_nothing_passes_in_silence(server: Serving) -> None:
    plain = answered(server, temperature=0)
    assert answered(server, temperature=0, **NOTHING) == plain


@pytest.mark.parametrize("name", [*other_servers.UNSUPPORTED, "echo", "functions", "add_special_tokens", "n_prompts"])
def test_what_would_change_the_answer_is_refused(name: str, server: Serving) -> None:
    answer = post(server, "/v1/chat/completions", **{name: ["something"]})
    if name == "n_prompts":
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert answer.json()["error"]["message"] == f"{name} is not supported here: leave it out"


@pytest.mark.parametrize(
    "name", ["guided_regexp", "json_shema", "regex_pattern", "grammer_ebnf", "guided_jsn", "structured_output", "ebnff"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_misnamed_constraint_is_refused(name: str, path: str, server: Serving) -> None:
    answer = post(server, path, **{name: "[0-9]"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


def test_extra_body_is_refused(server: Serving) -> None:
    answer = post(server, "/v1/chat/completions", extra_body={"guided_regex": "[0-9]"})
    assert answer.status_code == 400
    assert "put its fields beside the others" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[0-9]{3}"},
        {"guided_regex": "[0-9]{3}"},
        {"structured_outputs": {"regex": "[0-9]{3}", "json": None}},
        {"response_format": {"type": "regex", "pattern": "[0-9]{3}"}},
        {"grammar": {"type": "regex", "value": "[0-9]{3}"}},
        {"grammar": "start: /[0-9]{3}/"},
        {"guided_grammar": "root ::= [0-9] [0-9] [0-9]"},
        {"grammar": "root ::= [0-9]{3}"},
        {"ebnf": "root ::= [0-9] [0-9] [0-9]"},
        {"structured_outputs": {"grammar": "root ::= [0-9] [0-9] [0-9]"}},
        {"response_format": {"type": "grammar", "grammar": "root ::= [0-9] [0-9] [0-9]"}},
    ],
)
def test_patterns_by_every_name(fields: dict[str, Any], server: Serving) -> None:
    text = answered(server, **fields)
    assert len(text) == 3
    assert text.isdigit()


@pytest.mark.parametrize(
    "fields",
    [{"choice": ["yes", "no"]}, {"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}],
)
def test_choices_by_every_name(fields: dict[str, Any], server: Serving) -> None:
    assert answered(server, **fields) in ("yes", "no")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": JSON_FORMAT},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"grammar": {"type": "json", "value": SCHEMA}},
    ],
)
def test_schemas_by_every_name(fields: dict[str, Any], server: Serving) -> None:
    assert set(json.loads(answered(server, **fields))) == {"a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "choice"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": {"type": ["x"], "value": "a"}}, "grammar"),
        ({"guided_choice": []}, "choice"),
        ({"n_predict": 3}, "n_predict"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"n": 1.5}, "n"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs in a stream"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
)
def test_refused_in_one_line(fields: dict[str, Any], param: str, server: Serving) -> None:
    answer = post(server, "/v1/chat/completions", **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "\n" not in answer.json()["error"]["message"]


def test_numbers_without_a_fraction_are_integers(server: Serving) -> None:
    whole = post(server, "/v1/completions", temperature=0, seed=5, n=2, top_k=-1, stop_token_ids=[3]).json()
    same = post(
        server, "/v1/completions", temperature=0, seed=5.0, n=2.0, top_k=-1.0, stop_token_ids=[3.0], max_tokens=2.0
    )
    assert same.status_code == 200
    assert [one["text"] for one in same.json()["choices"]] == [one["text"] for one in whole["choices"]]
    for body, field in ((ChatBody, "max_tokens"), (ResponsesBody, "max_output_tokens"), (CompletionBody, "max_tokens")):
        read: Any = body.model_validate({"messages": USER, "prompt": "x", "input": "x", field: 16.0, "n": 1.0})
        assert getattr(read, field) == 16
        assert type(getattr(read, field)) is int


def test_aliases_of_limits_and_penalties() -> None:
    for given, limit in (({"n_predict": 7}, 7), ({"n_predict": -1}, None), ({"max_tokens": -1}, None), ({}, 16)):
        assert CompletionBody.model_validate({"prompt": "x", **given}).max_tokens == limit
    assert CompletionBody.model_validate({"prompt": "x", "max_completion_tokens": 5}).max_tokens == 5
    assert ChatBody.model_validate({"messages": USER, "n_predict": 7}).max_tokens == 7
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert ResponsesBody.model_validate({"input": "x", name: 7}).max_output_tokens == 7
    assert ChatBody.model_validate({"messages": USER, "repeat_penalty": 1.5}).repetition_penalty == 1.5
    greedy = ChatBody.model_validate({"messages": USER, "top_p": 0, "temperature": 0.7})
    assert (greedy.top_p, greedy.temperature) == (1.0, 0.0)
    assert [CompletionBody.model_validate({"prompt": "x", "logprobs": value}).logprobs for value in (True, False)] == [
        0,
        None,
    ]


def test_top_p_of_0_is_greedy(server: Serving) -> None:
    greedy = answered(server, temperature=0)
    assert {answered(server, top_p=0, temperature=2.0, seed=seed) for seed in range(3)} == {greedy}


def test_continue_final_message(server: Serving, reference: LLM) -> None:
    """The prompt ends within the last message, as transformers makes it."""
    messages = [*USER, {"role": "assistant", "content": "the quick"}]
    ids = reference.tokenizer.encode_chat(messages, continue_final_message=True)
    expected = reference.generate([ids], max_tokens=8)[0].text
    assert answered(server, messages=messages, temperature=0, continue_final_message=True)[: len(expected)] == expected
    both = {"add_generation_prompt": False, "continue_final_message": True}
    counted = post(server, "/tokenize", messages=messages, **both).json()
    assert counted["tokens"] == ids
    text = reference.tokenizer.decode(ids, skip_special=False)
    assert text.endswith("the quick")


def test_add_generation_prompt_and_truncation(server: Serving, reference: LLM) -> None:
    tokenizer = reference.tokenizer
    for asked in (True, False):
        ids = tokenizer.encode_chat(USER, add_generation_prompt=asked)
        made = post(server, "/v1/chat/completions", add_generation_prompt=asked).json()
        assert made["usage"]["prompt_tokens"] == len(ids)
        assert post(server, "/tokenize", add_generation_prompt=asked).json()["tokens"] == ids
    echoed = post(server, "/v1/completions", prompt="the quick brown fox", truncate_prompt_tokens=3, echo=True).json()
    assert echoed["usage"]["prompt_tokens"] == 3
    last = tokenizer.decode(tokenizer.encode("the quick brown fox")[-3:], skip_special=False)
    assert echoed["choices"][0]["text"].startswith(last)


def test_tokenize_counts_what_generation_counts(server: Serving) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}]
    cases: list[dict[str, Any]] = [
        {"messages": USER},
        {"messages": USER, "tools": tools},
        {"messages": USER, "tools": tools, "tool_choice": "none"},
        {"messages": USER, "add_generation_prompt": False},
        {"messages": [*USER, {"role": "assistant", "content": "yes and"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    ]
    counts: list[int] = []
    for case in cases:
        counted = post(server, "/tokenize", **case).json()
        made = post(server, "/v1/chat/completions", **case).json()
        assert (
            counted["count"] == made["usage"]["prompt_tokens"] == len(counted["tokens"]) == len(counted["token_strs"])
        )
        assert counted["max_model_len"] > 0
        counts.append(counted["count"])
    assert counts[1] > counts[0] == counts[2] > counts[3]
    for special in (True, False):
        body = {"prompt": "the quick", "add_special_tokens": special}
        counted = server.http().post("/tokenize", json=body).json()["count"]
        made = post(server, "/v1/completions", **body).json()
        assert counted == made["usage"]["prompt_tokens"]
    assert server.http().post("/tokenize", json={}).status_code == 400
    error = server.http().post("/tokenize", json={"prompt": "x", "messages": USER}).json()["error"]
    assert error["message"] == "prompt: give either prompt or messages"


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    "choice",
    [
        NAMED,
        {"type": "function", "name": "g"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
    ],
)
def test_every_form_of_a_tool_choice(server: Serving, choice: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": FUNCTIONS, "tool_choice": choice}
    answer = post(server, "/v1/chat/completions", **body, max_tokens=200)
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"g"}


def test_any_is_required_and_allowed_tools_may_be_auto() -> None:
    def body(choice: Any) -> ChatBody:
        return ChatBody.model_validate(
            {"messages": [{"role": "user", "content": "x"}], "tools": FUNCTIONS, "tool_choice": choice}
        )

    assert body("any").must_call
    auto = body({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}})
    assert not auto.must_call
    assert [function.name for function in auto.callable_functions] == ["g"]


def test_arguments_of_earlier_calls_may_be_objects() -> None:
    def rendered(arguments: Any) -> Any:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}).for_template()

    assert rendered({"a": 1}) == rendered('{"a": 1}')


def test_an_unknown_field_of_allowed_tools_is_told(server: Serving) -> None:
    allowed = {"mode": "auto", "tools": [NAMED], "mdoe": "auto"}
    body = {"messages": USER, "tools": FUNCTIONS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    answer = post(server, "/v1/chat/completions", **body)
    assert answer.json()["warnings"] == ["tool_choice.mdoe is unknown: did you mean mode?"]


def test_fields_of_vllm(client: openai.OpenAI, reference: LLM) -> None:
    """They do what they do in `LLM.generate`, in completions and in chats."""
    asked: Any = {"model": "tiny", "max_tokens": 8, "seed": 1}
    fields: dict[str, Any] = {"allowed_token_ids": [0, 40, 41], "bad_words": [reference.tokenizer.token_text(40)]}
    fields |= {"skip_special_tokens": False, "ignore_eos": True}
    made = client.completions.create(prompt="a", logprobs=1, extra_body=fields, **asked).choices[0]
    local: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    assert made.text == reference.generate(["a"], max_tokens=8, seed=1, temperature=1.0, **local)[0].text
    assert set(made.logprobs.tokens or []) <= {"<s>", reference.tokenizer.token_text(41)}  # pyright: ignore
    assert (made.logprobs.text_offset or [])[-1] < 1 + len(made.text)  # pyright: ignore
    messages: Any = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(messages=messages, extra_body=fields, **asked).choices[0].message.content
    assert set((chat or "").replace("<s>", "")) <= set(reference.tokenizer.token_text(41))
    for wrong in (
        *({"allowed_token_ids": ids} for ids in ([999999], "x", [])),  # none is not all
        *({"bad_words": words} for words in ([""], 5)),
    ):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(prompt="a", extra_body=wrong, **asked)
