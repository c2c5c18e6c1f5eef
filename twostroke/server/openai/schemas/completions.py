"""The body of /v1/completions."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from twostroke.server.openai.schemas.common import GenerateBody
from twostroke.server.openai.schemas.sampling import described

MOST = 2048  # prompts in one request


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(_is_id, value)):
            return [value]
        if len(value) > MOST:
            raise ValueError(f"at most {MOST} prompts at once")
        if all(isinstance(one, str) for one in value) or all(
            isinstance(one, list) and all(map(_is_id, one)) for one in value
        ):
            return value
    raise ValueError("a text, a list of token ids, or a list of several of either")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


class CompletionBody(GenerateBody):
    """Continue texts or token ids as they are."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    max_tokens: Annotated[int, described("max_tokens")] = 16
    logprobs: Annotated[int | None, described("logprobs", le=20)] = None
    echo: bool = False
    suffix: str = ""
    best_of: int | None = None
