"""Thoughts are set apart from the answer, on every API, whole and streamed."""

import contextlib
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import anthropic
import pytest

from tests.server.conftest import Serving, serving
from tests.thinking import thinking_model, write
from twostroke.api.llm import LLM

USER = [{"role": "user", "content": "the fox?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
CHAT = "/v1/chat/completions"
# How each form writes a thought, an answer, and a call.
WRITTEN = {
    "switch": ("<think>\n{}\n</think>\n\n{}", '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>'),
    "open": ("{}\n</think>\n\n{}", '<tool_call>\n{{"name": "look", "arguments": {}}}\n</tool_call>'),
    "mistral": ("[THINK]{}[/THINK]{}", '[TOOL_CALLS]look{}'),
    "gemma": ("<|channel>thought\n{}<channel|>{}", '{{"name": "look", "arguments": {}}}'),
    "harmony": (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
    ),
}  # fmt: skip
THOUGHT, ANSWER = 'hm, <b> {"a": 1}?', 'So it </think> is {"b": 2}.'


@pytest.fixture(scope="module")
def thinking(
    tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Serving]]:
    """A server of a model whose template is of this kind."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Serving] = {}

        def server(kind: str) -> Serving:
            if kind not in running:
                directory = thinking_model(tiny_directory("llama"), tmp_path_factory.mktemp(kind), kind)
                llm = LLM(str(directory), kv_bytes=4 << 20, threads=1)
                running[kind] = stack.enter_context(serving(llm))
            return running[kind]

        yield server


@contextlib.contextmanager
def writing(server: Serving, text: str, end: str | None = "</s>") -> Generator[None]:
    stop = write(server.front, text, end)
    try:
        yield
    finally:
        stop()


def post(server: Serving, path: str, **body: Any) -> Any:
    with server.http() as http:
        response = http.post(path, json={"model": "tiny", "max_tokens": 300, **body})
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line[:1] in ("d", "{")]
        return [json.loads(line) for line in lines if line.startswith("{")]


def joined(events: list[Any], key: str) -> str:
    return "".join(event["choices"][0]["delta"].get(key) or "" for event in events if event["choices"])


# Chat completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRITTEN)
def test_chat(kind: str, thinking: Callable[[str], Serving]) -> None:
    server = thinking(kind)
    text = WRITTEN[kind][0].format(THOUGHT, ANSWER)
    with writing(server, text):
        whole = post(server, CHAT, messages=USER)
        events = post(server, CHAT, messages=USER, stream=True, stream_options={"include_usage": True})
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "stop"
    message = choice["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (THOUGHT, THOUGHT, ANSWER)
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (THOUGHT, ANSWER)
    assert joined(events, "reasoning") == THOUGHT
    usage = whole["usage"]
    tokenizer = server.llm.tokenizer
    ids = tokenizer.encode(text, add_bos=False)
    assert usage["completion_tokens"] == len(ids) + 1
    mark = {"mistral": "[/THINK]", "gemma": "<channel|>", "harmony": "<|end|>"}.get(kind, "</think>")
    thought = tokenizer.encode(text[: text.index(mark) + len(mark)], add_bos=False)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(thought)}
    assert events[-1]["usage"] | {"prompt_tokens_details": 0} == usage | {"prompt_tokens_details": 0}


@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_after_thoughts(kind: str, thinking: Callable[[str], Serving]) -> None:
    """Arguments follow their schema, and what looks like a call in a thought is none."""
    server = thinking(kind)
    thought = 'or {"name": "look", "arguments": {"at": "x"}}?'
    form, call = WRITTEN[kind]
    arguments = '{"at": "the fox"}'
    text = form.format(thought, call.format(arguments))
    text = text.replace("<|channel|>final<|message|>", "")
    with writing(server, text, "<|call|>" if kind == "harmony" else "</s>"):
        whole = post(server, CHAT, messages=USER, tools=[TOOL])
        events = post(server, CHAT, messages=USER, tools=[TOOL], stream=True)
    [choice] = whole["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    assert message["reasoning_content"] == joined(events, "reasoning_content") == thought
    [called] = message["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("look", json.loads(arguments))


def test_a_call_that_must_be_made(thinking: Callable[[str], Serving]) -> None:
    for kind in ("switch", "open", "harmony"):
        server = thinking(kind)
        text = WRITTEN[kind][0].format(THOUGHT, '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>')
        with writing(server, text):
            message = post(server, CHAT, messages=USER, tools=[TOOL], tool_choice="required")["choices"][0]["message"]
        assert message["reasoning_content"] == THOUGHT, kind
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


def test_grammars_begin_behind_the_thought(thinking: Callable[[str], Serving]) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    for kind, (form, _) in WRITTEN.items():
        server = thinking(kind)
        for fields, expected in ({"response_format": format}, '{"n": 7}'), ({"regex": "7+"}, "7"):
            with writing(server, form.format(THOUGHT, expected)):
                message = post(server, CHAT, messages=USER, **fields)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (THOUGHT, expected), (kind, fields)
            with writing(server, form.format(THOUGHT, "Sure")):
                content = post(server, CHAT, messages=USER, **fields, max_tokens=90)["choices"][0]["message"]["content"]
            assert content[:1] == expected[:1], (kind, fields)


def test_budgets(thinking: Callable[[str], Serving]) -> None:
    """The thought is closed and the answer goes on, under each name that the field has."""
    for kind in ("switch", "open", "mistral", "harmony"):
        server = thinking(kind)
        text = WRITTEN[kind][0].format("the quick brown fox jumps over the lazy dog", "no")
        for fields in (
            {"thinking_budget": 4},
            {"thinking_token_budget": 4},
            {"reasoning": {"max_tokens": 4}},
            {"thinking": {"type": "enabled", "budget_tokens": 4}},
        ):
            with writing(server, text):
                made = post(server, CHAT, messages=USER, choice=["yes", "no"], **fields)
            message = made["choices"][0]["message"]
            assert message["content"] in ("yes", "no")
            ids = server.llm.tokenizer.encode("the quick brown fox jumps", add_bos=False)
            assert server.llm.tokenizer.decode(ids).startswith(message["reasoning_content"])
            assert 0 < len(message["reasoning_content"]) < 20
            assert "warnings" not in made, (kind, fields)
            assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] < 40


def test_thoughts_are_turned_off(thinking: Callable[[str], Serving]) -> None:
    """By the template where it can, else by closing the thought at once."""
    for kind, closed in (("switch", True), ("open", False), ("mistral", False), ("harmony", False)):
        server = thinking(kind)
        text = "no" if closed else WRITTEN[kind][0].format("the quick brown fox", "no")
        for fields in (
            {"reasoning_effort": "none"},
            {"reasoning": {"enabled": False}},
            {"thinking": {"type": "disabled"}},
        ):
            with writing(server, text):
                made = post(server, CHAT, messages=USER, choice=["yes", "no"], **fields)
            message = made["choices"][0]["message"]
            assert "reasoning_content" not in message, (kind, fields)
            assert message["content"] in ("yes", "no")
    with writing(thinking("switch"), "<think>x</think>y"):
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        message = post(thinking("switch"), CHAT, messages=USER, **off)["choices"][0]["message"]
    assert message["content"] == "<think>x</think>y", "what comes behind a closed thought is the answer"


def test_a_thought_that_is_never_closed(thinking: Callable[[str], Serving]) -> None:
    server = thinking("open")
    with writing(server, "the quick brown fox"):
        made = post(server, CHAT, messages=USER, max_tokens=4)
    [choice] = made["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert "the quick brown fox".startswith(choice["message"]["reasoning_content"])
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


def test_stop_strings(thinking: Callable[[str], Serving]) -> None:
    server = thinking("open")
    with writing(server, "a STOP\n\nb</think>\n\nc STOP d"):
        message = post(server, CHAT, messages=USER, stop=["STOP", "\n\n"])["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a STOP\n\nb", "c ")


def test_the_tokens_are_those_of_before(thinking: Callable[[str], Serving]) -> None:
    """Set apart, kept in the text, alone and with others: the model writes the same."""
    server = thinking("open")
    body = {"messages": USER, "max_tokens": 24, "ignore_eos": True, "temperature": 1, "seed": 3,
            "return_token_ids": True}  # fmt: skip
    apart = post(server, CHAT, **body)["choices"][0]
    assert post(server, CHAT, **body, n=3)["choices"][0]["token_ids"] == apart["token_ids"]
    streamed = post(server, CHAT, **body, stream=True)
    assert [id for event in streamed for id in event["choices"][0].get("token_ids", ())] == apart["token_ids"]
    prompt = server.llm.tokenizer.encode_chat(USER)
    raw = server.llm.generate([prompt], max_tokens=24, ignore_eos=True, temperature=1, seed=3)[0].tokens
    assert [token.id for token in raw] == apart["token_ids"]
    budget = post(server, CHAT, **body, thinking_budget=1000)["choices"][0]
    assert budget["token_ids"] == apart["token_ids"]
    assert budget["message"] == apart["message"]


def test_the_parser_can_be_told(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    directory = thinking_model(tiny_directory("llama"), tmp_path, "switch")
    text = "<think>a</think>b"
    with serving(LLM(str(directory), kv_bytes=4 << 20, threads=1), reasoning_parser="none") as server:
        with writing(server, text):
            made = post(server, CHAT, messages=USER, thinking={"type": "enabled"})
        assert made["choices"][0]["message"]["content"] == text
        assert made["warnings"] == ["thinking has no effect: this model's answers have no thoughts that are set apart"]
        assert "reasoning_content" not in made["choices"][0]["message"]


# The other APIs -------------------------------------------------------------------------------------------------------


def test_responses(thinking: Callable[[str], Serving]) -> None:
    """A reasoning item before the message, with its own events."""
    for kind in WRITTEN:
        server = thinking(kind)
        with writing(server, WRITTEN[kind][0].format(THOUGHT, ANSWER)):
            made = server.client.responses.create(model="tiny", input="hi", max_output_tokens=300)
            events = list(server.client.responses.create(model="tiny", input="hi", max_output_tokens=300, stream=True))
        thought, message = made.output
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert [(part.type, part.text) for part in thought.content] == [("reasoning_text", THOUGHT)]
        assert (thought.status, thought.summary) == ("completed", [])
        assert made.output_text == ANSWER
        assert message.type == "message"
        assert made.usage is not None
        assert 0 < made.usage.output_tokens_details.reasoning_tokens < made.usage.output_tokens
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
        kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
        assert kinds == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added"),
            *("reasoning_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "content_part.added"),
            *("output_text.done", "content_part.done", "output_item.done"),
            "completed",
        ]
        last = events[-1]
        assert last.type == "response.completed"
        assert [item.type for item in last.response.output] == ["reasoning", "message"]


def test_items_of_thoughts_come_back(thinking: Callable[[str], Serving]) -> None:
    """Sent back, referred to or stored, a thought is that of the message or the call behind it."""
    server = thinking("switch")
    client = server.client
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}

    def count(*items: Any) -> int:
        return client.responses.input_tokens.count(model="tiny", input=list(items)).input_tokens

    said = {"role": "assistant", "content": "so"}
    length = len(server.llm.tokenizer.encode("<think>\nhm\n</think>\n\n", add_bos=False))
    assert abs(count(USER[0], thought, said) - count(USER[0], said) - length) <= 1
    assert count(USER[0], thought, said, USER[0]) == count(USER[0], said, USER[0]), "the template drops it"
    encrypted = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": None,
                 "encrypted_content": "abc"}  # fmt: skip
    assert count(USER[0], encrypted, call, result) == count(USER[0], call, result)
    with writing(server, "<think>hm</think>so"):
        first = client.responses.create(model="tiny", input="hi", max_output_tokens=90)
        second = client.responses.create(
            model="tiny", input="and?", previous_response_id=first.id, max_output_tokens=90
        )
    assert [item.type for item in second.output] == ["reasoning", "message"]


def test_messages(thinking: Callable[[str], Serving]) -> None:
    """Anthropic's thinking blocks, with a signature for its clients."""
    for kind in WRITTEN:
        server = thinking(kind)
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        asked: Any = {"model": "tiny", "max_tokens": 300, "messages": USER}
        with writing(server, WRITTEN[kind][0].format(THOUGHT, ANSWER)):
            made = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                events = list(stream)
                last = stream.get_final_message()
        for message in (made, last):
            thought, text = message.content
            assert thought.type == "thinking"
            assert text.type == "text"
            assert (thought.thinking, text.text, bool(thought.signature)) == (THOUGHT, ANSWER, True)
            again = [*USER, {"role": "assistant", "content": [block.model_dump() for block in message.content]}, *USER]
            assert client.messages.count_tokens(model="tiny", messages=cast(Any, again)).input_tokens > 0
        deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
        assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
        stops = [event.index for event in events if event.type == "content_block_stop"]
        assert stops == [0, 1]
        assert [block.to_dict() for block in made.content] == [block.to_dict() for block in last.content]


def test_messages_limit_and_turn_off_thoughts(thinking: Callable[[str], Serving]) -> None:
    server = thinking("open")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    asked: Any = {"model": "tiny", "max_tokens": 90, "messages": USER, "output_config": form}
    with writing(server, "the quick brown fox jumps over the lazy dog"):
        made = client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 3})
        off = client.messages.create(**asked, thinking={"type": "disabled"})
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert [block.type for block in off.content] == ["text"]
    for message in (made, off):
        block = message.content[-1]
        assert block.type == "text"
        assert json.loads(block.text) == {"n": 7}


def test_a_thought_of_an_earlier_turn_of_messages(thinking: Callable[[str], Serving]) -> None:
    server = thinking("switch")
    block = {"type": "thinking", "thinking": "hm", "signature": "x"}
    said = {"role": "assistant", "content": [block, {"type": "text", "text": "so"}]}
    with server.http() as http:

        def count(*messages: Any) -> int:
            body = {"model": "tiny", "messages": list(messages)}
            return http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

        plain = {"role": "assistant", "content": "so"}
        assert count(*USER, said) > count(*USER, plain)
        assert count(*USER, said, *USER) == count(*USER, plain, *USER), "the template drops it"


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(stream: bool, thinking: Callable[[str], Serving]) -> None:
    for kind in WRITTEN:
        server = thinking(kind)
        with writing(server, WRITTEN[kind][0].format(THOUGHT, ANSWER)):
            chat = post(server, "/api/chat", messages=USER, stream=stream)
            plain = post(server, "/api/generate", prompt="hi", stream=stream)
        chat, plain = ([one] if isinstance(one, dict) else one for one in (chat, plain))
        assert "".join(one["message"].get("thinking", "") for one in chat) == THOUGHT
        assert "".join(one["message"]["content"] for one in chat) == ANSWER
        assert "".join(one.get("thinking", "") for one in plain) == THOUGHT
        assert "".join(one["response"] for one in plain) == ANSWER


def test_ollama_think(server: Serving, thinking: Callable[[str], Serving]) -> None:
    """`think` is a switch of the template, or an effort; a model without thoughts says that it has none."""
    for think, text in ((False, "no"), (True, "<think>hm</think>no")):
        with writing(thinking("switch"), text):
            made = post(
                thinking("switch"), "/api/chat", messages=USER, stream=False, think=think, format={"enum": ["no"]}
            )
        assert made["message"].get("thinking") == ((think and "hm") or None)
    with writing(thinking("harmony"), "<|channel|>final<|message|>x"):
        counts = [
            post(thinking("harmony"), "/api/chat", messages=USER, stream=False, think=level)["prompt_eval_count"]
            for level in ("low", "medium", "high", "the quick brown fox")
        ]
    assert counts[-1] > counts[0], "the level is in the prompt"
    told = post(server, "/api/chat", messages=USER, stream=False, think=True, options={"num_predict": 1})["warnings"]
    assert told[1:] == ["think has no effect: this model's answers have no thoughts that are set apart"]
    history = [*USER, {"role": "assistant", "content": "so", "thinking": "hm"}]
    with writing(thinking("switch"), "x"):
        long, short = (
            post(thinking("switch"), "/api/chat", messages=one, stream=False)["prompt_eval_count"]
            for one in (history, [*USER, {"role": "assistant", "content": "so"}])
        )
    assert long > short


def test_show_tells_that_a_model_thinks(server: Serving, thinking: Callable[[str], Serving]) -> None:
    for one, told in ((server, ["completion", "tools"]), (thinking("open"), ["completion", "tools", "thinking"])):
        with one.http() as http:
            assert http.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == told


# Calls of gpt-oss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
        " to=functions.look<|channel|>commentary json<|message|>{}",
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look <tool<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}",
    ],
)
def test_calls_of_gpt_oss(call: str, thinking: Callable[[str], Serving]) -> None:
    server = thinking("harmony")
    with writing(server, call.format('{"at": "x"}'), "<|call|>"):
        message = post(server, CHAT, messages=USER, tools=[TOOL])["choices"][0]["message"]
    [called] = message["tool_calls"]
    assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("look", {"at": "x"})
    assert message.get("reasoning_content") == ("hm" if "hm" in call else None)
    assert message["content"] == ("I look <tool" if "I look" in call else None)


def test_a_template_that_takes_text_or_a_thought_beside_calls(
    tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    """That of gpt-oss refuses both: the thought is left out then."""
    directory = thinking_model(tiny_directory("llama"), tmp_path, "harmony")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('one of them') }}{% endif %}"
        "<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}{% endfor %}<|message|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    with serving(LLM(str(directory), kv_bytes=4 << 20, threads=1)) as running, running.http() as http:

        def prompt(**said: Any) -> str:
            messages = [*USER, {"role": "assistant", "tool_calls": [call], **said},
                        {"role": "tool", "tool_call_id": "c", "content": "seen"}]  # fmt: skip
            told = http.post("/tokenize", json={"messages": messages, "tools": [TOOL]})
            assert told.status_code == 200, told.text
            return running.llm.tokenizer.decode(told.json()["tokens"])

        assert "hm" in prompt(reasoning="hm")
        both = prompt(reasoning="hm", content="I look.")
        assert "I look." in both
        assert "hm" not in both


def test_long_bodies_and_kept_answers(thinking: Callable[[str], Serving]) -> None:
    """They go through another process, and under a name, with their thoughts."""
    server = thinking("switch")
    long = [{"role": "user", "content": "the fox " * 3}, *USER]
    body = {"messages": [*long, {"role": "assistant", "content": "so", "reasoning": "x" * 17_000}, *USER]}
    with writing(server, "<think>hm</think>So."):
        assert post(server, CHAT, **body)["choices"][0]["message"]["reasoning_content"] == "hm"
        kept = post(server, CHAT, messages=USER, keep=True)["context"]
        again = post(server, CHAT, context=kept, messages=USER)
    assert again["choices"][0]["message"]["content"] == "So."
    text = "[user]the fox?</s>[assistant]So.</s>[user]the fox?</s>[assistant]"
    assert again["usage"]["prompt_tokens"] == len(server.llm.tokenizer.encode(text, add_bos=False))


# The prompt -----------------------------------------------------------------------------------------------------------


def test_earlier_thoughts_reach_the_template(thinking: Callable[[str], Serving]) -> None:
    """As it expects them, under each name that clients send."""
    server = thinking("switch")
    for name in ("reasoning_content", "reasoning"):
        said = [*USER, {"role": "assistant", "content": "so", name: "hm"}]
        with server.http() as http:
            told = http.post("/tokenize", json={"messages": said, "add_generation_prompt": False}).json()
        text = server.llm.tokenizer.decode(told["tokens"], skip_special=False)
        assert text == "[user]the fox?</s>[assistant]<think>\nhm\n</think>\n\nso</s>"
        with server.http() as http:
            told = http.post("/tokenize", json={"messages": [*said, *USER]}).json()
        assert "hm" not in server.llm.tokenizer.decode(told["tokens"]), "the template drops thoughts of earlier turns"


def test_fields_without_effect_are_told(server: Serving, thinking: Callable[[str], Serving]) -> None:
    told = "has no effect: this model's answers have no thoughts that are set apart"
    unused = "has no effect: the chat template does not use it"
    for fields, warnings in (
        ({"thinking": {"type": "enabled"}}, [f"thinking {told}"]),
        ({"thinking": {"type": "disabled"}}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking_budget": 5}, [f"thinking_budget {told}"]),
        ({"thinking_budget": -1}, None),
        ({"reasoning": {"effort": "low"}}, [f"reasoning.effort {unused}"]),
        ({"reasoning": {"max_tokens": 7}}, [f"reasoning {told}"]),
    ):
        assert post(server, CHAT, messages=USER, **{"max_tokens": 1, **fields}).get("warnings") == warnings, fields
    with writing(thinking("harmony"), "<|channel|>final<|message|>x"):
        made = post(thinking("harmony"), CHAT, messages=USER, reasoning={"effort": "low"})
    assert "warnings" not in made
