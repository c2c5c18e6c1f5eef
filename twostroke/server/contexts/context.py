"""A context: the beginning of prompts, with a name, whose KV is held while it lives.

Its KV lies in ordinary memory (the tier "host"), besides what the prefix index holds of it in the pool. So it takes no
room that requests need, and it is not lost when the index makes room. A request that continues a context is the
request of the whole prompt: the context's messages come first. Pages that have left the pool are copied back into the
prefix index before its first stroke, which finds them there. So an answer has the same bits as without a context.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twostroke.api.llm import LLM
from twostroke.engine.strokes import Program
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.contexts.held_kv import HeldKV, after_context
from twostroke.server.contexts.schemas import ContextBody
from twostroke.server.errors import ApiError
from twostroke.server.openai.schemas.chat import ChatBody


@dataclass(frozen=True, eq=False)
class Context:
    """A beginning of prompts under a name."""

    name: str
    body: ContextBody  # what the client sent
    tokens: int  # number of its tokens as a prompt
    # the whole pages of them, in the host; None for one of before a restart that was not asked for since
    held: HeldKV | None
    body_bytes: int  # size of the body as JSON
    # created, expires: in seconds since 1970; one that is pinned expires at infinity
    created: float
    expires: float
    parent: str | None = None  # the name of the context that it goes on from, if it does
    answer: tuple[int, ...] = ()  # the tokens of the answer at its end, if it was made of one
    owner: str = ""  # the space of the tenant that made it (`Tenant.space`); only calls of the same space find it

    @property
    def kv(self) -> HeldKV | None:
        """The same; None too if the engine's process has died since."""
        return None if self.held is None or self.held.lost else self.held

    @property
    def pages(self) -> Sequence[tuple[int, int]]:
        """Its pages: of which process, and their ids there."""
        return () if self.kv is None else [(self.kv.generation, page) for page in self.kv.pages]

    @property
    def size(self) -> int:
        """Bytes of its KV and its body. Other contexts may share its pages."""
        return self.body_bytes + (0 if self.kv is None else self.kv.nbytes)

    @property
    def expired(self) -> bool:
        return time.time() >= self.expires

    @property
    def text(self) -> str:
        """What it is as a part of a message. Raises ApiError if it was not made of a text."""
        if isinstance(self.body.prompt, str):
            return self.body.prompt
        has = "messages" if self.body.messages else "token ids"
        message = f"context {self.name} has {has}: a part of a message needs one whose prompt is a text"
        raise ApiError(400, message, param="messages")

    def before_chat(self, body: ChatBody) -> ChatBody:
        """A conversation after the context's messages, with its tools; of two tools of one name, the body's counts."""
        if not self.body.messages:
            raise ApiError(400, f"context {self.name} has no messages: it is for /v1/completions", param="context")
        tools = {tool.function.name: tool for tool in (*self.body.tools, *body.tools)}
        update: dict[str, Any] = {
            "messages": [*self.body.messages, *body.messages],
            "tools": list(tools.values()),
            "chat_template_kwargs": self.body.variables | body.variables,
        }
        if not body.messages and self.body.messages[-1].role == "assistant":  # the answer at its end goes on
            update |= {"continue_final_message": True, "add_generation_prompt": False}
        return body.model_copy(update=update)

    def fork(self, tokenizer: Tokenizer, at: int | None, text: str) -> tuple[ContextBody, tuple[int, ...]]:
        """The body of a fork, and the tokens of the answer at its end. Raises ApiError."""
        if at is None and not text:
            return self.body, self.answer
        if not self.answer:
            raise ApiError(400, f"context {self.name} does not end with an answer that was kept", param="at")
        at = len(self.answer) if at is None else at
        if at > len(self.answer):
            raise ApiError(400, f"at must be from 0 to {len(self.answer)}, the tokens of the answer", param="at")
        kept, last = self.answer[:at], self.body.messages[-1]
        content = tokenizer.decode(kept) + text
        written = {"content": content, "tool_calls": None, "reasoning_content": None}
        messages = [*self.body.messages[:-1], last.model_copy(update=written)]
        update = {"messages": messages, "continue_final_message": True}
        return self.body.model_copy(update=update), (*kept, *tokenizer.encode(text, add_bos=False))

    def before_prompt(self, tokenizer: Tokenizer, prompt: str | list[int]) -> str | list[int]:
        """A prompt after the context's own. Two texts are one text, which is tokenized as a whole."""
        first = self.body.prompt
        if first is None:
            message = f"context {self.name} has messages: it is for chat completions and responses"
            raise ApiError(400, message, param="context")
        if isinstance(first, str) and isinstance(prompt, str):
            return first + prompt
        ids = tokenizer.encode(first) if isinstance(first, str) else first
        return [*ids, *(tokenizer.encode(prompt, add_bos=False) if isinstance(prompt, str) else prompt)]

    def with_context(
        self, llm: LLM, prompt: Sequence[int] | None, program: Callable[[], Program], salt: bytes = b""
    ) -> Callable[[], Program]:
        """`program`, for which the context is in the prefix index as far as `prompt` begins with it; None: all of it"""
        if self.kv is None:
            return program
        return partial(after_context, llm, self.kv.kv, self.kv.tokens if prompt is None else prompt, salt, program)
