# /// script
# dependencies = ["instructor==1.17.0", "anthropic==2.14.0"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""Every mode for OpenAI's and Anthropic's APIs: tools, JSON, parallel tools; partial and iterable answers."""

import os
import warnings
from collections.abc import Iterable

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Weather(BaseModel):
    """The current weather of a city."""

    city: str


told = [{"role": "user", "content": "Alice is 31 years old."}]
warnings.simplefilter("ignore", DeprecationWarning)  # of modes that have newer names

for mode in (
    Mode.FUNCTIONS,
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.JSON,
    Mode.JSON_O1,
    Mode.JSON_SCHEMA,
    Mode.MD_JSON,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
):
    client = instructor.from_openai(OpenAI(), mode=mode)
    person = client.create(Person, told, model=MODEL, temperature=0, max_retries=0)
    assert (person.name, person.age) == ("Alice", 31), mode

for mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS, Mode.ANTHROPIC_JSON):
    client = instructor.from_anthropic(Anthropic(), mode=mode)
    person = client.create(Person, told, model=MODEL, max_tokens=64, max_retries=0, extra_body={"temperature": 0})
    assert (person.name, person.age) == ("Alice", 31), mode

asked = [{"role": "user", "content": "What is the weather in Paris, and what is the weather in London?"}]
for client in (
    instructor.from_openai(OpenAI(), mode=Mode.PARALLEL_TOOLS),
    instructor.from_anthropic(Anthropic(), mode=Mode.ANTHROPIC_PARALLEL_TOOLS),
):
    calls = client.create(Iterable[Weather | Person], asked, model=MODEL, max_tokens=128, extra_body={"temperature": 0})
    assert [call.city for call in calls] == ["Paris", "London"]

client = instructor.from_provider(f"openai/{MODEL}")
*_, person = client.create_partial(Person, told, model=MODEL, temperature=0)
assert (person.name, person.age) == ("Alice", 31)
both = [{"role": "user", "content": "Alice is 31 years old. Bob is 25 years old."}]
people = client.create_iterable(both, Person, model=MODEL, temperature=0)
assert [(person.name, person.age) for person in people] == [("Alice", 31), ("Bob", 25)]
