"""Answers that are kept: a context of the conversation with the answer at its end, to go on from and to fork."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request as HttpRequest

from twostroke.server.contexts.context import Context
from twostroke.server.contexts.hold import hold
from twostroke.server.contexts.schemas import TTL_S, ContextBody
from twostroke.server.errors import ApiError
from twostroke.server.openai.schemas.chat import ChatBody, ChatMessage


async def keep_answer(
    http: HttpRequest, body: ChatBody, message: dict[str, Any], ids: Sequence[int], context: Context | None
) -> dict[str, Any]:
    """Hold the conversation of `body` with its answer. Returns fields of the response: its name, or why there is none.

    The pages of the answer are found in the prefix index, so next to nothing is computed. `context` is the one that the
    body goes on from. An answer that goes on with an assistant's message is one with it.
    """
    messages, before = [one.as_text() for one in body.messages], tuple[int, ...]()
    content = message.get("content") or ""
    if body.continue_final_message:
        content = (messages.pop().content or "") + content
        before = () if context is None else context.answer
    last = ChatMessage(
        role="assistant",
        content=content,
        tool_calls=message.get("tool_calls"),
        reasoning_content=message.get("reasoning_content"),
    )
    kept = ContextBody(
        messages=[*messages, last],
        tools=body.tools,
        chat_template_kwargs=body.variables,
        cache_salt=body.cache_salt,
        name=body.keep if isinstance(body.keep, str) else None,
    )
    try:
        made = await hold(http, kept, TTL_S, context, (*before, *ids))
    except ApiError as error:
        return {"context": None, "context_error": error.message}
    return {"context": made.name}
