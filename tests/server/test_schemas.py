"""The schemas that OpenAPI shows: every sampling field as it is declared, with its range and its help text."""

from typing import Any

import pytest

from twostroke.fields import rules
from twostroke.sampling.params import SamplingParams
from twostroke.server.openai.schemas.chat import ChatBody
from twostroke.server.openai.schemas.common import CHANGES, GenerateBody
from twostroke.server.openai.schemas.completions import CompletionBody
from twostroke.server.openai.schemas.responses import ResponsesBody

OWN = {"max_tokens", "logprobs", "constraint", "reader"}
SHARED = [name for name in rules(SamplingParams) if name not in OWN]


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, ResponsesBody])
def test_every_sampling_field_is_in_every_body(body: type[GenerateBody]) -> None:
    shown: dict[str, dict[str, Any]] = body.model_json_schema()["properties"]
    assert {name: shown[name]["description"] for name in SHARED} == {
        name: rules(SamplingParams)[name].help for name in SHARED
    }
    unchanged = [name for name in SHARED if not CHANGES.get(name) and "default" in shown[name]]
    assert {name: shown[name]["default"] for name in unchanged} == {
        name: getattr(SamplingParams, name) for name in unchanged
    }


def test_ranges() -> None:
    shown: dict[str, dict[str, Any]] = CompletionBody.model_json_schema()["properties"]
    ranges = {
        name: {key: facts[key] for key in ("minimum", "maximum", "exclusiveMinimum") if key in facts}
        for name, facts in shown.items()
    }
    assert ranges["temperature"] == {"minimum": 0}
    assert ranges["top_p"] == {"exclusiveMinimum": 0, "maximum": 1}
    assert ranges["min_p"] == {"minimum": 0, "maximum": 1}
    assert ranges["top_k"] == {"minimum": -1, "maximum": (1 << 63) - 1}
    assert ranges["repetition_penalty"] == {"exclusiveMinimum": 0}
    assert ranges["presence_penalty"] == ranges["frequency_penalty"] == {"minimum": -2, "maximum": 2}
    assert ranges["n"] == {"minimum": 1, "maximum": 1024}
    assert shown["max_tokens"]["anyOf"][0]["minimum"] == 0, "0 scores the prompt alone"
    assert ChatBody.model_json_schema()["properties"]["max_tokens"]["anyOf"][0]["minimum"] == 1
    assert shown["temperature"]["default"] == 1.0, "as OpenAI has it"
    assert shown["stop"]["maxItems"] == 64
    assert shown["stop"]["items"] == {"minLength": 1, "maxLength": 1000, "type": "string"}
