"""The body of /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from twostroke.server.openai.schemas import other_servers
from twostroke.server.openai.schemas.base_model import Neutral, whole_number
from twostroke.server.openai.schemas.common import GenerateBody, described

MAX_PROMPTS = 2048  # prompts in one request


def prompts(value: Any) -> list[str] | list[list[int]]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(map(is_id, value)):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts at once")
        if all(isinstance(one, str) for one in value) or all(
            isinstance(one, list) and all(map(is_id, one)) for one in value
        ):
            return value
    raise ValueError("a text, a list of token ids, or a list of several of either")


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _number(value: Any) -> Any:
    """Other servers take true for the chosen tokens' log-probabilities alone."""
    return {False: None, True: 0}[value] if isinstance(value, bool) else whole_number(value)


class CompletionBody(GenerateBody):
    """Continue texts or token ids as they are, or score them (`echo`, and `max_tokens` of 0)."""

    ALIASES: ClassVar[Mapping[str, str]] = other_servers.ALIASES | {"max_completion_tokens": "max_tokens"}
    UNSUPPORTED: ClassVar[Neutral] = other_servers.UNSUPPORTED | {
        "continue_final_message": (False,),
        "functions": ([],),
        "keep": (False,),
        "messages": (),
        "tools": ([],),
    }
    prompt: Annotated[Any, BeforeValidator(prompts)]
    max_tokens: Annotated[int | None, described("max_tokens"), BeforeValidator(whole_number)] = 16
    logprobs: Annotated[int | None, described("logprobs", le=20), BeforeValidator(_number)] = None
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    echo: bool = False
    suffix: str = ""
    best_of: Annotated[int | None, Field(ge=1), BeforeValidator(whole_number)] = None
