"""A conversation on its way to the engine.

Every API that has conversations translates its body into a `ChatBody`, which is the server's own form of one. So
tools, formats, sampling and techniques work alike in all of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from twostroke.api.conversation.fitting import SYSTEM, LeftOut, with_cut_passages, without_oldest
from twostroke.api.conversation.window import ContextRoom, WindowPlan, plan_window
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods import Plain
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.context import Context
from twostroke.server.engine_requests import chat_tokens, choose_method, engine_requests, truncated
from twostroke.server.errors import ApiError, from_validation
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.schemas.chat import ChatBody, ChatMessage, ChatPrompt
from twostroke.server.tools.parser import parser_factory

NO_ROOM = "the last message and the system message leave no room for an answer: shorten them"
# Claude Code begins its system prompt with such lines (llama.cpp#20623). A hash in them changes with every request.
_TRACKING = re.compile(r"\A(?:x-anthropic-[\w-]+:[^\n]*(?:\n+|\Z))+")


class Conversation:
    """A checked body and the technique it names.

    Attributes:
        warnings: what will not be done as the body asks, a line each.
        left_out: what the prompt is without, after `requests`.
    """

    def __init__(self, engine: AsyncEngine, body: ChatBody, context: Context | None = None) -> None:
        """The body goes on after `context`. Raises ApiError for what can be told before the prompt is made."""
        self.warnings: list[str] = []
        self.left_out = LeftOut()
        self._window: WindowPlan | None = None
        body = body if context is None else context.before_chat(body)
        self._engine, self._context, self.body = engine, context, body.with_defaults(engine.llm.generation)
        self._technique = choose_method(engine.name, body.model, body.method)
        self._truncation = self.body.truncation or engine.settings.truncation
        if self.body.truncation == "window":
            self._require_plain()
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if body.must_call and not body.callable_functions:
            message = "tool_choice asks for a call of a function that tools does not have"
            raise ApiError(400, message, param="tool_choice")

    def tokens(self) -> list[int]:
        """The prompt. Takes long: call it off the event loop."""
        llm, most = self._engine.llm, self.body.truncate_prompt_tokens
        return truncated(llm, prompt_tokens(llm, self.body, cut=most is not None), most)

    def requests(self, raw: str | None = None) -> list[Request]:
        """The engine's requests; `raw` is a prompt in place of the messages. Takes long: call it off the event loop."""
        body, llm = self.body, self._engine.llm
        most = body.max_completion_tokens or body.max_tokens
        functions = [function.for_template() for function in body.callable_functions]
        reader = (
            parser_factory(llm.tokenizer, functions, parallel=body.parallel, required=body.must_call)
            if functions
            else None
        )
        follow = constraint(self._engine.grammars, body, self.warnings, reader)
        params = body.sampling(most, body.top_logprobs if body.logprobs else None, follow)
        params = replace(params, reader=reader)
        if raw is None:
            self._fit()
        if (window := self._window) is not None:
            self._require_plain()
            if params.prompt_logprobs is not None:
                raise ApiError(400, "a prompt in a window of KV has no prompt_logprobs", param="prompt_logprobs")
            return [window.request(llm, params)]
        prompt = self.tokens() if raw is None else raw
        return engine_requests(llm, [prompt], params, self._technique, self._context)

    def _fit(self) -> None:
        """Cut passages and leave out the oldest turns, as the body asks; what is gone is told as a warning."""
        body, llm = self.body, self._engine.llm
        messages, cut = list(body.messages), LeftOut()
        if body.passage_budget is not None:
            plain = [{"role": one.role, "content": one.content} for one in messages]
            made, cut = with_cut_passages(plain, body.passage_budget, llm.tokenizer)
            pairs = zip(messages, made, strict=True)
            messages = [one.model_copy(update={"content": new["content"]}) for one, new in pairs]
        most = body.max_completion_tokens or body.max_tokens
        gone = LeftOut()
        if self._truncation == "window":
            messages, gone = self._in_window(messages, most)
        elif self._truncation == "auto":
            messages, gone = self._without_oldest(messages, most)
        self.left_out = replace(gone, passages=cut.passages, passage_tokens=cut.passage_tokens)
        if self.left_out:
            self.body = body.model_copy(update={"messages": messages})
            self.warnings.append(f"not all of the conversation is in the prompt: {self.left_out.text}")

    def _encode(self, messages: Sequence[ChatMessage]) -> ChatTokens:
        """The prompt of some of the messages, however long."""
        return prompt_tokens(self._engine.llm, self.body.model_copy(update={"messages": list(messages)}), cut=True)

    def _without_oldest(self, messages: list[ChatMessage], most: int | None) -> tuple[list[ChatMessage], LeftOut]:
        llm = self._engine.llm
        room = llm.max_model_len - min(most or 1, llm.max_model_len // 4)
        begun = int(messages[0].role in SYSTEM)

        def length(stay: range) -> int:
            return len(self._encode([*messages[:begun], *messages[stay.start :]]))

        whole = length(range(begun, len(messages)))
        if whole <= room:
            return messages, LeftOut()
        stay = without_oldest([one.role for one in messages], lambda stay: length(stay) <= room)
        gone = LeftOut(messages=stay.start - begun, tokens=whole - length(stay))
        return [*messages[:begun], *messages[stay.start :]], gone

    def _in_window(self, messages: list[ChatMessage], most: int | None) -> tuple[list[ChatMessage], LeftOut]:
        """The messages whose KV stays, and what is gone. A chat that fits has no window."""
        llm, body = self._engine.llm, self.body
        sinks = self._engine.settings.sinks if body.sinks is None else body.sinks

        def system() -> int:
            alone = body.model_copy(update={"messages": messages[:1], "add_generation_prompt": False})
            return common_prefix_length(prompt_tokens(llm, alone, cut=True), self._encode(messages))

        found = plan_window(messages, self._encode, ContextRoom.of(llm, most), sinks, system)
        if found is None:
            raise ApiError(400, NO_ROOM, param="messages", code="context_length_exceeded")
        left = list(found.messages)
        if found.cuts:
            self._window = found
        dropped = len(messages) - len(left)
        tokens = found.whole - found.extent.end if dropped else 0
        return left, LeftOut(messages=dropped, tokens=tokens, entries=found.extent.end - len(found.extent))

    def _require_plain(self) -> None:
        """A window is a program of its own. Raises ApiError."""
        if self._technique != Plain():
            raise ApiError(400, "a window of KV is kept for plain generation: leave out method", param="truncation")


def prompt_tokens(llm: LLM, body: ChatPrompt, *, cut: bool = False) -> ChatTokens:
    """A body's messages through the chat template, for `cut` see `chat_tokens`. Raises InvalidRequest or ApiError."""
    messages = [message.for_template() for message in body.messages]
    if messages[0]["role"] == "system":
        messages[0]["content"] = without_tracking(messages[0]["content"])
    return chat_tokens(
        llm,
        messages,
        [function.for_template() for function in body.callable_functions],
        body.variables,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        cut=cut,
    )


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A translated body. Raises ApiError, which names the field by its name in chat completions."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


def without_tracking(system: str) -> str:
    """A system prompt without the header lines that would keep it from being found in the prefix index."""
    return _TRACKING.sub("", system)
