"""Fields that every way of generating text shares."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams

T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Lenient(BaseModel):
    """Takes null for a field that is left out, as OpenAI's clients send it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(Lenient):
    """What a stream says besides tokens: usage in a last chunk, or in every one."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Lenient):
    """A named schema. `strict` refuses what the grammar library does not know of it."""

    name: str = "schema"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = True


class ResponseFormat(Lenient):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs the field json_schema')
        return self


class Generating(Lenient):
    """Sampling, the technique, and how the request is to be served.

    Beyond OpenAI's: top_k, min_p, repetition_penalty, stop_token_ids, min_tokens, ignore_eos, regex, choice,
    method, priority (lower is sooner), timeout (seconds).
    """

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Finite, Field(gt=0)] = 1.0
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] = 0.0
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]], BeforeValidator(_listed), Field(max_length=64)
    ] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000)] = Field(default_factory=list)
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    response_format: ResponseFormat | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    method: str | dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    timeout: Annotated[Finite, Field(gt=0)] | None = None

    def sampling(self, max_tokens: int | None, logprobs: int | None, constraint: Any = None) -> SamplingParams:
        """As the engine wants it. Raises InvalidRequest, whose message begins with the field's name."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_by_id(self.logit_bias),
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            n=self.n,
            constraint=constraint,
        )


def _by_id(biases: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in biases):
        raise InvalidRequest("logit_bias must be an object from token ids to numbers")
    return {int(key): bias for key, bias in biases.items()}
