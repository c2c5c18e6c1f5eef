"""The sampling fields of a body, made from their declarations in `sampling/params.py`."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from twostroke.fields import LARGE, Rule, rules
from twostroke.sampling.params import SamplingParams
from twostroke.server.openai.schemas.base_model import TokenId, listed, whole_number

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


def declared(name: str) -> tuple[Any, Any]:
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
