"""Rendered chats are the same text that transformers renders, and a template's refusals are typed errors."""

import json
from typing import Any

import pytest

from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.models.checkpoints.chat_templates import ChatTemplates
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer

USER = {"role": "user", "content": "Why is the sky blue? <b>&</b> 'quotes' \"too\" ü 😀\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Rayleigh scattering."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}],
}
ANSWERS = [{"role": "tool", "content": '{"celsius": 4}'}, {"role": "tool", "content": "<rain>"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, e.g. 'Zürich' & <others>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "many turns": [SYSTEM, USER, ASSISTANT, USER],
    "null fields": [{**USER, "tool_calls": None}, {**ASSISTANT, "tool_calls": None}, USER],
    "assistant last": [USER, ASSISTANT],
    "empty content": [{"role": "user", "content": ""}],
}
TOOL_CHATS = {"call": [USER, CALL, *ANSWERS], "call and answer": [SYSTEM, USER, CALL, *ANSWERS, ASSISTANT, USER]}


def reference(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
    """The result of transformers' apply_chat_template with the chosen template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    present = [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]
    rendered, _ = render_jinja_template(
        conversations=[present], tools=tools, chat_template=tokenizer.chat_template, add_generation_prompt=prompt
    )
    return rendered[0]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_source(open_checkpoint("smollm2-135m").tokenizer_source)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", CHATS)
def test_smollm_renders_as_transformers(smollm: Tokenizer, name: str, tools: Any, prompt: bool) -> None:
    text = smollm.chat(CHATS[name], tools=tools, add_generation_prompt=prompt)
    assert text == reference(smollm, CHATS[name], tools, prompt)
    assert smollm.encode_chat(CHATS[name], tools=tools, add_generation_prompt=prompt) == smollm.encode(text)


def test_smollm_brings_its_own_system_message(smollm: Tokenizer) -> None:
    assert smollm.chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm.encode_chat([{"role": "user", "content": "Hi"}])
    assert [ids.count(1), ids.count(2)] == [3, 2]  # control tokens, not their spelling


@pytest.mark.models
@pytest.mark.parametrize("model", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen_renders_as_transformers(model: str) -> None:
    tokenizer = Tokenizer.from_source(open_checkpoint(model).tokenizer_source)
    for messages in [*CHATS.values(), *TOOL_CHATS.values()]:
        for tools in (None, TOOLS):
            for prompt in (True, False):
                text = tokenizer.chat(messages, tools=tools, add_generation_prompt=prompt)
                assert text == reference(tokenizer, messages, tools, prompt)


def render(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(messages or [USER], **variables)


def test_the_dialect_of_hugging_face_templates() -> None:
    assert render("{{ bos_token }}{{ eos_token is defined }}{{ tools is none }}") == "<s>FalseTrue"
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}") == "user\n"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{{ {'b': '<ü>', 'a': 1} | tojson }}") == '{"b": "<ü>", "a": 1}'
    assert render("{{ {'b': [1]} | tojson(indent=1) }}") == '{\n "b": [\n  1\n ]\n}'
    assert render("a{% generation %}{{ x }}{% endgeneration %}c", x="b") == "abc"
    assert render("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}") == "2"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ add_generation_prompt }}{{ enable_thinking }}", enable_thinking=False) == "TrueFalse"


def test_thoughts_as_blocks_of_content() -> None:
    """Ministral 3's templates read them so, and nothing else; a template that reads a field gets the field."""
    blocks = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% if b['type'] == 'text' %}{{ b['text'] }}{% elif b['type'] == 'thinking' %}[THINK]{{ b['thinking'] }}"
        "[/THINK]{% endif %}{% endfor %}{% endif %}"
    )
    loop = "{% for m in messages %}" + blocks + "|{% endfor %}"
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert render(loop, said) == "[THINK]hm[/THINK]so|"
    assert render(loop, {**said, "content": ""}) == "[THINK]hm[/THINK]|"
    assert render(loop, {"role": "assistant", "content": "so"}) == "so|"
    assert render(loop, said, continue_final_message=True) == "[THINK]hm[/THINK]so"
    reads_field = "{% for m in messages %}{{ m.reasoning_content }}" + blocks + "|{% endfor %}"
    assert render(reads_field, said) == "hmso|"


def test_content_that_is_none_stays_none() -> None:
    """DeepSeek-R1's and LFM2's templates ask for it; other keys that are null are left out."""
    template = "{{ messages[0]['content'] is none }}{{ 'tool_calls' in messages[0] }}"
    assert render(template, {"role": "assistant", "content": None, "tool_calls": None}) == "TrueFalse"
    assert render(template, {"role": "assistant", "content": ""}) == "FalseFalse"


HARMONY = """{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {%- if "content" in m and "<|channel|>" in m.content %}{{ raise_exception("a channel") }}{% endif %}
        {%- if m.thinking %}{{ "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}{% endif %}
        {%- if m.tool_calls %}
            {%- set call = m.tool_calls[0].function %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
            {{- call.arguments | tojson + "<|call|>" }}
        {%- else %}{{ "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}{% endif %}
    {%- else %}{{ "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def test_harmony() -> None:
    """Channels of thoughts, of calls and of answers; a message that only calls tools has no content to look into."""
    call = {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": CALL["tool_calls"]}
    template = ChatTemplates({"default": HARMONY}, {})
    call_of = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
    assert template.render([USER, call, ASSISTANT]) == (
        f"<|start|>user<|message|>{USER['content']}<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        f"<|start|>assistant to=functions.{call_of['name']}<|channel|>commentary json<|message|>"
        f"{json.dumps(call_of['arguments'], ensure_ascii=False)}<|call|>"
        f"<|start|>assistant<|channel|>final<|message|>{ASSISTANT['content']}<|end|><|start|>assistant"
    )
    assert call["content"] is None
    with pytest.raises(InvalidRequest, match="a channel"):
        template.render([USER, {**ASSISTANT, "content": "<|channel|>final"}])


def test_the_template_for_tools_is_used_for_tools() -> None:
    chat = ChatTemplates({"default": "plain", "tool_use": "tools"}, {})
    assert [chat.render([USER]), chat.render([USER], tools=TOOLS)] == ["plain", "tools"]
    assert ChatTemplates({"default": "plain"}, {}).render([USER], tools=TOOLS) == "plain"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_raises_refuses_the_request_in_one_line(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template does not accept") as caught:
        render(template)
    assert "\n" not in str(caught.value)


def test_raise_exception_keeps_its_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_no_template_and_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplates({}, {}).render([USER])
    with pytest.raises(InvalidRequest, match="messages is empty"):
        ChatTemplates({"default": "x"}, {}).render([])


def test_a_template_with_a_syntax_error_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        render("ok\n{% if %}")


NONE_TESTED = (
    "{% for m in messages %}{% if m['content'] is none %}calls{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
    "content is none": NONE_TESTED,
}


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template(conversations=[messages], chat_template=template, **options)[0][0]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("text", ["The answer", "The answer ", " \n two\n\n", "a", "x </s> x"])
def test_the_last_message_is_continued_as_by_transformers(template: str, text: str) -> None:
    messages = [USER, {"role": "assistant", "content": text}]
    expected = by_transformers(template, messages, continue_final_message=True)
    assert ChatTemplates({"default": template}, {}).render(messages, continue_final_message=True) == expected


def test_smollm_continues_the_last_message(smollm: Tokenizer) -> None:
    messages = [SYSTEM, USER, ASSISTANT]
    text = smollm.chat(messages, continue_final_message=True)
    assert text == by_transformers(smollm.chat_template or "", messages, continue_final_message=True)
    assert smollm.encode_chat(messages, continue_final_message=True) == smollm.encode(text, add_bos=False)
    with pytest.raises(InvalidRequest, match="needs a text in the last message"):
        smollm.chat([USER, CALL], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="changes the last message"):
        ChatTemplates({"default": "{{ messages[0].content }}"}, {}).render(messages, continue_final_message=True)


def test_a_content_of_none_stays(smollm: Tokenizer) -> None:
    """As in transformers: the templates of DeepSeek-R1 and LFM2 test for it."""
    assert ChatTemplates({"default": NONE_TESTED}, {}).render([USER, CALL]) == by_transformers(
        NONE_TESTED, [USER, CALL]
    )
    assert ChatTemplates({"default": NONE_TESTED}, {}).render([CALL]) == "calls"
