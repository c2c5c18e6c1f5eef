"""Chat templates: messages to text, with the Jinja dialect that Hugging Face templates are written in."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import CheckpointError, InvalidRequest

_BLOCK = re.compile(r"""type['"\]]*\s*==\s*['"]thinking['"]""")
_END = "\ue001"  # marks the end of a message that is to be continued


class ChatTemplates:
    """A model's chat templates by name: "default", and optionally "tool_use" for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are template variables such as bos_token; those that the model lacks stay undefined."""
        self._templates = dict(templates)
        self.special_tokens = dict(special_tokens)

    @property
    def default(self) -> str | None:
        """The source of the template for requests without tools, or None."""
        return self._templates.get("default")

    def source(self, tools: bool) -> str | None:
        """The source of the template for requests with tools, or without."""
        return (self._templates.get("tool_use") if tools else None) or self.default

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text; with `continue_final_message`, up to the end of the last message's content.

        Raises InvalidRequest if there is no template or the template refuses the messages.
        """
        source = self.source(tools is not None)
        if source is None:
            raise InvalidRequest("the model has no chat template: send the whole prompt as text instead of messages")
        if not messages:
            raise InvalidRequest("messages is empty: send at least one")
        template = _compile(source)
        # Clients send `"tool_calls": null`, and templates test whether that key is present. They test whether content
        # is none: a message that only calls tools has none.
        present = [
            {key: value for key, value in message.items() if value is not None or key == "content"}
            for message in messages
        ]
        if continue_final_message:
            add_generation_prompt = False
            if not isinstance(text := present[-1].get("content"), str):
                raise InvalidRequest("continue_final_message needs a text in the last message")
            present[-1]["content"] = f"{text}{_END} "
        values = {**self.special_tokens, **variables}
        said = [_with_reasoning(message, _as_blocks(source)) for message in present]
        values |= {"messages": said, "tools": tools, "add_generation_prompt": add_generation_prompt}
        values.setdefault("documents", None)
        try:
            try:
                rendered = template.render(values)
            except TypeError:  # gpt-oss's looks into the content of messages that only call tools
                values["messages"] = [{**message, "content": message.get("content") or ""} for message in said]
                rendered = template.render(values)
        except Exception as error:  # the template is code from the checkpoint: it can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InvalidRequest(f"the chat template does not accept these messages: {reason}") from error
        return _cut(rendered) if continue_final_message else rendered


def _cut(rendered: str) -> str:
    """The text before the mark; without whitespace at its end where the template strips messages."""
    before, found, after = rendered.rpartition(_END)
    if not found:
        raise InvalidRequest("the chat template changes the last message: it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


# Names of a message's reasoning; transformers gives templates all that they read.
REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any], blocks: bool) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, or as a block of its content."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    text = message.get("content")
    if blocks and isinstance(text, str | None):
        said = [{"type": "text", "text": text}] if text else []
        return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *said]}
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_blocks(source: str) -> bool:
    """Whether a template reads reasoning as blocks of content alone, as those of Ministral 3 do."""
    return "reasoning" not in source and _BLOCK.search(source) is not None


class _GenerationBlocks(Extension):
    """Renders the contents of `{% generation %}` blocks; the tag only marks the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block has a scope of its own, as in transformers: what it sets ends with it.
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """Sandboxed, since a template is code from the checkpoint's author."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )


@lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """The variables that a template reads and does not set before. Raises CheckpointError for a syntax error."""
    _compile(source)
    return frozenset(meta.find_undeclared_variables(_environment().parse(source)))


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _environment()
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"the model's chat template has a syntax error in line {error.lineno}: {error}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: Jinja's own filter escapes HTML characters and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
