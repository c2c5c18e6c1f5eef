"""What templates may write, against transformers' renderer."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.models.checkpoints.test_chat import ASSISTANT, CALL, SYSTEM, TOOLS, USER
from twostroke.models.checkpoints.chat_templates import ChatTemplates

THOUGHT = {**ASSISTANT, "reasoning_content": "Hm."}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}
SOURCES = {
    "scope of generation": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation in a loop": "{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}\n"
    "{% endfor %}",
    "generation, trimmed": "a\n  {%- generation -%}\n b \n {%- endgeneration %}\n c",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}",
    "tojson": "{{ tools | tojson }}{{ tools | tojson(ensure_ascii=true, sort_keys=true) }}"
    "{{ messages | tojson(indent=2) }}{{ messages | tojson(separators=(',', ':')) }}{{ 1.50 | tojson }}"
    "{{ none | tojson }}",
    "dict and namespace": "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}{% set n = namespace(i=0) %}"
    "{% for m in messages %}{% set n.i = n.i + 1 %}{% if n.i == 2 %}{% continue %}{% endif %}{{ n.i }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.items() | list | length }}{{ m.get('name', '-') }}"
    "{{ (m.content or '') | string | upper | trim }}{% endfor %}{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}",
    "macro": "{% macro show(x, level=0) %}{% if x is mapping %}{% for k, v in x | dictsort %}{{ k }}:"
    "{{ show(v, level + 1) }}{% endfor %}{% else %}{{ x }}{% endif %}{% endmacro %}{{ show(tools[0]) if tools }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{% if nothing is defined %}x{% endif %}{{ documents is none }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | join(',') }}"
    "{{ messages | rejectattr('role', 'in', ['user']) | list | length }}{{ messages[-1].role == 'tool' }}{{ '%s' % 3 }}"
    "{{ messages[::-1][0].role }}{{ ['b', 'a'] | sort | first }}{{ 'x' ~ 1 }}{{ 7 // 2 }}",
    "call": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{{ c['function']['arguments'].items() | list }}{% endfor %}{% endfor %}",
}
CHATS = {
    "turns": [SYSTEM, USER, ASSISTANT, USER],
    "thoughts": [USER, THOUGHT, {**ASSISTANT, "thinking": "Aha."}, {**ASSISTANT, "reasoning": "Oh."}, USER],
    "call": [USER, CALL],
    "parts": [PARTS, ASSISTANT],
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("source", SOURCES)
def test_templates_render_as_in_transformers(source: str, chat: str, tools: Any) -> None:
    present = [{key: value for key, value in message.items() if value is not None} for message in CHATS[chat]]
    rendered, _ = render_jinja_template(conversations=[present], tools=tools, chat_template=SOURCES[source])
    ours = ChatTemplates({"default": SOURCES[source]}, {}).render(present, tools=tools, add_generation_prompt=False)
    assert ours == rendered[0]
