"""What llama.cpp's clients send."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, whole_number
from twostroke.server.openai.schemas.chat import ChatPrompt
from twostroke.server.openai.schemas.common import GenerateBody, described
from twostroke.server.openai.schemas.completions import prompts

# llama.cpp's defaults, which a model's own come before.
DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


class ApplyTemplateBody(ChatPrompt):
    """A conversation."""

    model: str | None = None


class ExtraFile(LenientModel):
    """Another file of the repository."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"time"})
    filename: str = "tmp"
    text: str


class LlamaCppBody(GenerateBody):
    """What both bodies have."""

    # Speed, how much of an answer is sent, and limits of time, which an answer does not have here.
    HARMLESS: ClassVar[frozenset[str]] = GenerateBody.HARMLESS | {
        "n_cache_reuse",
        "n_indent",
        "response_fields",
        "samplers",
        "t_max_predict_ms",
        "t_max_prompt_ms",
    }
    UNSUPPORTED: ClassVar[Neutral] = GenerateBody.UNSUPPORTED | {"echo": (False,), "suffix": ("",)}
    max_tokens: Annotated[int | None, described("max_tokens"), BeforeValidator(whole_number)] = None


class LlamaCppCompletionBody(LlamaCppBody):
    """A text or token ids to continue."""

    prompt: Annotated[Any, BeforeValidator(prompts), Field(max_length=1)]


class InfillBody(LlamaCppBody):
    """Code before and behind the cursor, and other files. `prompt` is what goes on behind `input_prefix`."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Field(max_length=1024)] = Field(default_factory=list)
    prompt: str = ""
