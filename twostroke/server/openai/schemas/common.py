"""The fields that the bodies of all generating endpoints share; of sampling as `sampling/params.py` declares them."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, create_model, model_validator
from pydantic.fields import FieldInfo

from twostroke.errors import InvalidRequest
from twostroke.fields import LARGE, Rule, rules
from twostroke.sampling.params import SamplingParams
from twostroke.server.active_call import CallOptions
from twostroke.server.openai.schemas import other_servers
from twostroke.server.openai.schemas.base_model import LenientModel, Neutral, TokenId, listed, whole_number
from twostroke.server.tenants.tenant import current_tenant

# Where the API differs: another default, as OpenAI has it, or a narrower range.
PENALTY: dict[str, Any] = {"ge": -2, "le": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"default": 1.0},
    "top_k": {"ge": -1},  # vLLM's clients send -1 for all
    "repetition_penalty": {"gt": 0, "ge": None},
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "stop": {"max_length": 64},
    "stop_token_ids": {"max_length": 1000},
    "allowed_token_ids": {"min_length": 1, "max_length": 1 << 18},
    "bad_words": {"max_length": 256},
}
_ITEMS: dict[str, Any] = {
    "stop": Annotated[str, Field(min_length=1, max_length=1000)],
    "stop_token_ids": TokenId,
    "allowed_token_ids": TokenId,
    "bad_words": Annotated[str, Field(min_length=1, max_length=1000)],
    "logit_bias": Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)],
}
# KV is found again only by requests with the same salt (vLLM's field). It never leaves the pool and the host.
CacheSalt = Annotated[str | None, Field(min_length=1, max_length=1024)]


def salt_bytes(salt: str | None) -> bytes:
    """The salt as the engine takes it: empty for none, and with the name of a tenant whose prefixes are its own."""
    return current_tenant().salt(salt)


class StreamOptions(LenientModel):
    """Whether a stream gives usage in a last chunk, or in every one."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(LenientModel):
    """A named schema. `strict` refuses one that cannot be guaranteed; otherwise such keywords are skipped."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"description"})
    name: str = "schema"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = False


class ResponseFormat(LenientModel):
    """The format that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """llama.cpp and others put `schema` here, also beside the type json_object."""
        if "schema" in given and given.get("type") in ("json_object", "json_schema") and "json_schema" not in given:
            moved = {key: given.pop(key) for key in ("schema", "strict", "name") if key in given}
            given |= {"type": "json_schema", "json_schema": moved}
        return given

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('type "json_schema" needs the field json_schema')
        return self


def described(name: str, **changes: Any) -> FieldInfo:
    """A sampling field's help text and range, for a schema; `changes` narrow it."""
    rule = rules(SamplingParams)[name]
    bounds: dict[str, Any] = {"ge": rule.least, "le": rule.most, "gt": rule.above, "lt": rule.below}
    bounds = {key: value for key, value in bounds.items() if value is not None and abs(value) < LARGE}
    if rule.kind is float:
        bounds["allow_inf_nan"] = False
    return Field(
        description=rule.help, **{key: value for key, value in (bounds | changes).items() if value is not None}
    )


def _declared(name: str) -> tuple[Any, Any]:
    """A field of a pydantic model: its type and its default."""
    rule, changes = rules(SamplingParams)[name], dict(CHANGES.get(name, {}))
    default = changes.pop("default", getattr(SamplingParams, name, None))
    kind = _kind(name, rule)
    annotated = Annotated[kind | None if rule.optional else kind, described(name, **changes)]
    if rule.kind.__name__ == "int":
        annotated = Annotated[annotated, BeforeValidator(whole_number)]
    if name == "stop":  # one text is a list of one
        annotated = Annotated[annotated, BeforeValidator(listed)]
    empty = {tuple: list, dict: dict}.get(rule.kind)
    return annotated, default if empty is None else Field(default_factory=empty)


def _kind(name: str, rule: Rule) -> Any:
    if rule.kind is tuple:
        return list[_ITEMS[name]]
    return dict[str, _ITEMS[name]] if rule.kind is dict else rule.kind


# Each endpoint declares these by itself.
_OWN = {"max_tokens", "logprobs", "constraint", "reader"}
_SAMPLING = {name: _declared(name) for name in rules(SamplingParams) if name not in _OWN}
_SamplingFields: Any = create_model("SamplingFields", __base__=LenientModel, **_SAMPLING)  # pyright: ignore


class GenerateBody(_SamplingFields):
    """Sampling, the technique, and how the call is to be served.

    Beyond OpenAI's: top_k, min_p, repetition_penalty, stop_token_ids, allowed_token_ids, bad_words, min_tokens,
    ignore_eos, include_stop_str_in_output, skip_special_tokens, prompt_logprobs, regex, choice, grammar, method,
    context, cache_salt, receipt, truncate_prompt_tokens, priority (lower is sooner), timeout (seconds).
    """

    ALIASES: ClassVar[Mapping[str, str]] = other_servers.ALIASES
    HARMLESS: ClassVar[frozenset[str]] = other_servers.HARMLESS
    WITHOUT_EFFECT: ClassVar[Neutral] = other_servers.WITHOUT_EFFECT
    UNSUPPORTED: ClassVar[Neutral] = other_servers.UNSUPPORTED

    LIMIT: ClassVar[str] = "max_tokens"  # what the endpoint calls the most tokens of an answer

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: str | None = None
    method: str | dict[str, Any] | None = None
    context: str | None = None
    cache_salt: CacheSalt = None
    receipt: bool = False  # what anyone with the same weights can check the answer by (`twostroke verify`)
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1), BeforeValidator(whole_number)] = None
    priority: Annotated[int, Field(ge=-100, le=100), BeforeValidator(whole_number)] = 0
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        return other_servers.translated(given, cls.LIMIT)

    @classmethod
    def why_refused(cls, name: str) -> str | None:
        if name == "extra_body":
            return "a parameter of OpenAI's client: put its fields beside the others"
        if re.search("json|regex|grammar|schema|guided|ebnf|structured|constrain", name, re.IGNORECASE):
            return "and a constraint is not passed over"
        return None

    def call_options(self, prompts: int = 1) -> CallOptions:
        """How the call is to be served."""
        return CallOptions(prompts * self.n, self.stream, self.priority, self.timeout)

    def with_defaults(self, generation: Mapping[str, float]) -> Self:
        """The body with a model's own generation defaults for sampling fields that the client left out."""
        return self.model_copy(update={name: generation[name] for name in generation.keys() - self.model_fields_set})

    def sampling(self, max_tokens: int | None, logprobs: int | None, constraint: Any = None) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidRequest, whose message begins with the field's name."""
        fields = {name: getattr(self, name) for name in _SAMPLING}
        fields |= {"top_k": max(0, self.top_k), "logit_bias": _by_id(self.logit_bias)}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, constraint=constraint, **fields)


class ChatFields(LenientModel):
    """What chat completions and responses share about a conversation."""

    top_logprobs: Annotated[int, described("logprobs", le=20), BeforeValidator(whole_number)] = 0
    parallel_tool_calls: bool = True
    # What goes where the context has no room: nothing, the oldest turns (as in OpenAI's responses), or KV entries that
    # lie between the first and a window of the last. Without it, the server's own default.
    truncation: Literal["auto", "window", "disabled"] | None = None
    sinks: Annotated[int | None, Field(ge=0), BeforeValidator(whole_number)] = None
    passage_budget: Annotated[int | None, Field(ge=0), BeforeValidator(whole_number)] = None


def _by_id(biases: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in biases):
        raise InvalidRequest("logit_bias must be an object from token ids to numbers")
    return {int(key): bias for key, bias in biases.items()}
