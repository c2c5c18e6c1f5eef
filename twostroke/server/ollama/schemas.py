"""The bodies of /api/chat and /api/generate."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, TokenId, listed, whole_number
from twostroke.server.openai.schemas.common import CacheSalt

Whole = Annotated[int, BeforeValidator(whole_number)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class OllamaOptions(LenientModel):
    """How tokens are chosen, under Ollama's names. Those of how a model is loaded have no effect."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"f16_kv", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa"}
        | {"penalize_newline", "repeat_last_n", "use_mlock", "use_mmap", "vocab_only", "logits_all", "embedding_only"}
    )
    WITHOUT_EFFECT: ClassVar[Neutral] = {
        "mirostat": (0,),
        "mirostat_eta": (),
        "mirostat_tau": (),
        "tfs_z": (1,),
        "typical_p": (1,),
    }
    num_predict: Whole | None = None  # 0 or less: until the model ends
    temperature: Annotated[Number | None, Field(ge=0)] = None
    top_k: Whole | None = None
    top_p: Annotated[Number | None, Field(ge=0, le=1)] = None
    min_p: Annotated[Number | None, Field(ge=0, le=1)] = None
    seed: Whole | None = None
    stop: Annotated[list[str] | None, BeforeValidator(listed)] = None
    repeat_penalty: Annotated[Number | None, Field(gt=0)] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None


class OllamaBody(LenientModel):
    """The fields of both bodies. A model stays loaded, whatever `keep_alive` says."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"keep_alive"})
    model: Annotated[str, Field(min_length=1)]
    stream: bool = True
    think: bool | str | None = None  # a text says how much
    format: str | dict[str, Any] | None = None
    options: OllamaOptions = OllamaOptions()
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    method: str | dict[str, Any] | None = None
    cache_salt: CacheSalt = None
    receipt: bool = False


class OllamaCalledFunction(LenientModel):
    """A function that an assistant called in an earlier turn."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"index", "description"})
    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)


class OllamaToolCall(LenientModel):
    """A call in an assistant's message."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"type"})
    id: str | None = None
    function: OllamaCalledFunction


class OllamaMessage(LenientModel):
    """One turn. A tool's message names the tool."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] = Field(default_factory=list)
    tool_calls: list[OllamaToolCall] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaChatBody(OllamaBody):
    """Answer a conversation. Without messages, nothing is done: clients load a model in this way.

    With `truncate`, which is Ollama's default, the oldest turns are left out where there is no room for them.
    """

    messages: list[OllamaMessage] = Field(default_factory=list)
    truncate: bool = True
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] = Field(default_factory=list)


class OllamaGenerateBody(OllamaBody):
    """Answer a prompt, which goes through the chat template unless it is `raw`, or say what comes before a `suffix`.

    `context` is what an earlier answer gave back: the tokens that come before the prompt.
    """

    WITHOUT_EFFECT: ClassVar[Neutral] = {"template": ("",)}
    context: list[TokenId] = Field(default_factory=list)
    prompt: str = ""
    system: str = ""
    suffix: str = ""
    raw: bool = False
    images: list[Any] = Field(default_factory=list)

    @model_validator(mode="after")
    def _raw_alone(self) -> "OllamaGenerateBody":
        template = (self.model_extra or {}).get("template")
        if self.suffix and (given := [name for name in ("raw", "context") if getattr(self, name)]):
            raise ValueError(f"suffix: a prompt with a suffix has a form of its own: leave out {' and '.join(given)}")
        others = {"system": self.system, "template": template, "context": self.context}
        if self.raw and (given := [name for name, value in others.items() if value]):
            raise ValueError(f"raw: a raw prompt goes through no template: leave out {' and '.join(given)}")
        return self
