"""How model families write calls: a table of formats, and which of them a model uses.

Sources: the chat templates that are published with the models, and their model cards.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have fullwidth bars

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from twostroke.server.tools.json_calls import FENCE, JsonCalls, NamedJson
from twostroke.server.tools.pythonic import Pythonic
from twostroke.server.tools.tagged import IgnoredMarkup, Tagged
from twostroke.server.tools.text_buffer import CallFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # as Hermes and Qwen write it; also what is asked of any other model
_TAGS = ("</tool_call>", "</tools>", "</tool_calls>", "</function_call>", "</function_calls>", "</TOOLCALL>")
_QWEN_PARAMETER = r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)"
_NAMED_PARAMETER = r'parameter name="([^"]+)"[^>]*>(.*?)</(?:｜DSML｜)?parameter>'
_DEEPSEEK = (FENCE, "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_HARMONY = r"[^<{]*(?:<\|constrain\|>\w+)?<\|message\|>"
_TO = r"to=functions\.([\w.-]+)"
_RECIPIENT = r"<\|recipient\|>\s*([\w.-]+)\s*<\|content\|>"

# What any model may write once it is offered tools: the names of the tools tell a call from other text.
ANY: tuple[CallFormat, ...] = (
    *(JsonCalls(tag.replace("/", ""), (FENCE,), (FENCE, *_TAGS)) for tag in _TAGS),
    JsonCalls(FENCE, tuple(tag.replace("/", "") for tag in _TAGS), (FENCE, *_TAGS), loose=True),
    JsonCalls("{", closers=_TAGS, loose=True),
    JsonCalls("[", closers=_TAGS, loose=True),
    Pythonic("[", loose=True),
)


@dataclass(frozen=True)
class Dialect:
    """The call formats of a model family."""

    # texts of which one is in the family's chat template, or is a special token of its vocabulary
    signs: tuple[str, ...]
    formats: tuple[CallFormat, ...]  # how it writes calls


DIALECTS: dict[str, Dialect] = {
    "Llama 3": Dialect(
        ("<|python_tag|>",),
        (
            JsonCalls("<|python_tag|>"),
            Pythonic("<|python_tag|>"),
            NamedJson("<function=", r"<function=([\w.-]+)>", ("</function>",)),
        ),
    ),
    "Llama 4": Dialect(("<|python_start|>",), (Pythonic("<|python_start|>", closers=("<|python_end|>",)),)),
    "Mistral": Dialect(
        ("[TOOL_CALLS]",),
        (
            JsonCalls("[TOOL_CALLS]"),
            NamedJson("[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?"),
        ),
    ),
    "DeepSeek": Dialect(
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        tuple(
            NamedJson(
                opener,
                r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?([\w.-]+)"
                r"(?:<｜tool▁sep｜>|\s*```(?:json)?)",
                _DEEPSEEK,
            )
            for opener in ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
        ),
    ),
    "DeepSeek V3.2": Dialect(
        ("｜DSML｜",),
        tuple(
            Tagged(
                opener,
                r'(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name="([^"]+)">',
                "<｜DSML｜" + _NAMED_PARAMETER,
                "</｜DSML｜invoke>",
                ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
            )
            for opener in ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜invoke")
        ),
    ),
    "Qwen3-Coder": Dialect(
        ("<function=",),
        tuple(
            one
            for opener in (OPEN, "<seed:tool_call>", "<function=")
            for one in (
                NamedJson(opener, r"(?:<tool_call>\s*)?<function=([\w.-]+)>", ("</function>", CLOSE)),
                Tagged(
                    opener,
                    r"(?:<(?:seed:)?tool_call>\s*)?<function=([^>\n]+)>",
                    _QWEN_PARAMETER,
                    "</function>",
                    (CLOSE, "</seed:tool_call>"),
                ),
            )
        ),
    ),
    "GLM 4.5": Dialect(
        ("<arg_key>",),
        (
            Tagged(
                OPEN,
                r"<tool_call>\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)",
                r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
                CLOSE,
            ),
        ),
    ),
    "MiniMax M2": Dialect(
        ("<minimax:tool_call>",),
        tuple(
            Tagged(
                opener,
                r'(?:<minimax:tool_call>\s*)?<invoke name="([^"]+)">',
                "<" + _NAMED_PARAMETER,
                "</invoke>",
                ("</minimax:tool_call>",),
            )
            for opener in ("<minimax:tool_call>", "<invoke name=")
        ),
    ),
    "Granite": Dialect(
        ("<|tool_call|>", "<function_call>"),
        (JsonCalls("<|tool_call|>", closers=("<|/tool_call|>",)), JsonCalls("<function_call>")),
    ),
    "Phi-4": Dialect(
        ("<|tool|>", "<|tool_call|>"), (JsonCalls("<|tool_call|>", closers=("<|/tool_call|>",)), JsonCalls("functools"))
    ),
    "Command-R": Dialect(
        ("<|START_ACTION|>", "Action:"),
        (JsonCalls("<|START_ACTION|>", closers=("<|END_ACTION|>",)), JsonCalls("Action:", (FENCE,), (FENCE,))),
    ),
    "LFM2": Dialect(
        ("<|tool_call_start|>", "<|tool_list_start|>"),
        (
            JsonCalls("<|tool_call_start|>", closers=("<|tool_call_end|>",)),
            Pythonic("<|tool_call_start|>", closers=("<|tool_call_end|>",)),
        ),
    ),
    "Gemma": Dialect(
        ("<start_of_turn>", "tool_code"), (Pythonic("```tool_code", closers=(FENCE,)), JsonCalls("```tool_code"))
    ),
    "Olmo 3": Dialect(("<function_calls>",), (Pythonic("<function_calls>", closers=("</function_calls>",)),)),
    "Kimi K2": Dialect(
        ("<|tool_calls_section_begin|>",),
        tuple(
            NamedJson(
                opener,
                r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>",
                _KIMI,
            )
            for opener in ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
        ),
    ),
    "Functionary 2": Dialect(
        ("<|recipient|>",),
        (
            NamedJson("<|recipient|>", _RECIPIENT, ("<|stop|>",)),
            NamedJson("<|from|>", r"<\|from\|>\s*assistant\s*" + _RECIPIENT, ("<|stop|>",)),
            IgnoredMarkup("<|from|>assistant\n"),
            IgnoredMarkup("<|recipient|>all\n<|content|>"),
        ),
    ),
    "Functionary 3": Dialect((">>>all",), (NamedJson(">>>", r">>>([\w.-]+)\n"), IgnoredMarkup(">>>all\n"))),
    "Hunyuan": Dialect(
        ("<tool_calls>",),
        tuple(
            NamedJson(
                opener,
                r"(?:<tool_calls>\s*)?<tool_call>(?:function<tool_sep>)?([\w.-]+)\s*(?:<tool_sep>)?\s*```(?:json)?",
                (FENCE, CLOSE, "</tool_calls>"),
            )
            for opener in ("<tool_calls>", OPEN)
        ),
    ),
    "Apertus": Dialect(("<|tools_prefix|>",), (JsonCalls("<|tools_prefix|>", closers=("<|tools_suffix|>",)),)),
    "InternLM2": Dialect(("<|action_start|>",), (JsonCalls("<|action_start|>", ("<|plugin|>",), ("<|action_end|>",)),)),
    "gpt-oss": Dialect(
        ("<|channel|>",),
        (
            NamedJson("<|channel|>", r"<\|channel\|>\w+ " + _TO + _HARMONY, ("<|call|>",)),
            NamedJson("<|start|>", r"<\|start\|>assistant " + _TO + r"<\|channel\|>\w+" + _HARMONY, ("<|call|>",)),
            NamedJson("<|start|>", r"<\|start\|>assistant<\|channel\|>\w+ " + _TO + _HARMONY, ("<|call|>",)),
            NamedJson("to=functions.", _TO + r"<\|channel\|>\w+" + _HARMONY, ("<|call|>",), loose=True),
            IgnoredMarkup("<|channel|>analysis<|message|>", "<|end|>"),
            IgnoredMarkup("<|channel|>commentary<|message|>"),
            IgnoredMarkup("<|channel|>final<|message|>"),
            IgnoredMarkup("<|start|>assistant"),
            IgnoredMarkup("<|end|>"),
        ),
    ),
}


def markup_of(formats: Iterable[CallFormat]) -> str:
    """A text that contains all markup of these formats, patterns without their backslashes."""
    return str([dataclasses.astuple(cast(Any, one)) for one in formats]).replace("\\", "")


def formats_of(template: str | None, special: Iterable[str]) -> tuple[CallFormat, ...]:
    """The formats of a model's calls, by its chat template and the texts of its special tokens."""
    known = set(special)
    own = [
        one
        for dialect in DIALECTS.values()
        if any(sign in known or sign in (template or "") for sign in dialect.signs)
        for one in dialect.formats
    ]
    return tuple(dict.fromkeys([*ANY, *own]))
