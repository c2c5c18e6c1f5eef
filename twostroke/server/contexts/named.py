"""Contexts that messages name as parts of their content, in any order: `{"type": "context", "name": ...}`.

The text of a context stands where it is named, and is encoded by itself. So it has the tokens of the context, whose KV
the technique `passages` finds in the prefix index and moves to its place.
"""

from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request as HttpRequest

from twostroke.server.async_engine import AsyncEngine
from twostroke.server.contexts.context import Context
from twostroke.server.contexts.hold import find_context
from twostroke.server.engine_requests import check_length
from twostroke.server.errors import ApiError
from twostroke.server.openai.schemas.chat import ChatPrompt

P = TypeVar("P", bound=ChatPrompt)


async def with_named(http: HttpRequest, body: P) -> tuple[P, Sequence[Context]]:
    """The body with the texts of the contexts that its messages name, and these contexts. Raises ApiError."""
    names = [name for message in body.messages for name in message.contexts]
    if not names:
        return body, ()
    for field in ("passage_budget", "truncate_prompt_tokens"):
        if getattr(body, field, None) is not None:
            raise ApiError(400, f"{field} cannot be combined with parts of type context: leave it out", param=field)
    engine: AsyncEngine = http.app.state.engine
    found = {name: await find_context(http, name) for name in dict.fromkeys(names)}
    texts = {name: context.text for name, context in found.items()}
    check_length(engine.llm, sum(found[name].tokens for name in names))
    messages = [message.with_contexts(texts) for message in body.messages]
    return body.model_copy(update={"messages": messages}), list(found.values())
