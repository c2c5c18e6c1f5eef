"""From a conversation to the engine's requests.

Every API that has conversations translates its body into a `ChatBody`, which is the server's own form of one. So
tools, formats, sampling and techniques work alike in all of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from twostroke.api.conversation.fitting import SYSTEM_ROLES, LeftOut, cut_passages, drop_oldest
from twostroke.api.conversation.window import ContextRoom, WindowPlan, plan_window
from twostroke.api.llm import LLM
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.methods import Method, Passages
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.sampling.params import SamplingParams
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.context import Context
from twostroke.server.engine_requests import (
    Prepared,
    chat_tokens,
    check_size,
    choose_method,
    engine_requests,
    require_plain,
    truncated,
    with_receipt,
)
from twostroke.server.errors import ApiError, from_validation
from twostroke.server.openai.constraints import constraint
from twostroke.server.openai.schemas.chat import ChatBody, ChatMessage, ChatPrompt
from twostroke.server.openai.schemas.common import salt_bytes
from twostroke.server.tools.parser import parser_factory

NO_ROOM = "the last message and the system message leave no room for an answer: shorten them"
# Claude Code begins its system prompt with such lines (llama.cpp#20623). A hash in them changes with every request.
_TRACKING = re.compile(r"\A(?:x-anthropic-[\w-]+:[^\n]*(?:\n+|\Z))+")


@dataclass(frozen=True, kw_only=True)
class PreparedChat(Prepared):
    """A conversation, ready for the engine."""

    body: ChatBody  # what is answered: with the model's defaults, and without what was left out


def prepare_chat(
    engine: AsyncEngine,  # the served model
    body: ChatBody,  # the conversation. It goes on after `context`.
    context: Context | None = None,  # the beginning that was put under a name
    prompt: str | Sequence[int] | None = None,  # a text or token ids in place of the messages
    named: Sequence[Context] = (),  # the contexts whose texts are in messages
) -> PreparedChat:
    """The requests that answer a conversation. Takes long: call it off the event loop.

    Raises:
        ApiError or InvalidRequest: what the body asks for cannot be done.
    """
    body, technique = _checked(engine, body, context)
    llm, warnings, salt = engine.llm, list[str](), salt_bytes(body.cache_salt)
    functions = [function.for_template() for function in body.callable_functions]
    reader = (
        parser_factory(llm.tokenizer, functions, parallel=body.parallel, required=body.must_call) if functions else None
    )
    follow = constraint(engine.grammars, body, warnings, reader)
    params = body.sampling(body.max_answer_tokens, body.top_logprobs if body.logprobs else None, follow)
    params = replace(params, reader=reader)
    fitted = _fit(engine, body) if prompt is None else _Fitted(body.messages)
    if fitted.left_out:
        body = body.model_copy(update={"messages": list(fitted.messages)})
        warnings.append(f"not all of the conversation is in the prompt: {fitted.left_out.text}")
    if fitted.window is None:
        tokens = _prompt(llm, body) if prompt is None else _encoded(llm, prompt)
        params = _thinking(engine, body, params, tokens)
        if body.receipt:
            params = with_receipt(params, technique)
        requests = engine_requests(llm, [tokens], params, technique, context, salt)
        for one in named if isinstance(technique, Passages) else ():
            requests[0].make_program = one.with_context(llm, None, requests[0].make_program, salt)
    else:
        require_plain(technique, "a window of KV is kept", "truncation")
        if params.prompt_logprobs is not None:
            raise ApiError(400, "a prompt in a window of KV has no prompt_logprobs", param="prompt_logprobs")
        tokens = [id for part in fitted.window.parts for id in part]
        if body.receipt:
            raise ApiError(400, "a prompt in a window of KV has no receipt: leave one out", param="receipt")
        requests = [fitted.window.request(llm, _thinking(engine, body, params, tokens))]
        requests[0].cache_salt = salt
    return PreparedChat(requests, [tokens], warnings, fitted.left_out, body.receipt, body=body)


def prompt_ids(engine: AsyncEngine, body: ChatBody, context: Context | None = None) -> list[int]:
    """The tokens of a conversation's prompt, for counting. Takes long: call it off the event loop.

    Raises ApiError or InvalidRequest.
    """
    return _prompt(engine.llm, _checked(engine, body, context)[0])


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
        passages=[text for message in body.messages for text in message.passages],
    )


def unused_variables(engine: AsyncEngine, body: ChatPrompt, names: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each variable of the template, and each field about thoughts, that has no effect.

    `names`: what the API calls such a field, where it has another name.
    """
    template = engine.llm.tokenizer.template_for(bool(body.callable_functions))
    told = (sentence.partition(" ") for sentence in body.unused(template, thinks=engine.reasoning is not None))
    return [f"{(names or {}).get(name, name)} {rest}" for name, _, rest in told]


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """A translated body. Raises ApiError, which names the field by its name in chat completions."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise from_validation([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


def without_tracking(system: str) -> str:
    """A system prompt without the header lines that would keep it from being found in the prefix index."""
    return _TRACKING.sub("", system)


def _checked(engine: AsyncEngine, body: ChatBody, context: Context | None) -> tuple[ChatBody, Method]:
    """The body after its context and with the model's defaults, and its technique. Raises ApiError."""
    body = body if context is None else context.before_chat(body)
    exact = (
        body.receipt or body.prompt_logprobs is not None or "window" in (body.truncation, engine.settings.truncation)
    )
    named = any(message.passages for message in body.messages) and not exact
    technique = choose_method(engine.name, body.model, body.method, "passages" if named else "plain")
    if body.truncation == "window":
        require_plain(technique, "a window of KV is kept", "truncation")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.must_call and not body.callable_functions:
        message = "tool_choice asks for a call of a function that tools does not have"
        raise ApiError(400, message, param="tool_choice")
    return body.with_defaults(engine.llm.generation), technique


def _thinking(engine: AsyncEngine, body: ChatBody, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
    """The parameters of an answer that may begin with a thought. Grammars and stop strings apply behind it."""
    if engine.reasoning is None:
        return params
    said = body.messages[-1].content if body.continue_final_message else None
    budget = 0 if body.thinks is False else body.thought_budget
    # A grammar of calls in other text has the markup of that text.
    free = bool(body.callable_functions) and not body.must_call and body.response_format is None
    phase = engine.reasoning.phase_after(prompt, said or "")
    return engine.reasoning.applied(params, phase, budget=budget, lead=not free)


def _encoded(llm: LLM, prompt: str | Sequence[int]) -> Sequence[int]:
    if isinstance(prompt, str):
        check_size(llm, prompt)
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def _prompt(llm: LLM, body: ChatBody) -> list[int]:
    most = body.truncate_prompt_tokens
    return truncated(llm, prompt_tokens(llm, body, cut=most is not None), most)


@dataclass(frozen=True)
class _Fitted:
    """The messages for which there is room, what is left out, and how their KV comes to be in a window, if it does."""

    messages: Sequence[ChatMessage]
    left_out: LeftOut = field(default_factory=LeftOut)
    window: WindowPlan | None = None


def _fit(engine: AsyncEngine, body: ChatBody) -> _Fitted:
    """Cut passages and leave out the oldest turns, as the body or the server's settings ask."""
    messages, cut = body.messages, LeftOut()
    if body.passage_budget is not None:
        plain = [{"role": one.role, "content": one.content} for one in messages]
        made, cut = cut_passages(plain, body.passage_budget, engine.llm.tokenizer)
        pairs = zip(messages, made, strict=True)
        messages = [one.model_copy(update={"content": new["content"]}) for one, new in pairs]
    match body.truncation or engine.settings.truncation:
        case "window":
            fitted = _in_window(engine, body, messages)
        case "auto":
            fitted = _without_oldest(engine.llm, body, messages)
        case _:
            fitted = _Fitted(messages)
    left_out = replace(fitted.left_out, passages=cut.passages, passage_tokens=cut.passage_tokens)
    return replace(fitted, left_out=left_out)


def _encode(llm: LLM, body: ChatBody, messages: Sequence[ChatMessage], **changes: Any) -> ChatTokens:
    """The prompt of some of the messages, however long."""
    return prompt_tokens(llm, body.model_copy(update={"messages": list(messages), **changes}), cut=True)


def _without_oldest(llm: LLM, body: ChatBody, messages: list[ChatMessage]) -> _Fitted:
    room = llm.max_model_len - min(body.max_answer_tokens or 1, llm.max_model_len // 4)
    begun = int(messages[0].role in SYSTEM_ROLES)

    def length(stay: range) -> int:
        return len(_encode(llm, body, [*messages[:begun], *messages[stay.start :]]))

    whole = length(range(begun, len(messages)))
    if whole <= room:
        return _Fitted(messages)
    stay = drop_oldest([one.role for one in messages], lambda stay: length(stay) <= room)
    left_out = LeftOut(messages=stay.start - begun, tokens=whole - length(stay))
    return _Fitted([*messages[:begun], *messages[stay.start :]], left_out)


def _in_window(engine: AsyncEngine, body: ChatBody, messages: list[ChatMessage]) -> _Fitted:
    """The messages whose KV stays. A chat that fits has no window."""
    llm = engine.llm
    sinks = engine.settings.sinks if body.sinks is None else body.sinks

    def encode(some: Sequence[ChatMessage]) -> ChatTokens:
        return _encode(llm, body, some)

    def system() -> int:
        return common_prefix_length(_encode(llm, body, messages[:1], add_generation_prompt=False), encode(messages))

    plan = plan_window(messages, encode, ContextRoom.of(llm, body.max_answer_tokens), sinks, system)
    if plan is None:
        raise ApiError(400, NO_ROOM, param="messages", code="context_length_exceeded")
    dropped = len(messages) - len(plan.messages)
    tokens = plan.whole - plan.extent.end if dropped else 0
    left_out = LeftOut(messages=dropped, tokens=tokens, entries=plan.extent.end - len(plan.extent))
    return _Fitted(plan.messages, left_out, plan if plan.cuts else None)
